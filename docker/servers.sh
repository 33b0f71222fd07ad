#!/usr/bin/env bash
# Prints where the services of the running compose cluster listen, as `gantry --server` takes it.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${COMPOSE:-}" ]; then
    if docker compose version >/dev/null 2>&1; then COMPOSE="docker compose"; else COMPOSE=docker-compose; fi
fi
servers=
for service in scheduler artifacts:artifact-store streamer door; do
    servers+=${servers:+,}${service%%:*}=http://$($COMPOSE port "${service##*:}" 7100)
done
echo "$servers"

#!/usr/bin/env bash
# Prints where the services of the compose cluster listen.
#
#   docker/servers.sh             one address of each service, as it is now: a container that was started again may be elsewhere
#   docker/servers.sh --ranges    all ports that a service may be at, which `gantry --server` takes: that stays right
set -euo pipefail
cd "$(dirname "$0")/.."
servers=
case ${1:-} in
--ranges)
    ports=(
        "scheduler:${SCHEDULER_PORTS:-7110-7119}" "artifacts:${ARTIFACT_STORE_PORTS:-7120-7129}"
        "streamer:${STREAMER_PORTS:-7130-7139}" "door:${DOOR_PORTS:-7140-7149}"
    )
    for service in "${ports[@]}"; do
        servers+=${servers:+,}${service%%:*}=http://127.0.0.1:${service##*:}
        # At ports that two clusters share, one would be taken for the other.
        projects=$(${DOCKER:-docker} ps --filter "publish=${service##*:}" --format '{{.Label "com.docker.compose.project"}}' | sort -u)
        if [ "$(grep -c . <<<"$projects")" -gt 1 ]; then
            echo "at the ports ${service##*:} are containers of several clusters:" $projects >&2
            echo "give one of them other ports: SCHEDULER_PORTS, ARTIFACT_STORE_PORTS, STREAMER_PORTS, DOOR_PORTS" >&2
            exit 1
        fi
    done
    ;;
"")
    if [ -z "${COMPOSE:-}" ]; then
        if docker compose version >/dev/null 2>&1; then COMPOSE="docker compose"; else COMPOSE=docker-compose; fi
    fi
    for service in scheduler artifacts:artifact-store streamer door; do
        servers+=${servers:+,}${service%%:*}=http://$($COMPOSE port "${service##*:}" 7100)
    done
    ;;
*)
    echo "usage: $0 [--ranges]" >&2
    exit 2
    ;;
esac
echo "$servers"

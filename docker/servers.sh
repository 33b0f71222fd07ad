#!/usr/bin/env bash
# Prints where the services of the compose cluster listen, or the file with the token that callers present.
#
#   docker/servers.sh             one address of each service, as it is now: a container that was started again may be elsewhere
#   docker/servers.sh --ranges    all ports that a service may be at, which `gantry --server` takes: that stays right
#   docker/servers.sh --token     copies the token out of the cluster, into a file that only this user may read, and prints its path
#
#   export GANTRY_SERVER="$(docker/servers.sh --ranges)" GANTRY_TOKEN_FILE="$(docker/servers.sh --token)"
set -euo pipefail
cd "$(dirname "$0")/.."
servers=
docker=${DOCKER:-docker}
find_compose() {
    if [ -n "${COMPOSE:-}" ]; then return; fi
    if docker compose version >/dev/null 2>&1; then COMPOSE="docker compose"; else COMPOSE=docker-compose; fi
}
case ${1:-} in
--ranges)
    ports=(
        "scheduler:${SCHEDULER_PORTS:-7110-7119}" "artifacts:${ARTIFACT_STORE_PORTS:-7120-7129}"
        "streamer:${STREAMER_PORTS:-7130-7139}" "proxy:${PROXY_PORTS:-7140-7149}"
    )
    for service in "${ports[@]}"; do
        servers+=${servers:+,}${service%%:*}=http://127.0.0.1:${service##*:}
        # At ports that two clusters share, one would be taken for the other.
        projects=$($docker ps --filter "publish=${service##*:}" --format '{{.Label "com.docker.compose.project"}}' | sort -u)
        if [ "$(grep -c . <<<"$projects")" -gt 1 ]; then
            echo "at the ports ${service##*:} are containers of several clusters:" $projects >&2
            echo "give one of them other ports: SCHEDULER_PORTS, ARTIFACT_STORE_PORTS, STREAMER_PORTS, PROXY_PORTS" >&2
            exit 1
        fi
    done
    ;;
"")
    find_compose
    for service in scheduler artifacts:artifact-store streamer proxy; do
        servers+=${servers:+,}${service%%:*}=http://$($COMPOSE port "${service##*:}" 7100)
    done
    ;;
--token)
    find_compose
    container=$($COMPOSE ps -q scheduler | sed -n 1p)
    if [ -z "$container" ]; then
        echo "cannot copy the token: no scheduler runs; start the cluster with \`up -d\`" >&2
        exit 1
    fi
    project=$($docker inspect --format '{{index .Config.Labels "com.docker.compose.project"}}' "$container")
    directory=${XDG_STATE_HOME:-$HOME/.local/state}/gantry-compose/$project
    umask 077
    mkdir -p "$directory"
    new=$(mktemp "$directory/token.XXXXXX")
    trap 'rm -f "$new"' EXIT
    # The images of the services have no shell and no other program.
    $docker cp "$container:/var/lib/gantry-services/token" - | tar -xO >"$new"
    mv "$new" "$directory/token"
    echo "$directory/token"
    exit
    ;;
*)
    echo "usage: $0 [--ranges | --token]" >&2
    exit 2
    ;;
esac
echo "$servers"
if [ -z "${GANTRY_TOKEN_FILE:-}" ]; then
    echo 'callers present the token of the cluster: export GANTRY_TOKEN_FILE="$(docker/servers.sh --token)"' >&2
fi

#!/usr/bin/env bash
# Test of compose.yaml: starts it with images of the current binaries, and runs jobs on it.
#
# If no container engine answers, one is started and stopped afterwards. Missing base images are made from Debian packages.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD

integration-tests/setup.sh compose
# The client of the engine supports BuildKit. Another client may lack the plugin.
docker=docker
[ -x /usr/bin/docker ] && docker=/usr/bin/docker
export DOCKER=$docker
if [ -z "${COMPOSE:-}" ]; then
    if docker compose version >/dev/null 2>&1; then COMPOSE="docker compose"; else COMPOSE=docker-compose; fi
fi
export COMPOSE
export COMPOSE_PROJECT_NAME=gantry-it-$$
export GANTRY_IMAGES=gantry-it
# Ports that differ from the defaults, which another cluster on this machine may use.
export SCHEDULER_PORTS=7310-7319 ARTIFACT_STORE_PORTS=7320-7329 STREAMER_PORTS=7330-7339 PROXY_PORTS=7340-7349
# With this limit, a second job runs on another worker.
export WORKER_MAX_TASKS=1
work=$(mktemp -d)
engine=
garden=
say() { echo "compose: $*"; }

end() {
    local status=$?
    if [ $status -ne 0 ]; then
        $COMPOSE ps || true
        $COMPOSE logs --no-color --tail 40 || true
    fi
    if [ -n "$garden" ]; then
        # The process ends with its input, while its address still exists.
        exec {wanted}>&-
        wait "$garden" || true
    fi
    $COMPOSE down --volumes --timeout 10 >/dev/null 2>&1 || true
    if [ -n "$engine" ]; then
        kill "$engine" 2>/dev/null || true
        wait "$engine" 2>/dev/null || true
    fi
    rm -rf "$work"
    [ $status -eq 0 ] && say "passed" || say "failed"
    return $status
}
trap end EXIT

until_true() { # until_true WHAT SECONDS COMMAND…
    local what=$1 deadline=$((SECONDS + $2))
    shift 2
    until "$@"; do
        if [ $SECONDS -ge $deadline ]; then
            echo "compose: timeout while waiting for $what" >&2
            return 1
        fi
        sleep 0.2
    done
}

if ! $docker info >/dev/null 2>&1; then
    dockerd >"$work/dockerd.log" 2>&1 &
    engine=$!
    answers() { $docker info >/dev/null 2>&1; }
    until_true "an engine" 60 answers || {
        cat "$work/dockerd.log"
        exit 1
    }
fi

docker/base-images.sh debian postgres

# The images have the binaries of the other tests.
cargo build --workspace --bins --locked
mkdir -p "$work/binaries/out/bin" "$work/binaries/out/tmp" "$work/binaries/out/certs"
touch "$work/binaries/out/certs/ca-certificates.crt"
for program in scheduler artifact-store streamer runtime-gateway gantry; do
    strip --strip-debug -o "$work/binaries/out/bin/$program" "target/debug/$program"
done
printf 'FROM scratch\nCOPY out /out\n' >"$work/binaries/Dockerfile"
$docker build --quiet -t gantry-it/binaries "$work/binaries" >/dev/null
for target in scheduler artifact-store streamer runtime-gateway worker; do
    DOCKER_BUILDKIT=1 $docker build --quiet -f docker/Dockerfile --target "$target" \
        --build-arg BINARIES=gantry-it/binaries --build-arg SERVICE_IMAGE=debian:bookworm-slim \
        -t "gantry-it/$target" . >/dev/null
done

# Metadata of each image: user (only a worker runs as root), stop signal, title and health check.
for target in scheduler artifact-store streamer runtime-gateway worker; do
    user=65532:65532
    [ $target != worker ] || user=
    expected="$user|SIGTERM|gantry $target|health"
    labels=$($docker image inspect "gantry-it/$target" --format \
        '{{.Config.User}}|{{.Config.StopSignal}}|{{index .Config.Labels "org.opencontainers.image.title"}}|{{index .Config.Healthcheck.Test 2}}')
    [ "$labels" = "$expected" ] || {
        echo "compose: image $target has the metadata $labels instead of $expected" >&2
        exit 1
    }
done

# health SERVICE: prints the health of each container
health() { $COMPOSE ps -q "$1" | xargs $docker inspect --format '{{.State.Health.Status}}'; }
healthy() { # healthy SERVICE COUNT
    [ "$(health "$1" 2>/dev/null | grep -cx healthy)" -eq "$2" ]
}
all_healthy() { # all_healthy COUNT WORKERS
    local service
    for service in scheduler artifact-store streamer proxy; do healthy $service "$1" || return 1; done
    [ -z "$garden" ] || healthy garden 1 || return 1
    healthy postgres 1 && healthy worker "$2"
}

started=$(date +%s.%N)
$COMPOSE up -d --no-build >"$work/up.log" 2>&1 || {
    cat "$work/up.log"
    exit 1
}
until_true "a healthy cluster" 30 all_healthy 1 2
say "healthy after $(echo "$(date +%s.%N) - $started" | bc | cut -c1-4) s"

# The addresses do not change, so they are read once.
GANTRY_SERVER=$(docker/servers.sh --ranges 2>"$work/hint")
grep -q 'docker/servers.sh --token' "$work/hint" || {
    echo "servers.sh does not print how to get the token: $(cat "$work/hint")" >&2
    exit 1
}
export XDG_STATE_HOME=$work/state
GANTRY_TOKEN_FILE=$(docker/servers.sh --token)
export GANTRY_SERVER GANTRY_TOKEN_FILE
gantry() { "$root/target/debug/gantry" "$@"; }

# Every port requires the token, which only this user may read.
[ "$(stat -c %a "$GANTRY_TOKEN_FILE")" = 600 ] || {
    echo "other users may read $GANTRY_TOKEN_FILE" >&2
    exit 1
}
for service in scheduler artifact-store streamer proxy; do
    address=$($COMPOSE port $service 7100)
    if env -i "XDG_STATE_HOME=$work/state" target/debug/scheduler health --service liveness --server "http://$address" 2>"$work/refused" ||
        ! grep -q 'present the token' "$work/refused"; then
        echo "$service at $address answers without a token: $(cat "$work/refused")" >&2
        exit 1
    fi
done
say "no service answers without the token"

mkdir -p "$work/src" && echo content >"$work/src/file"
main_job() { # main_job NAME: uploads, runs, downloads, and exits with the code of the command
    local code=0
    rm -rf "$work/out"
    gantry run --no-stdin -i "src=$work/src" -o "report=$work/out" -- \
        sh -c 'cat src/file; wc -l < src/file > report/lines; exit 3' >"$work/stdout" 2>"$work/stderr" || code=$?
    if [ $code -ne 3 ] || [ "$(cat "$work/stdout")" != content ] || [ "$(cat "$work/out/lines")" != 1 ]; then
        cat "$work/stdout" "$work/stderr"
        return 1
    fi
    say "the main job: $1"
}

# Workloads cannot read the token.
unseen() { # unseen: checks that a command in the host image finds no token
    gantry run --no-stdin -- sh -c 'ls /var/lib/gantry-services; cat /var/lib/gantry-services/token; test ! -e /var/lib/gantry-services/token' \
        >"$work/unseen" 2>&1 && ! grep -qF "$(cat "$GANTRY_TOKEN_FILE")" "$work/unseen"
}

workers() { # workers COUNT: checks that COUNT workers are in contact
    [ "$(gantry list workers --json | jq -s '[.[] | select(.state == "running")] | length')" -eq "$1" ]
}
until_true "two workers" 60 workers 2
main_job "on a new cluster"
unseen || {
    echo "a container can read the token of the cluster: $(cat "$work/unseen")" >&2
    exit 1
}
say "containers do not see the token"

# The output of one worker is an input on the other: while the first worker is busy, the second job runs elsewhere.
placed_on() { jq -r 'select(.event == "placed") | .location.worker_name' "$1"; }
gantry --json run --no-stdin -o made -- sh -c 'head -c 3000000 /dev/urandom > made/bytes; sha256sum < made/bytes > made/sum' >"$work/first"
artifact=$(jq -r 'select(.event == "finished") | .outputs[0].artifact_id' "$work/first")
first=$(placed_on "$work/first")
gantry --json run -d -i "made=artifact:$artifact" -- sleep 300 >"$work/blocker"
blocker=$(jq -r 'select(.event == "submitted") | .workload_id' "$work/blocker")
runs() { [ "$(gantry show workload "$blocker" --json | jq -r .state)" = running ]; }
until_true "a busy worker" 60 runs
gantry --json run --no-stdin -i "made=artifact:$artifact" -- sh -c 'sha256sum < made/bytes | cmp - made/sum' >"$work/second"
second=$(placed_on "$work/second")
gantry cancel --grace 0s "$blocker" >/dev/null
[ "$first" != "$second" ] || {
    echo "both jobs ran on $first"
    exit 1
}
say "what $first made was used on $second"

# A client in another language, with one address of each service.
GANTRY_SERVER=$(docker/servers.sh) integration-tests/clients/python/run "$work/src" >"$work/python" 2>&1 || {
    cat "$work/python"
    exit 1
}
say "a caller in Python"

# From here on, GARDEN and BAGGAGECLAIM add a Garden worker: fake servers at the address of this machine in the network of the cluster.
host=$($docker network inspect --format '{{(index .IPAM.Config 0).Gateway}}' "${COMPOSE_PROJECT_NAME}_default")
mkfifo "$work/wanted"
exec {wanted}<>"$work/wanted"
target/debug/garden_worker --listen "$host" concourse <"$work/wanted" >"$work/registered" {wanted}>&- &
garden=$!
listens() { [ -s "$work/registered" ]; }
until_true "a Garden server" 60 listens
GARDEN=$(jq -r '.[0].addr' "$work/registered")
BAGGAGECLAIM=$(jq -r '.[0].baggageclaim_url' "$work/registered")
BAGGAGECLAIM=${BAGGAGECLAIM#http://}
export GARDEN BAGGAGECLAIM GARDEN_NAME=concourse GARDEN_TAGS=garden
$COMPOSE up -d --no-build >"$work/up.log" 2>&1 || {
    cat "$work/up.log"
    exit 1
}
until_true "a healthy gateway of a Garden worker" 120 all_healthy 1 2
until_true "three workers" 60 workers 3
# The fake servers mount directories of this machine over the empty directories of an image.
mkdir -p "$work"/image/rootfs/{usr,bin,sbin,lib,lib64,dev,proc,tmp,etc}
echo 'root:x:0:0::/root:/bin/sh' >"$work/image/rootfs/etc/passwd"
echo '{"env": ["OF=the image"]}' >"$work/image/metadata.json"
image=$(gantry upload "$work/image")
gantry --json run --no-stdin --tag garden --image "artifact:$image" -i "made=artifact:$artifact" -o again -- \
    sh -c 'sha256sum < made/bytes | cmp - made/sum && cp made/bytes made/sum again/ && echo "$OF" > again/of' >"$work/third"
third=$(placed_on "$work/third")
again=$(jq -r 'select(.event == "finished") | .outputs[0].artifact_id' "$work/third")
gantry --json run --no-stdin -i "again=artifact:$again" -- \
    sh -c 'sha256sum < again/bytes | cmp - again/sum && [ "$(cat again/of)" = "the image" ]' >"$work/fourth"
fourth=$(placed_on "$work/fourth")
[ "$third" = concourse ] && [ "$fourth" != concourse ] || {
    echo "the jobs ran on $third and $fourth"
    exit 1
}
say "what $first made was used on the Garden worker, and what that made on $fourth"

# More replicas of each service.
$COMPOSE up -d --no-build --scale scheduler=2 --scale artifact-store=2 --scale streamer=2 --scale proxy=2 --scale worker=3 >"$work/up.log" 2>&1 || {
    cat "$work/up.log"
    exit 1
}
until_true "a healthy cluster of more" 120 all_healthy 2 3
until_true "four workers" 60 workers 4
main_job "with two of each service and three host workers"

# A killed container restarts, and the cluster survives. (`docker kill` would prevent the restart.)
for service in scheduler artifact-store streamer proxy worker garden postgres; do
    container=$($COMPOSE ps -q $service | sed -n 1p)
    before=$($docker inspect --format '{{.State.StartedAt}}' "$container")
    kill -9 "$($docker inspect --format '{{.State.Pid}}' "$container")"
    restarted() { [ "$($docker inspect --format '{{.State.Running}} {{.State.StartedAt}}' "$container")" != "true $before" ] && [ "$($docker inspect --format '{{.State.Health.Status}}' "$container")" = healthy ]; }
    until_true "$service to come back" 60 restarted
done
until_true "four workers again" 60 workers 4
main_job "after one container of each service was killed"

# Containers also end normally.
$COMPOSE stop --timeout 20 >/dev/null 2>&1
for container in $($COMPOSE ps -q scheduler artifact-store streamer proxy worker garden); do
    code=$($docker inspect --format '{{.State.ExitCode}}' "$container")
    [ "$code" -eq 0 ] || {
        echo "$($docker inspect --format '{{.Name}}' "$container") ended with exit code $code"
        exit 1
    }
done
say "every service ended in order"
for image in scheduler artifact-store streamer runtime-gateway worker; do
    say "image $image: $($docker image inspect --format '{{.Size}}' "gantry-it/$image" | numfmt --to=si)"
done

#!/usr/bin/env bash
# Runs the clients of the named languages, or of all languages: run.sh [go|python|typescript|java|rust|grpcurl]…
# Each client runs against two clusters. One has the four services as separate processes with a proxy and two workers, and an
# address for each service. The other is `gantry up` with one address for all services. The CI cores in Go and Python also run on a
# Concourse worker of a third cluster, whose containers are made by the Garden server in ../garden-server.
# Downloads are kept in the usual caches of the tools.
set -uo pipefail
cd "$(dirname "$0")"
root=$(realpath ../..)
languages=("$@")
[ $# -gt 0 ] || languages=(go python typescript java rust grpcurl)
export PATH="$root/target/tools/node_modules/.bin:$root/target/tools/bin:$PATH"
# Dependencies that the client shares with Gantry are built once.
export CARGO_TARGET_DIR=$root/target

missing=()
need() { # need COMMAND HOW-TO-GET-IT
    command -v "$1" >/dev/null 2>&1 || missing+=("$1: $2")
}
for language in "${languages[@]}"; do
    case $language in
    go)
        need go 'Go 1.26, https://go.dev/dl'
        need buf 'make client-tools'
        ;;
    python)
        need go 'Go 1.26, https://go.dev/dl, for the Garden server of its CI core'
        need python3 'Debian package python3'
        python3 -c 'import venv, ensurepip' 2>/dev/null || missing+=("venv: Debian package python3-venv")
        ;;
    typescript)
        need node 'Debian package nodejs'
        need npm 'Debian package npm'
        need buf 'make client-tools'
        ;;
    java)
        need javac 'Debian package default-jdk-headless'
        need mvn 'Debian package maven'
        ;;
    rust) need cargo 'https://rustup.rs' ;;
    grpcurl)
        need grpcurl 'make client-tools'
        need python3 'Debian package python3'
        ;;
    *)
        echo "unknown language $language; supported: go, python, typescript, java, rust, grpcurl" >&2
        exit 2
        ;;
    esac
done
if [ ${#missing[@]} -gt 0 ]; then
    echo "missing for the clients:" >&2
    printf '  %s\n' "${missing[@]}" >&2
    exit 1
fi

programs=${PROGRAMS:-$root/target/debug}
for program in gantry suite garden_worker scheduler artifact-store streamer runtime-gateway; do
    if [ ! -x "$programs/$program" ]; then
        echo "cannot find $programs/$program; run: cargo build --workspace --bins" >&2
        exit 1
    fi
done
scratch=$(mktemp -d)
clusters=()
cleanup() {
    # The suite ends when its input ends. `gantry up` ends on request.
    exec {wanted}>&-
    for cluster in "${clusters[@]}"; do
        kill -TERM "$cluster" 2>/dev/null
        wait "$cluster"
    done
    rm -rf "$scratch"
}
mkfifo "$scratch/wanted"
exec {wanted}<>"$scratch/wanted"
trap cleanup EXIT

export XDG_STATE_HOME=$scratch/state XDG_RUNTIME_DIR=$scratch/run
mkdir -m 700 "$XDG_STATE_HOME" "$XDG_RUNTIME_DIR"
# start NAME COMMAND…: starts a cluster, which prints a line of JSON when it is ready.
start() {
    local name=$1
    shift
    mkfifo "$scratch/$name.announces"
    # The process must not hold the other end of its own input.
    "$@" <"$scratch/wanted" >"$scratch/$name.announces" 2>"$scratch/$name.log" {wanted}>&- &
    clusters+=($!)
    if ! read -r -t 120 announced <"$scratch/$name.announces"; then
        echo "cannot start the cluster:" >&2
        cat "$scratch/$name.log" >&2
        exit 1
    fi
}
field() { python3 -c 'import json, sys; print(eval(sys.argv[1], {"cluster": json.loads(sys.argv[2])}))' "$1" "$announced"; }
# Its workers accept calls only through the proxy.
start services "$programs/suite" --walled
services=$(field 'cluster["server"]') services_token=$(field 'cluster["token_file"]')
start one "$programs/gantry" --json up --listen 127.0.0.1:0
one=$(field 'cluster["endpoints"][1]') one_token=$(field 'cluster["token_file"]')
# The Garden server is genuine, and the Baggageclaim server is a fake. Containers show programs of this machine in empty directories of
# their image.
has_ci=
for language in "${languages[@]}"; do case $language in go | python) has_ci=yes ;; esac; done
if [ -n "$has_ci" ]; then
    (cd ../garden-server && go build -o "$scratch/garden-server" .) || exit 1
    start garden_server "$scratch/garden-server"
    garden_server=$announced
    start garden_worker "$programs/garden_worker" garden
    python3 -c 'import json, sys; [worker] = json.loads(sys.argv[1]); print(json.dumps([worker | {"addr": sys.argv[2]}]))' \
        "$announced" "$garden_server" >"$scratch/workers.json"
    mkdir -m 700 "$scratch/garden"
    start garden env XDG_STATE_HOME="$scratch/garden" XDG_RUNTIME_DIR="$scratch/garden" \
        GANTRY_WORKERS_FILE="$scratch/workers.json" "$programs/gantry" --json up --listen 127.0.0.1:0
    garden=$(field 'cluster["endpoints"][1]') garden_token=$(field 'cluster["token_file"]')
    on_garden() { GANTRY_SERVER=$garden GANTRY_TOKEN_FILE=$garden_token "$@"; }
    until on_garden "$programs/gantry" list workers | grep -q '^garden *running'; do sleep 0.2; done
    mkdir -p "$scratch/image/rootfs/"{usr,bin,sbin,lib,lib64,dev,proc,tmp,etc}
    echo 'root:x:0:0::/root:/bin/sh' >"$scratch/image/rootfs/etc/passwd"
    image=$(on_garden "$programs/gantry" upload "$scratch/image" 2>/dev/null) || exit 1
fi

# The uploaded directory: files with all byte values, links to a file, to a directory and to a missing path, and a program.
cp -r golden "$scratch/tree"
mkdir "$scratch/tree/below"
printf '#!/bin/sh\n' >"$scratch/tree/below/program"
chmod +x "$scratch/tree/below/program"
ln -s below/program "$scratch/tree/link"
ln -s below "$scratch/tree/directory"
ln -s nowhere "$scratch/tree/below/dangling"
here=$PWD

# scenario LANGUAGE SERVER TOKEN-FILE: runs the client to its last line, with a path relative to the current directory.
scenario() {
    (cd "$scratch" && GANTRY_SERVER=$2 GANTRY_TOKEN_FILE=$3 timeout 900 "$here/$1/run" tree) | tee "$scratch/said"
    grep -q '^explained: never, unless ' "$scratch/said"
}
# core LANGUAGE SERVER TOKEN-FILE [SETTING…]: runs the CI core of the client to its last line.
core() {
    local language=$1 server=$2 token=$3
    shift 3
    env GANTRY_SERVER="$server" GANTRY_TOKEN_FILE="$token" "$@" timeout 900 "./$language/run" ci | tee "$scratch/said"
    grep -q '^ci core: 5 builds, ok$' "$scratch/said"
}
# cores LANGUAGE: runs the CI core, if the client has one, on host workers of both clusters and on a Concourse worker.
cores() {
    case $1 in
    go | python)
        core "$1" "$services" "$services_token" && core "$1" "$one" "$one_token" &&
            core "$1" "$garden" "$garden_token" GANTRY_CI_TAGS=garden GANTRY_CI_IMAGE="$image"
        ;;
    esac
}
# An environment without the tools of any client.
mkdir "$scratch/tools"
for tool in cat dirname realpath; do ln -s "$(command -v $tool)" "$scratch/tools/"; done

# turned_away STATUS PHRASE COMMAND…: expects the command to fail at once with this status and phrase.
turned_away() {
    local status=$1 phrase=$2 said
    shift 2
    said=$(timeout 60 "$@" 2>&1)
    [ $? -eq "$status" ] && [[ $said == *"$phrase"* ]] || { echo "$* says: $said" && false; }
}
checks() {
    turned_away 2 "usage: " "./$1/run" &&
        turned_away 1 "GANTRY_SERVER: the address" env -u GANTRY_SERVER "./$1/run" golden &&
        turned_away 1 "nowhere: the directory does not exist" env GANTRY_SERVER=http://127.0.0.1:1 "./$1/run" nowhere &&
        turned_away 1 "$1/run cannot run:" env "PATH=$scratch/tools" "./$1/run" test
}
# Tests of each language: decode the golden corpus, and run the scenario with both forms of the setting.
call() {
    case $1 in
    grpcurl)
        GANTRY_SERVER=$services GANTRY_TOKEN_FILE=$services_token timeout 600 ./grpcurl/run &&
            GANTRY_SERVER=$one GANTRY_TOKEN_FILE=$one_token timeout 600 ./grpcurl/run
        ;;
    *) checks "$1" && timeout 900 "./$1/run" test && scenario "$1" "$services" "$services_token" && scenario "$1" "$one" "$one_token" && cores "$1" ;;
    esac
}

status=0
for language in "${languages[@]}"; do
    started=$SECONDS
    if call "$language" >"$scratch/$language" 2>&1; then result=ok; else result=failed; fi
    echo "$language: $((SECONDS - started)) s, $result"
    if [ "$result" != ok ] || [ -n "${VERBOSE:-}" ]; then
        sed 's/^/    /' "$scratch/$language"
        [ "$result" = ok ] || status=1
    fi
done
if [ $status -ne 0 ]; then
    tail -n 50 "$scratch"/*.log
fi
exit $status

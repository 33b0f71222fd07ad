#!/usr/bin/env bash
# Runs the clients of the languages that are named, or of all, against a cluster of their own:
# run.sh [go|python|typescript|java|rust|grpcurl]…
# What they download goes into the ordinary caches of their tools.
set -uo pipefail
cd "$(dirname "$0")"
root=$(realpath ../..)
languages=("$@")
[ $# -gt 0 ] || languages=(go python typescript java rust grpcurl)
export PATH="$root/target/tools/node_modules/.bin:$root/target/tools/bin:$PATH"
# What the client has in common with Gantry itself is built once.
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
        echo "no client in $language; there are go, python, typescript, java, rust, and grpcurl" >&2
        exit 2
        ;;
    esac
done
if [ ${#missing[@]} -gt 0 ]; then
    echo "missing for the clients:" >&2
    printf '  %s\n' "${missing[@]}" >&2
    exit 1
fi

gantry=${GANTRY:-$root/target/debug/gantry}
if [ ! -x "$gantry" ]; then
    echo "there is no $gantry: cargo build -p gantry" >&2
    exit 1
fi
scratch=$(mktemp -d)
cluster=
cleanup() {
    if [ -n "$cluster" ]; then
        kill -TERM "$cluster" 2>/dev/null
        wait "$cluster"
    fi
    rm -rf "$scratch"
}
trap cleanup EXIT


export XDG_STATE_HOME=$scratch/state XDG_RUNTIME_DIR=$scratch/run
mkdir -m 700 "$XDG_STATE_HOME" "$XDG_RUNTIME_DIR"
mkfifo "$scratch/announced"
"$gantry" --json up --listen 127.0.0.1:0 >"$scratch/announced" 2>"$scratch/log" &
cluster=$!
if ! read -r -t 120 announced <"$scratch/announced"; then
    echo "the cluster does not start:" >&2
    cat "$scratch/log" >&2
    exit 1
fi
field() { python3 -c 'import json, sys; print(eval(sys.argv[1], {"cluster": json.loads(sys.argv[2])}))' "$1" "$announced"; }
GANTRY_SERVER=$(field 'cluster["endpoints"][1]')
GANTRY_TOKEN_FILE=$(field 'cluster["token_file"]')
export GANTRY_SERVER GANTRY_TOKEN_FILE

# What each language has to do: decode the golden corpus, and the scenario, to its last line.
call() {
    case $1 in
    grpcurl) ./grpcurl/run ;;
    *) "./$1/run" test && "./$1/run" "$PWD/golden" | tee "$scratch/said" && grep -q '^explained: never, unless ' "$scratch/said" ;;
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
    echo "--- the cluster's log ---"
    tail -n 50 "$scratch/log"
fi
exit $status

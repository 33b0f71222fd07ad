# shellcheck shell=sh
# Checks of every `run` before it downloads or builds anything: arguments, settings and tools. All missing items are reported
# together. Afterwards `$directory` is the absolute path of the directory, or empty for `test` and `ci`. A client with a CI core
# sets `has_ci`.

missing=
lacks() { # lacks WHAT
    missing="$missing  $1
"
}
need() { # need COMMAND HOW-TO-GET-IT
    command -v "$1" >/dev/null 2>&1 || lacks "$1: $2"
}

if [ $# -ne 1 ] || [ "$1" = --help ]; then
    cat >&2 <<USAGE
usage: GANTRY_SERVER=… [GANTRY_TOKEN_FILE=…] $0 DIRECTORY${has_ci:+
       GANTRY_SERVER=… [GANTRY_TOKEN_FILE=…] [GANTRY_CI_IMAGE=…] [GANTRY_CI_TAGS=…] $0 ci}
       $0 test

The client uploads DIRECTORY, copies it with a workload, and downloads the copy. test decodes the golden corpus without any call.${has_ci:+
ci runs five builds with a small CI core.}

GANTRY_SERVER      http://127.0.0.1:7400 (gantry up --listen 127.0.0.1:7400), or "\$(docker/servers.sh)" (compose)
GANTRY_TOKEN_FILE  the file that gantry up prints, or "\$(docker/servers.sh --token)" (compose)
GANTRY_TEAM        the team; default: main${has_ci:+
GANTRY_CI_IMAGE    the id of an artifact with a root file system for the steps; default: the programs of the worker
GANTRY_CI_TAGS     the tags of the worker, separated by spaces; default: a worker without tags}
USAGE
    exit 2
fi

directory=
if [ "$1" != test ]; then
    if [ -z "${has_ci:-}" ] || [ "$1" != ci ]; then
        if [ -d "$1" ]; then directory=$(realpath "$1"); else lacks "$1: the directory does not exist"; fi
    fi
    case ${GANTRY_SERVER:-} in
    '') lacks 'GANTRY_SERVER: the address of the services is not set; run without arguments for the usage' ;;
    *=*)
        for service in scheduler artifacts streamer; do
            case ,$GANTRY_SERVER in
            *,$service=http://*) ;;
            *) lacks "GANTRY_SERVER: $service=http://… is missing" ;;
            esac
        done
        ;;
    http://*) ;;
    *) lacks "GANTRY_SERVER: $GANTRY_SERVER does not have the form http://host:port" ;;
    esac
    if printf %s "${GANTRY_SERVER:-}" | grep -Eq ':[0-9]+-[0-9]'; then
        lacks 'GANTRY_SERVER: only gantry supports port ranges; export GANTRY_SERVER="$(docker/servers.sh)"'
    fi
    if [ -n "${GANTRY_TOKEN_FILE:-}" ]; then
        if [ -r "$GANTRY_TOKEN_FILE" ]; then
            GANTRY_TOKEN_FILE=$(realpath "$GANTRY_TOKEN_FILE")
        else
            lacks "GANTRY_TOKEN_FILE: cannot read $GANTRY_TOKEN_FILE"
        fi
    else
        unset GANTRY_TOKEN_FILE
    fi
fi

# begin: enters the directory of the client if nothing is missing.
begin() {
    if [ -n "$missing" ]; then
        printf '%s cannot run:\n%s' "$0" "$missing" >&2
        exit 1
    fi
    cd "$(dirname "$0")"
}

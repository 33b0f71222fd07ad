# shellcheck shell=sh
# What every `run` does first, before anything is fetched or built: it looks at the arguments, at the settings and at the tools, and says all
# that is missing at once. Afterwards `$directory` is the directory, wherever the caller stands, or empty for `test`.

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
usage: GANTRY_SERVER=… [GANTRY_TOKEN_FILE=…] $0 DIRECTORY
       $0 test

DIRECTORY is uploaded, copied by a job, and downloaded again. test decodes the golden corpus and calls nobody.

GANTRY_SERVER      http://127.0.0.1:7400 (gantry up --listen 127.0.0.1:7400), or "\$(docker/servers.sh)" (compose)
GANTRY_TOKEN_FILE  the file that gantry up names, or "\$(docker/servers.sh --token)" (compose)
GANTRY_TEAM        on whose behalf; main if it is not set
USAGE
    exit 2
fi

directory=
if [ "$1" != test ]; then
    if [ -d "$1" ]; then directory=$(realpath "$1"); else lacks "$1: there is no such directory"; fi
    case ${GANTRY_SERVER:-} in
    '') lacks 'GANTRY_SERVER: where the services listen; without arguments, this says how to set it' ;;
    *=*)
        for service in scheduler artifacts streamer; do
            case ,$GANTRY_SERVER in
            *,$service=http://*) ;;
            *) lacks "GANTRY_SERVER: $service=http://… is not in it" ;;
            esac
        done
        ;;
    http://*) ;;
    *) lacks "GANTRY_SERVER: $GANTRY_SERVER is no http://host:port" ;;
    esac
    if printf %s "${GANTRY_SERVER:-}" | grep -Eq ':[0-9]+-[0-9]'; then
        lacks 'GANTRY_SERVER: only gantry itself takes ranges of ports; export GANTRY_SERVER="$(docker/servers.sh)"'
    fi
    if [ -n "${GANTRY_TOKEN_FILE:-}" ]; then
        if [ -r "$GANTRY_TOKEN_FILE" ]; then
            GANTRY_TOKEN_FILE=$(realpath "$GANTRY_TOKEN_FILE")
        else
            lacks "GANTRY_TOKEN_FILE: $GANTRY_TOKEN_FILE cannot be read"
        fi
    else
        unset GANTRY_TOKEN_FILE
    fi
fi

# begin: goes to the client's own directory, if nothing is missing.
begin() {
    if [ -n "$missing" ]; then
        printf '%s cannot run:\n%s' "$0" "$missing" >&2
        exit 1
    fi
    cd "$(dirname "$0")"
}

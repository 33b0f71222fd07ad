#!/bin/sh
# Entrypoint of the PostgreSQL image that base-images.sh makes: initializes an empty data directory as POSTGRES_USER, POSTGRES_PASSWORD and
# POSTGRES_DB say, runs what is in /docker-entrypoint-initdb.d once, and becomes the server.
set -eu
[ "${1:-}" = postgres ] || exec "$@"

mkdir -p "$PGDATA" /var/run/postgresql
chown postgres:postgres "$PGDATA" /var/run/postgresql
chmod 700 "$PGDATA"
as_postgres() { setpriv --reuid=postgres --regid=postgres --init-groups -- "$@"; }

user=${POSTGRES_USER:-postgres}
database=${POSTGRES_DB:-$user}
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    if [ -z "${POSTGRES_PASSWORD:-}" ]; then
        echo "POSTGRES_PASSWORD is not set" >&2
        exit 1
    fi
    password=$(mktemp)
    printf '%s\n' "$POSTGRES_PASSWORD" >"$password"
    chown postgres "$password"
    as_postgres initdb --username="$user" --pwfile="$password" --encoding=UTF8 --locale=C.UTF-8 \
        --auth-local=trust --auth-host=scram-sha-256
    rm -f "$password"
    echo 'host all all all scram-sha-256' >>"$PGDATA/pg_hba.conf"
    # Until everything is there, nobody from outside gets in.
    as_postgres pg_ctl start --wait --options "-c listen_addresses=''"
    run() { as_postgres psql --set ON_ERROR_STOP=1 --username "$user" --no-psqlrc "$@"; }
    [ "$database" = postgres ] || run --dbname postgres --command "CREATE DATABASE \"$database\""
    for script in /docker-entrypoint-initdb.d/*; do
        case $script in
        *.sql) run --dbname "$database" --file "$script" ;;
        *.sh) sh "$script" ;;
        esac
    done
    as_postgres pg_ctl stop --wait --mode fast
fi
shift
exec setpriv --reuid=postgres --regid=postgres --init-groups -- postgres -c listen_addresses='*' "$@"

#!/usr/bin/env bash
# Makes the base images that docker/Dockerfile and compose.yaml build on, from Debian packages, for machines that reach a Debian mirror but no
# image registry. Needs root, mmdebstrap and a running engine.
#
#   docker/base-images.sh [debian] [postgres] [rust]        default: debian and postgres, which is what compose.yaml needs to run
#
# They get the names that the originals have, so that nothing else has to change; one that is there already is left alone. They are
# not the originals: `postgres:15` is Debian's PostgreSQL with an entrypoint that knows POSTGRES_USER, POSTGRES_PASSWORD, POSTGRES_DB and
# /docker-entrypoint-initdb.d, and `rust:…` has this machine's toolchain and certificates.
set -euo pipefail
cd "$(dirname "$0")"
docker=${DOCKER:-docker}
channel=$(sed -n 's/^channel = "\(.*\)"/\1/p' ../rust-toolchain.toml)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

has() { $docker image inspect "$1" >/dev/null 2>&1; }

bootstrap() { # bootstrap FILE PACKAGES [OPTION…]: a root file system of Debian's smallest set and these packages
    local file=$1 packages=$2
    shift 2
    mmdebstrap --quiet --variant=minbase --include="$packages" \
        --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        --customize-hook='rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*' \
        "$@" bookworm "$file"
}

debian() {
    has debian:bookworm-slim && return
    bootstrap "$work/debian.tar" ca-certificates
    $docker import --change 'CMD ["bash"]' "$work/debian.tar" debian:bookworm-slim >/dev/null
}

postgres() {
    has postgres:15 && return
    cp postgres-entrypoint.sh "$work/"
    bootstrap "$work/postgres.tar" postgresql-15,ca-certificates \
        --customize-hook="copy-in $work/postgres-entrypoint.sh /usr/local/bin" \
        --customize-hook='chmod 755 "$1"/usr/local/bin/postgres-entrypoint.sh'
    $docker import \
        --change 'ENV PATH=/usr/lib/postgresql/15/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
        --change 'ENV PGDATA=/var/lib/postgresql/data' \
        --change 'VOLUME /var/lib/postgresql/data' \
        --change 'ENTRYPOINT ["/usr/local/bin/postgres-entrypoint.sh"]' \
        --change 'CMD ["postgres"]' \
        "$work/postgres.tar" postgres:15 >/dev/null
}

rust() {
    has "rust:$channel-bookworm" && return
    local toolchain certificates=()
    toolchain=$(rustc --print sysroot)
    # A mirror behind a certificate of its own is reached with the certificates of this machine.
    [ -e /etc/ssl/certs/ca-certificates.crt ] && certificates=(
        --customize-hook="copy-in /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs"
    )
    mkdir -p "$work/usr/local/rust"
    cp -a "$toolchain/bin" "$toolchain/lib" "$work/usr/local/rust/"
    rm -rf "$work/usr/local/rust/lib/rustlib/src"
    bootstrap "$work/rust.tar" gcc,libc6-dev,ca-certificates,pkg-config,make,git \
        "${certificates[@]}" \
        --customize-hook="copy-in $work/usr/local/rust /usr/local"
    $docker import \
        --change 'ENV PATH=/usr/local/rust/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
        --change 'ENV CARGO_HOME=/usr/local/cargo' \
        "$work/rust.tar" "rust:$channel-bookworm" >/dev/null
}

[ $# -gt 0 ] || set -- debian postgres
for image in "$@"; do
    case $image in
    debian | postgres | rust) "$image" ;;
    *)
        echo "usage: $0 [debian] [postgres] [rust]" >&2
        exit 2
        ;;
    esac
done

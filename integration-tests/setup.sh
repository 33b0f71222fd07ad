#!/usr/bin/env bash
# Installs the system packages that the tests need. Without root, prints the missing packages.
set -euo pipefail

packages=()
need() { # need COMMAND PACKAGE
    command -v "$1" >/dev/null 2>&1 || packages+=("$2")
}
need_postgresql() {
    compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || command -v initdb >/dev/null 2>&1 || packages+=(postgresql)
}

case "${1:-test}" in
test)
    need cc gcc
    need make make
    need git git
    # Tests make file systems that can share blocks between files.
    need mkfs.xfs xfsprogs
    # Tests make networks.
    need ip iproute2
    need nft nftables
    # Ordinary users have private networks with it.
    need slirp4netns slirp4netns
    need python3 python3
    # It validates JSON documents.
    python3 -c 'import jsonschema' 2>/dev/null || packages+=(python3-jsonschema)
    # The Garden server in integration-tests/garden-server works with the Go version of this package.
    need go golang-go
    need_postgresql
    # A registry with TLS and passwords, and independent tools for images.
    need docker-registry docker-registry
    need htpasswd apache2-utils
    need openssl openssl
    need skopeo skopeo
    need umoci umoci
    ;;
house)
    need git git
    need python3 python3
    ;;
node)
    need npm npm
    ;;
compose)
    # This includes the tools that make base images, and those that parse answers.
    command -v dockerd >/dev/null 2>&1 || packages+=(docker.io)
    docker compose version >/dev/null 2>&1 || need docker-compose docker-compose
    need mmdebstrap mmdebstrap
    need jq jq
    need bc bc
    need strip binutils
    ;;
go)
    # From 1.21 on, Go fetches a newer toolchain if go.mod requires one.
    need go golang-go
    ;;
clients)
    need go golang-go
    need python3 python3
    python3 -c 'import venv, ensurepip' 2>/dev/null || packages+=(python3-venv)
    need node nodejs
    need npm npm
    need javac default-jdk-headless
    need mvn maven
    need_postgresql
    ;;
*)
    echo "usage: $0 test|house|node|go|clients|compose" >&2
    exit 2
    ;;
esac

[ ${#packages[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "missing: ${packages[*]}. Install these packages (Debian's names), then run this again." >&2
    exit 1
fi
echo "installing ${packages[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null

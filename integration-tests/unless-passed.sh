#!/usr/bin/env bash
# Runs a slow check unless it has passed with the very same files: integration-tests/passed.txt has the digest of each.
#
# usage: unless-passed.sh NAME PATH… -- COMMAND…
#
# It is left out where CI is set alone. With GANTRY_FULL=1 it always runs, and writes the digest down when it has passed: `make full`.
set -euo pipefail
cd "$(dirname "$0")/.."
name=$1
shift
paths=(integration-tests/unless-passed.sh)
while [ "$1" != -- ]; do
    paths+=("$1")
    shift
done
shift

passed=integration-tests/passed.txt
git ls-files --error-unmatch -- "${paths[@]}" >/dev/null
digest=$(git ls-files -z -- "${paths[@]}" | xargs -0 sha256sum | sha256sum | cut -d ' ' -f 1)
if [ -n "${CI:-}" ] && [ -z "${GANTRY_FULL:-}" ] && grep -qsxF "$name $digest" "$passed"; then
    echo "$name: has passed with these files: ${paths[*]:1}"
    exit 0
fi
"$@"
if [ -n "${GANTRY_FULL:-}" ]; then
    { grep -vs "^$name " "$passed" || true; echo "$name $digest"; } | sort > "$passed.new"
    mv "$passed.new" "$passed"
fi

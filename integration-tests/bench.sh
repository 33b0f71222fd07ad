#!/usr/bin/env bash
# Measures and writes docs/performance.md, or the given sections of it. Needs root.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --release --locked --workspace --bins
cargo build --release --locked -p runtime-gateway --examples
cargo build --release --locked -p artifact-store --examples
cargo build --release --locked -p scheduler --examples
if ! command -v runc >/dev/null 2>&1; then
    apt-get install -y -qq --no-install-recommends runc >/dev/null || echo "runc cannot be installed" >&2
fi
exec python3 -B integration-tests/bench "$@"

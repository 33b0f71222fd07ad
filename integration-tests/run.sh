#!/usr/bin/env bash
# Runs all tests of the workspace, with GANTRY_FULL=1 also slow ones.
#
# Fails if a test fails, if a service runs no test, or if a test is not applicable for a reason that is not on the reviewed list.
set -uo pipefail
cd "$(dirname "$0")/.."
# The patterns below do not match colored output.
export CARGO_TERM_COLOR=never
log=$(mktemp)
trap 'kill "${tests:-}" 2>/dev/null; rm -f "$log"' EXIT

# Test suites in the tests/ folders of packages are counted by their names below, so the names must be unique.
twice=$(
    shopt -s nullglob
    for suite in {services,shared}/*/tests/{*.rs,*/main.rs} integration-tests/tests/{*.rs,*/main.rs}; do
        basename "${suite%/main.rs}" .rs
    done | sort | uniq -d
)
if [ -n "$twice" ]; then
    echo "two packages have test suites of the same name:" $twice
    exit 1
fi

# Most tests wait for processes and disks, so more threads than cores are useful.
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-4}

# Tests start these binaries.
cargo build --workspace --bins --locked || exit 1

# The timeout stops hung tests, whose names are printed. All tests together take about 15 minutes.
timeout --kill-after=1m "${GANTRY_TESTS_WITHIN:-50m}" cargo test --workspace --locked --no-fail-fast -- --show-output ${GANTRY_FULL:+--include-ignored --skip soak --skip host::networks::name_is_resolved} >"$log" 2>&1 &
tests=$!
tail --follow --lines=+1 --pid=$tests "$log" | grep --line-buffered -aE '^(     Running|   Doc-tests|test result:)|^test .*FAILED|^error'
wait $tests
status=$?
if [ $status -eq 124 ] || [ $status -eq 137 ]; then
    echo "--- unfinished tests ---"
    awk '/^ +Running /{running = $0}
        /^test .* has been running for over/{slow[$2] = running}
        /^test .* \.\.\. /{delete slow[$2]}
        END{for (test in slow) print test, "of", slow[test]; print "last started suite:", running}' "$log"
fi
if [ $status -ne 0 ]; then
    echo "--- failures ---"
    sed -n '/^failures:$/,/^test result:/p' "$log"
    grep -E -A 20 '^error' "$log"
fi

for service in services/*/; do
    name=$(basename "$service")
    crate=${name//-/_}
    count=$(awk -v crate="$crate" -v path="services/$name/" '
        /^ +Running /{ours = ($0 ~ "deps/" crate "-") || index($0, path)}
        /^   Doc-tests /{ours = 0}
        /^test result:/{if (ours) n += $4; ours = 0}
        END{print n + 0}' "$log")
    for suite in "services/$name"/tests/*.rs "services/$name"/tests/*/main.rs; do
        [ -e "$suite" ] || continue
        suite=${suite%/main.rs}
        more=$(awk -v suite="deps/$(basename "$suite" .rs)-" '
            /^ +Running /{ours = index($0, suite)}
            /^test result:/{if (ours) n += $4; ours = 0}
            END{print n + 0}' "$log")
        count=$((count + more))
    done
    echo "$name: $count tests passed"
    if [ "$count" -eq 0 ]; then
        echo "$name runs no test"
        status=1
    fi
done

# Minimum number of seeds, as in the tests.
least=${GANTRY_SEED:+1}
least=${least:-${GANTRY_SEEDS:-4}}
for database in Sqlite Postgres; do
    seeds=$(grep -ac "^$database: nothing was wrong in " "$log")
    echo "model of the artifact store on $database: $seeds seeds passed"
    if [ "$seeds" -lt "$least" ]; then
        echo "expected at least $least"
        status=1
    fi
done

while read -r times line; do
    echo "$times x $line"
    if ! grep -qxF "$line" integration-tests/not-applicable.txt; then
        echo "not on the reviewed list integration-tests/not-applicable.txt: $line"
        status=1
    fi
done < <(grep -oE 'not applicable: .*' "$log" | sort | uniq -c)
if [ $status -ne 0 ]; then
    # A summary at the end of the log: failed tests with their messages and seeds, and crashed processes.
    echo "--- summary ---"
    sed -n '/^failures:$/,/^test result:/p' "$log" | grep -aE -A 2 "^thread '.*' .*panicked at " | grep -vaE '^(--|stack backtrace:)' | cut -c 1-600
    grep -aE "^test .*FAILED|^run it again: |has overflowed its stack|^fatal runtime error|process didn't exit successfully" "$log" | sort -u
fi
exit $status

#!/usr/bin/env bash
# Runs every test of the workspace, with GANTRY_FULL=1 also those that are slow, and fails when a test fails, when a service runs no test, or when a test says that it does not apply
# here for a reason that is not on the reviewed list.
set -uo pipefail
cd "$(dirname "$0")/.."
# What is looked for below has no colours.
export CARGO_TERM_COLOR=never
log=$(mktemp)
trap 'kill "${tests:-}" 2>/dev/null; rm -f "$log"' EXIT

# Tests of a package in its tests/ folder run under names of their own, by which they are counted below.
twice=$(
    shopt -s nullglob
    for suite in {services,shared}/*/tests/{*.rs,*/main.rs} integration-tests/tests/{*.rs,*/main.rs}; do
        basename "${suite%/main.rs}" .rs
    done | sort | uniq -d
)
if [ -n "$twice" ]; then
    echo "two packages have tests of one name, which cannot be told apart:" $twice
    exit 1
fi

# Most tests wait for processes, disks and each other.
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-4}

# Tests start the binaries.
cargo build --workspace --bins --locked || exit 1

# A test that hangs is told by its name, and the rest of what is checked here does not wait for it: all tests together take a quarter of an hour.
timeout --kill-after=1m "${GANTRY_TESTS_WITHIN:-50m}" cargo test --workspace --locked --no-fail-fast -- --show-output ${GANTRY_FULL:+--include-ignored --skip soak --skip host::networks::name_is_resolved} >"$log" 2>&1 &
tests=$!
tail --follow --lines=+1 --pid=$tests "$log" | grep --line-buffered -aE '^(     Running|   Doc-tests|test result:)|^test .*FAILED|^error'
wait $tests
status=$?
if [ $status -eq 124 ] || [ $status -eq 137 ]; then
    echo "--- what did not end ---"
    awk '/^ +Running /{running = $0}
        /^test .* has been running for over/{slow[$2] = running}
        /^test .* \.\.\. /{delete slow[$2]}
        END{for (test in slow) print test, "of", slow[test]; print "the last that was started:", running}' "$log"
fi
if [ $status -ne 0 ]; then
    echo "--- what failed ---"
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

# As many as its tests say that they run at least.
least=${GANTRY_SEED:+1}
least=${least:-${GANTRY_SEEDS:-4}}
for database in Sqlite Postgres; do
    seeds=$(grep -ac "^$database: nothing was wrong in " "$log")
    echo "model of the artifact store on $database: $seeds seeds passed"
    if [ "$seeds" -lt "$least" ]; then
        echo "they are fewer than $least"
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
    # Of a long log, the end is read: which tests failed and with what words, which seeds, and what became of a process that did not come
    # to its end.
    echo "--- in short ---"
    sed -n '/^failures:$/,/^test result:/p' "$log" | grep -aE -A 2 "^thread '.*' .*panicked at " | grep -vaE '^(--|stack backtrace:)' | cut -c 1-600
    grep -aE "^test .*FAILED|^run it again: |has overflowed its stack|^fatal runtime error|process didn't exit successfully" "$log" | sort -u
fi
exit $status

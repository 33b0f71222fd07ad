"""Marking of the artifact store, beside marking row by row, its other calls, and reports of workers."""

import json
import pathlib
import shutil
import subprocess
import tempfile

from clusters import RELEASE, Postgres
from measure import row, table

DATABASES = ("PostgreSQL (fsync on)", "SQLite")


def bench_store(base, artifacts, handles, rounds):
    """Measures a store with `artifacts` artifacts and volumes, and with a tenth of that, because the cost must not depend on the size. Reports are
    those of one worker with `handles` volumes, and those of `rounds` minutes of a thousand workers with a thousand volumes each."""
    marking, calls, reports = [], [], []
    home = pathlib.Path(tempfile.mkdtemp(prefix="gantry-bench-store-", dir=base))
    # PostgreSQL refuses to run as root.
    home.chmod(0o755)
    try:
        for database in DATABASES:
            for count in (artifacts // 10, artifacts):
                results = of_example(home, database, "collection", str(count))
                marking += of_marking(f"{database}, {count:,} artifacts", results)
                calls += of_calls(f"{database}, {count:,} artifacts", results)
        for database in DATABASES:
            arguments = ["--handles", str(handles), "--rounds", str(rounds)]
            reports += of_reports(database, of_example(home, database, "reports", *arguments))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    text = [
        "A lot is one artifact in a hundred, with one replica each. It becomes garbage when the builds that own it end. Each build owns ten artifacts that were made",
        "together, except where the line says *scattered*. Before each lot the database writes everything to the disk, so it logs each touched page completely. Ratios are",
        "to the line above that says `row by row`, with as many marks. *In a table with nothing else* is a scan for orphans, and a guarded UPDATE with its own commit for",
        "each volume, as CI systems do it. *The same* marks artifacts and volumes in our tables in that way. A pass marks both, removes the ownership of the builds, and",
        "stores when to check again. *The floor* is only the writes: an UPDATE, a DELETE and two INSERTs of all rows at once. Half a pass has as many marks as the first",
        "line. Creates beside a pass are sequential calls of one caller on the same cores.",
        "",
    ]
    return [
        *table("The artifact store: marking garbage", marking),
        *text,
        *table("The artifact store: other calls", calls),
        *table("The artifact store: reports", reports),
        "A report lists handles that exist, and each is compared with its row. A report without changes writes no row. A report that confirms all handles writes each row.",
        "The empty report comes after everything was marked and deleted on the worker. All rows are then removed, and each is recorded in the deletion log.",
        "",
    ]


def of_example(home, database, example, *arguments):
    """Returns the output of a program that measures the store."""
    postgres = Postgres(home, "127.0.0.1:7391") if database != "SQLite" else None
    own = pathlib.Path(tempfile.mkdtemp(dir=home))
    try:
        url = postgres.url("postgres") if postgres else f"sqlite://{own}/store.db"
        if postgres and example in ("reports", "synchronizing"):
            arguments = (*arguments, "--postgres", str(postgres.child.pid))
        command = [str(RELEASE / "examples" / example), url, *arguments]
        return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    finally:
        if postgres:
            postgres.stop()
        shutil.rmtree(own)


def runs_of(base, runs, example, *arguments):
    """Returns the output of a program in each of several runs, with a separate PostgreSQL."""
    home = pathlib.Path(tempfile.mkdtemp(prefix=f"gantry-bench-{example}-", dir=base))
    # PostgreSQL refuses to run as root.
    home.chmod(0o755)
    try:
        return [of_example(home, DATABASES[0], example, *map(str, arguments)) for _ in range(runs)]
    finally:
        shutil.rmtree(home, ignore_errors=True)


def of_marking(name, results):
    marks = results["marks"]
    by_row, same = [results["row_by_row_ms"]], [results["same_row_by_row_ms"]]
    one = lambda what, key, reference=None: row(f"{name}: {what}", [results[key]], reference)
    return [
        one(f"{marks:,} marks row by row, in a table with nothing else", "row_by_row_ms"),
        one(f"a pass that marks {marks:,} volumes of attempts", "attempts_ms", by_row),
        row(f"{name}: half a pass that marks {marks:,} artifacts and {marks:,} volumes", [results["alone_ms"] / 2], by_row),
        one(f"{marks:,} artifacts and {marks:,} volumes row by row, the same", "same_row_by_row_ms"),
        one("a pass that marks as many", "alone_ms", same),
        one("a pass that marks as many, scattered", "scattered_ms", same),
        one("beside creates", "beside_ms", same),
        one("the floor", "floor_ms", same),
        one("the first pass of a store that was just started, with nothing to do", "started_ms"),
        one("a pass with nothing to do, median of 20", "idle_ms"),
        one("a pass with nothing to do, the slowest", "idle_max_ms"),
        one("a pass that marks nothing, while all of the above waits for the sweep, median of 20", "waiting_ms"),
        one("CreateArtifact, median of 200", "create_ms"),
        one(f"CreateArtifact beside a pass, median of {results['create_beside']}", "create_beside_ms"),
        one("CreateArtifact beside a pass, the slowest", "create_beside_max_ms"),
    ]


def of_calls(name, results):
    rate = lambda what, key: row(f"{name}: {what}", [results[key]], unit="/s")
    batch = results["batch"]
    return [
        row(f"{name}: Locate of 20 artifacts, p99 of 2,000", [results["locate_p99_ms"]]),
        rate("artifacts made by 16 callers, one in a call", "creates_per_second"),
        rate(f"artifacts made by 16 callers, {batch} in a call", "batched_creates_per_second"),
        rate("owners added by 16 callers, one in a call", "adds_per_second"),
        rate(f"owners added by 16 callers, {batch} in a call", "batched_adds_per_second"),
        rate("owners removed by 16 callers, one in a call", "removes_per_second"),
        rate(f"owners removed by 16 callers, {batch} in a call", "batched_removes_per_second"),
    ]


def of_reports(name, results):
    handles = f"{results['handles']:,} handles"
    seconds = lambda what, figures: row(f"{name}: {what}", [figure * 1e3 for figure in figures])
    cores = lambda what, key: row(f"{name}: {workers}, {what}", [results[key] * 100], unit="% of a core")
    workers = f"{results['workers']:,} workers with {results['each']:,} handles a minute"
    lines = [
        seconds(f"a report of {handles}, unchanged", results["unchanged_s"]),
        seconds(f"a report of {handles} that confirms all", [results["confirmed_s"]]),
        seconds(f"an empty report that finds {handles} destroyed, and forgets them", [results["forgotten_s"]]),
        row(f"{name}: memory of the store before", [results["rss_idle_kib"] / 1024], unit="MiB"),
        row(f"{name}: memory of the store at most", [results["rss_peak_kib"] / 1024], unit="MiB"),
        seconds(f"{workers}, a report, median of {results['reports']:,}, {results['failed']} failed", [results["latency_median_s"]]),
        seconds(f"{workers}, a report, p99", [results["latency_p99_s"]]),
        cores("the store", "store_cores"),
    ]
    return lines + ([cores("the database", "database_cores")] if results["database_cores"] is not None else [])

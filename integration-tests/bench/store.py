"""The artifact store's marking, beside the same marks row by row."""

import json
import pathlib
import shutil
import subprocess
import tempfile

from clusters import RELEASE, Postgres
from measure import row, table


def bench_store(base, artifacts):
    """Figures of a store with `artifacts` artifacts and as many volumes, and with a tenth of that: the cost must not follow the size."""
    lines = []
    home = pathlib.Path(tempfile.mkdtemp(prefix="gantry-bench-store-", dir=base))
    try:
        for database in ("PostgreSQL (fsync on)", "SQLite"):
            for count in (artifacts // 10, artifacts):
                lines += of_one(home, database, count)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    text = [
        "One in a hundred is garbage, and has one replica, so that a pass marks twice as many rows as row by row. What is row by row: a scan for",
        "orphans, and a guarded UPDATE with a commit of its own for each. Creates beside a pass are those of one caller, one after the other.",
        "",
    ]
    return [*table("Marking garbage", lines), *text]


def of_one(home, database, count):
    postgres = Postgres(home, "127.0.0.1:7391") if database != "SQLite" else None
    try:
        url = postgres.url("postgres") if postgres else f"sqlite://{home}/store-{count}.db"
        command = [str(RELEASE / "examples/collection"), url, str(count)]
        said = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    finally:
        if postgres:
            postgres.stop()
    name = f"{database}, {count:,} artifacts"
    one = lambda what, key, reference=None: row(f"{name}: {what}", [said[key]], reference)
    return [
        one(f"{said['marks']:,} marks row by row", "row_by_row_ms"),
        one(f"a pass that marks {said['marks']:,} artifacts and their volumes", "marking_ms", [said["row_by_row_ms"]]),
        one("a pass with nothing to do, median of 20", "idle_ms"),
        one("CreateArtifact, median of 200", "create_ms"),
        one(f"CreateArtifact beside a pass, median of {said['create_beside']}", "create_beside_ms"),
        one("CreateArtifact beside a pass, the slowest", "create_beside_max_ms"),
        one("Locate of 20 artifacts, p99 of 2,000", "locate_p99_ms"),
        row(f"{name}: CreateArtifact by 16 callers", [said["creates_per_second"]], unit="/s"),
    ]

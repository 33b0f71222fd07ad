"""Waiting for workers: how soon a freed slot is given on, how dear an explanation is, and how long a queue may be."""

import pathlib
import shutil
import tempfile

from measure import row, table
from store import DATABASES, of_example


def bench_waiting(base, workers, queue, freed, seconds):
    """Figures of schedulers on PostgreSQL, with each of these numbers of workers."""
    home = pathlib.Path(tempfile.mkdtemp(prefix="gantry-bench-waiting-", dir=base))
    # The server is not run by root.
    home.chmod(0o755)
    counts = ",".join(map(str, workers))
    try:
        arguments = ["--workers", counts, "--queue", str(queue), "--freed", str(freed), "--seconds", str(seconds)]
        said = of_example(home, DATABASES[0], "waiting", *arguments)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    one = lambda what, key, unit="ms": row(what, [said[key]], None, unit)
    lines = [
        one("a slot is given back at one replica, and placed is heard at the other: median", "freed_p50_ms"),
        one("the same, p99", "freed_p99_ms"),
        one("the same from the answer to the call that gives it back, p99", "freed_after_p99_ms"),
    ]
    for count in workers:
        lines += [
            one(f"{count:,} workers with room: `Explain` of a spec, median", f"{count}_explain_p50_ms"),
            one(f"{count:,} workers with room: `Explain` of a spec, p99", f"{count}_explain_p99_ms"),
            one(f"{count:,} full workers: `Explain` of a spec, p99", f"{count}_explain_full_p99_ms"),
            one(f"{count:,} full workers: `Place` that is refused, 16 callers", f"{count}_busy_16", "/s"),
            one(f"{count:,} full workers: `Submit` of what has to wait, 16 callers", f"{count}_queued_16", "/s"),
        ]
    lines += [
        one(f"`Submit` without any worker until {queue:,} wait, 64 callers", "queue_submit_64", "/s"),
        one("memory of the scheduler for each that waits", "queue_bytes", "B"),
        one("a worker with 1,000 slots appears, until it is told of 1,000 leases", "queue_fill_ms"),
    ]
    text = [
        f"Schedulers, callers and PostgreSQL (fsync on) share the cores. {freed:,} slots are given back one after the other while as many workloads wait, and each of",
        "these is watched at the other replica than the one that is told. Nobody speaks for the workers but for the last. The aims are 10 ms at p99 for a slot, and",
        "20 ms for `Explain` over 10,000 workers.",
        "",
    ]
    return [*table("Waiting for workers", lines), *text]

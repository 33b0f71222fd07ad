"""Many workers connected to one scheduler: cost without changes, and delay of a command to a worker."""

from measure import row, table
from store import runs_of


def bench_synchronizing(base, workers, seconds, landings, runs):
    """Measures one scheduler on PostgreSQL with each of these numbers of workers. Each run has a separate database."""
    counts = ",".join(map(str, workers))
    results = runs_of(base, runs, "synchronizing", "--workers", counts, "--seconds", seconds, "--landings", landings)
    lines = []
    for count in workers:
        of_all = lambda key: [run[f"{count}_{key}"] for run in results]
        one = lambda what, key, unit, scale=1: row(f"{count:,} workers: {what}", [figure * scale for figure in of_all(key)], None, unit)
        lines += [
            one("the scheduler, while nothing changes", "core", "% of a core", 100),
            one("PostgreSQL, while nothing changes", "database_core", "% of a core", 100),
            one("transactions, while nothing changes", "transactions", "/s"),
            one("rows of workers written, while nothing changes", "worker_writes", ""),
            one("the scheduler's memory, of each", "bytes", "KiB", 1 / 1024),
            one("let in, 64 at a time", "hellos", "/s"),
            one("`CordonWorker` until its worker hears it, p50", "land_p50_ms", "ms"),
            one("`CordonWorker` until its worker hears it, p99", "land_p99_ms", "ms"),
        ]
    text = [
        f"Each worker is a stream of `Synchronize`; {results[0]['streams']} share a connection. Each says something every {results[0]['heartbeat']} s, holds nothing, and is told",
        f"something as often; nothing changes for {results[0]['seconds']} s. Then {results[0]['landings']} of them land and run again, one after the other, in the same load. The scheduler, those",
        "who speak for the workers, and PostgreSQL (fsync on) share the cores.",
        "",
    ]
    return [*table("Workers that are connected", lines), *text]

"""Many workers connected to one scheduler: what that costs while nothing changes, and how soon one hears what it shall do."""

from measure import row, table
from store import runs_of


def bench_synchronizing(base, workers, seconds, landings, runs):
    """Figures of one scheduler on PostgreSQL with each of these numbers of workers, of so many runs with a database of its own each."""
    counts = ",".join(map(str, workers))
    said = runs_of(base, runs, "synchronizing", "--workers", counts, "--seconds", seconds, "--landings", landings)
    lines = []
    for count in workers:
        of_all = lambda key: [run[f"{count}_{key}"] for run in said]
        one = lambda what, key, unit, scale=1: row(f"{count:,} workers: {what}", [figure * scale for figure in of_all(key)], None, unit)
        lines += [
            one("the scheduler, while nothing changes", "core", "% of a core", 100),
            one("PostgreSQL, while nothing changes", "database_core", "% of a core", 100),
            one("transactions, while nothing changes", "transactions", "/s"),
            one("rows of workers written, while nothing changes", "worker_writes", ""),
            one("the scheduler's memory, of each", "bytes", "KiB", 1 / 1024),
            one("registrations, 64 at a time", "registrations", "/s"),
            one("`CordonWorker` until its worker receives it, p50", "land_p50_ms", "ms"),
            one("`CordonWorker` until its worker receives it, p99", "land_p99_ms", "ms"),
        ]
    text = [
        f"Each worker is a stream of `Synchronize`; {said[0]['streams']} share a connection. Each sends and receives a message every {said[0]['heartbeat']} s and holds nothing.",
        f"Nothing changes for {said[0]['seconds']} s. Then {said[0]['landings']} of them are cordoned and uncordoned, one after the other, with the same load. The scheduler, the",
        "simulated gateways and PostgreSQL (fsync on) share the cores.",
        "",
    ]
    return [*table("Connected workers", lines), *text]

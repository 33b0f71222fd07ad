"""Waiting for workers: delay of granting a freed slot, cost of an explanation, and length of the queue."""

import statistics

from measure import row, table
from store import runs_of

# Requests to `Explain`. A tenth of the workers has another platform, and a tenth of the others has one of a hundred tags.
MIXED = [
    ("`Explain` of a spec that many would take", "placed"),
    ("`Explain` of a workload that waits behind a thousand, all that could are full", "waits"),
    ("`Explain` of a spec that no worker could take", "never"),
    ("`Explain` of that workload with every worker listed", "all"),
    ("`GetDemand`", "demand"),
]

# Times at p99, in ms.
SLOT, EXPLAIN = 10, 20


def bench_waiting(base, workers, queue, freed, seconds, runs):
    """Measures schedulers on PostgreSQL with each of these numbers of workers. Each run has a separate database."""
    counts, most = ",".join(map(str, workers)), workers[-1]
    waiting = runs_of(base, runs, "waiting", "--workers", counts, "--queue", queue, "--freed", freed, "--seconds", seconds)
    explaining = runs_of(base, runs, "explaining", "--workers", most)
    results = [one | other for one, other in zip(waiting, explaining)]
    of_all = lambda key: [run[key] for run in results]
    one = lambda what, key, unit="ms": row(what, of_all(key), None, unit)
    lines = [
        one("from the release of a slot at one replica to the event `placed` at the other, median", "freed_p50_ms"),
        one("the same, p99", "freed_p99_ms"),
        one("the same, from the answer of the release, p99", "freed_after_p99_ms"),
    ]
    for count in workers:
        lines += [
            one(f"{count:,} workers with room: `Explain` of a spec, median", f"{count}_explain_p50_ms"),
            one(f"{count:,} workers with room: `Explain` of a spec, p99", f"{count}_explain_p99_ms"),
            one(f"{count:,} full workers: `Explain` of a spec, p99", f"{count}_explain_full_p99_ms"),
            one(f"{count:,} full workers: `Place` that is rejected, 16 callers", f"{count}_busy_16", "/s"),
            one(f"{count:,} full workers: `Submit` of workloads that wait, 16 callers", f"{count}_queued_16", "/s"),
            one(f"{count:,} workers, {min(16, count)} of them with one slot: `Place` that waits, and `Release`, 64 callers", f"{count}_turning_64", "/s"),
        ]
    lines += [one(f"{most:,} different workers: {what}, p99", f"{key}_p99_ms") for what, key in MIXED]
    lines += [
        one(f"`Submit` without any worker until {queue:,} wait, 64 callers", "queue_submit_64", "/s"),
        one("memory of the scheduler for each waiting workload", "queue_bytes", "B"),
        one("from the registration of a worker with 1,000 slots until it has received 1,000 leases", "queue_fill_ms"),
    ]
    judged = [
        ("a slot, at the other replica", "freed_p99_ms", SLOT),
        (f"`Explain`, {most:,} workers with room", f"{most}_explain_p99_ms", EXPLAIN),
        (f"`Explain`, {most:,} full workers", f"{most}_explain_full_p99_ms", EXPLAIN),
        *((f"{what}, {most:,} different workers", f"{key}_p99_ms", EXPLAIN) for what, key in MIXED if what.startswith("`Explain`")),
    ]
    text = [
        f"Schedulers, callers and PostgreSQL (fsync on) share the cores. {freed:,} slots are released one after the other while as many workloads wait. Each of these is",
        "watched at the replica that does not get the release. Only the last line has gateways. *Different* workers: a tenth has another platform, and every tenth of the",
        "others has one of a hundred tags. `Explain` of these is called in the process of the scheduler.",
        f"The goals are {SLOT} ms at p99 for a slot, and {EXPLAIN} ms for `Explain` over 10,000 workers. Of these medians:",
        "",
        *(f"- {what}: {'met' if statistics.median(of_all(key)) <= most_ms else 'missed'}." for what, key, most_ms in judged),
        "",
    ]
    return [*table("Waiting for workers", lines), *text]

"""Placement of workloads on workers, beside the method of CI systems."""

import statistics

from measure import row, table
from store import runs_of

# Parts of the measuring program that this section runs.
PARTS = "singles,paced,batched-16,submits,cached"

# Title, key, and the predicate that the median must meet.
AIMS = [
    ("`PlaceMany` of 100 alone, 16 callers", "placed_16", lambda rate: rate >= 20_000),
    ("`PlaceMany` and `ReleaseMany` of 100, 16 callers", "batched_16", lambda rate: rate >= 20_000),
    ("`Place` and `Release`, 64 callers", "single_64", lambda rate: rate >= 4_000),
    ("`Place` and `Release`, 16 callers", "single_16", lambda rate: rate >= 4_000),
    ("a decision at 1,000 pairs/s, p99", "paced_1000_decided_p99_ms", lambda time: time <= 5),
    ("a decision at 4,000 pairs/s, p99", "paced_4000_decided_p99_ms", lambda time: time <= 5),
    ("a decision for 16 callers, p99", "single_16_decided_p99_ms", lambda time: time <= 5),
    ("a decision for 64 callers, p99", "single_64_decided_p99_ms", lambda time: time <= 5),
    ("`Place` of one caller, p99", "single_1_p99_ms", lambda time: time <= 5),
    ("`Place` at 1,000 pairs/s, p99", "paced_1000_p99_ms", lambda time: time <= 5),
    ("`Place` at 4,000 pairs/s, p99", "paced_4000_p99_ms", lambda time: time <= 5),
    ("`Place` of 64 callers, p99", "single_64_p99_ms", lambda time: time <= 5),
]


# Rows with more callers, and of leases that use artifacts.
AIMS_OF_MORE = [
    ("`PlaceMany` of 100 alone, 64 callers", "placed_64", lambda rate: rate >= 20_000),
    ("`PlaceMany` and `ReleaseMany` of 100, 64 callers", "batched_64", lambda rate: rate >= 20_000),
    ("`Place` and `Release` of what uses five artifacts, 16 callers", "near_16", lambda rate: rate >= 4_000),
    ("`Place` and `Release` of what uses five artifacts, 64 callers", "near_64", lambda rate: rate >= 4_000),
]


def judge(results, workers, what, key, is_met):
    """Returns the number of workers with which a goal is met."""
    met = [is_met(statistics.median(run[f"{count}_{key}"] for run in results)) for count in workers]
    names = lambda wanted: ", ".join(f"{count:,}" for count, is_so in zip(workers, met) if is_so == wanted)
    return f"- {what}: " + ("met" if all(met) else "missed" if not any(met) else f"met with {names(True)} workers, missed with {names(False)}") + "."


def kept(results, workers, aims):
    """Returns the ratio of each rate between the largest and the smallest number of workers."""
    median = lambda count, key: statistics.median(run[f"{count}_{key}"] for run in results)
    rates = [(what, key) for what, key, _ in aims if "p99" not in what]
    left = [f"{what}: {median(workers[-1], key) / median(workers[0], key):.0%}" for what, key in rates]
    return f"With {workers[-1]:,} workers, compared with {workers[0]:,}, these parts of the rates remain: " + "; ".join(left) + "."


def bench_placing(base, workers, seconds, aimed_seconds, runs):
    """Measures one scheduler on PostgreSQL with each of these numbers of workers. Each run has a separate database."""
    counts = ",".join(map(str, workers))
    results = runs_of(base, runs, "placing", "--workers", counts, "--seconds", seconds, "--aimed-seconds", aimed_seconds, "--only", PARTS)
    lines = []
    for count in workers:
        of_all = lambda key: [run[f"{count}_{key}"] for run in results]
        baseline = of_all("cached_16")
        rate = lambda what, key, reference=None: row(f"{count:,} workers: {what}", of_all(key), reference, "/s")
        lines += [
            rate("from a cache, a row for each container, 16 callers", "cached_16"),
            rate("the same, with limits on tasks", "limited_16"),
            rate("`Place` and `Release`, one lease in a call, 16 callers", "single_16", baseline),
            rate("`Place` and `Release`, one lease in a call, 64 callers", "single_64", baseline),
            row(f"{count:,} workers: `Place` of one caller, p99", of_all("single_1_p99_ms")),
            rate("`Place` and `Release` at a target of 4,000 pairs/s by 64 callers", "paced_4000"),
            row(f"{count:,} workers: `Place` at 1,000 pairs/s of 64 callers, p99", of_all("paced_1000_p99_ms")),
            row(f"{count:,} workers: `Place` at 4,000 pairs/s of 64 callers, p99", of_all("paced_4000_p99_ms")),
            row(f"{count:,} workers: `Place` of 64 callers, p99", of_all("single_64_p99_ms")),
            row(f"{count:,} workers: a decision at 1,000 pairs/s, p99", of_all("paced_1000_decided_p99_ms")),
            row(f"{count:,} workers: a decision at 4,000 pairs/s, p99", of_all("paced_4000_decided_p99_ms")),
            row(f"{count:,} workers: a decision for 16 callers, p99", of_all("single_16_decided_p99_ms")),
            row(f"{count:,} workers: a decision for 64 callers, p99", of_all("single_64_decided_p99_ms")),
            rate("`PlaceMany` and `ReleaseMany` of 100, 16 callers", "batched_16", baseline),
            rate("`PlaceMany` of 100 alone, 16 callers", "placed_16", baseline),
            rate("`Submit` to assigned, 16 callers", "submit_16", baseline),
            rate("`Submit` to assigned, 64 callers", "submit_64", baseline),
        ]
    text = [
        "One scheduler, its callers and PostgreSQL (fsync on) share the cores. Each worker has a limit on its tasks, and room. *From a cache* is the way of CI systems: all",
        "workers from a cache, filtered, shuffled and sorted for each placement, and a row with its own commit for each container. *With limits* also reads one counter per",
        "worker, raises one under a guard, and lowers it again. The baseline checks nothing else and calls no service. A pair of `Place` and `Release` is two calls, two tokens",
        "and two writes of the lease. Each caller waits for its answer before the next call, so 64 callers mostly wait for each other. At 1,000 and 4,000 pairs/s each call",
        "starts when it is due, and its time counts from then. 4,000 pairs/s run for more than a minute, so they include what PostgreSQL does once a minute (vacuum and",
        "analyze, for a third of a second). A *decision* is `gantry_scheduler_decision_seconds`: from a request until everything that is decided with it is granted or released,",
        "and committed. *Alone* counts only the time in calls of `PlaceMany`, while `ReleaseMany` runs beside it.",
        "The goals, with 10,000 workers as with 10: 20,000/s by `PlaceMany`, 4,000 pairs/s of single leases, and 5 ms at p99 for a decision. Of these medians:",
        "",
        *[judge(results, workers, *aim) for aim in AIMS],
        "",
        kept(results, workers, AIMS),
        "",
    ]
    return [*table("Placing on workers", lines), *text]


def bench_placing_more(base, workers, seconds, runs):
    """Measures one scheduler with more callers per batch, and with leases that use artifacts."""
    counts = ",".join(map(str, workers))
    results = runs_of(base, runs, "placing", "--workers", counts, "--seconds", seconds, "--only", "batched-64,two,near,cached")
    lines = []
    for count in workers:
        of_all = lambda key: [run[f"{count}_{key}"] for run in results]
        rate = lambda what, key, reference=None: row(f"{count:,} workers: {what}", of_all(key), reference, "/s")
        lines += [
            rate("from a cache, a row for each container, 16 callers", "cached_16"),
            *(rate(what, key, of_all("cached_16")) for what, key, _ in AIMS_OF_MORE),
            rate("`Place` and `Release`, two schedulers, 16 callers", "two_16", of_all("cached_16")),
            rate("`Place` and `Release`, two schedulers, 64 callers", "two_64", of_all("cached_16")),
            rate("`PlaceMany` and `ReleaseMany` of 100, two schedulers, 16 callers", "two_batched_16", of_all("cached_16")),
            row(f"{count:,} workers: a decision of two schedulers for 16 callers, p99", of_all("two_16_decided_p99_ms")),
            row(f"{count:,} workers: a decision of two schedulers for 64 callers, p99", of_all("two_64_decided_p99_ms")),
        ]
    text = [
        "As above, in a separate run. *What uses five artifacts*: five of 10,000 artifacts, each of which is on three workers. For each lease the artifacts are located and",
        "pinned in an artifact store, which shares the cores, and unpinned later. The worker with the fewest bytes to move is chosen. The baseline does none of that.",
        "*Two schedulers* place in the same database on the same workers. Each gets every other lease. They share the cores, so the lines show the cost of a second",
        "scheduler, and not the gain. The goals above are those of one scheduler. Of these medians:",
        "",
        *[judge(results, workers, *aim) for aim in AIMS_OF_MORE],
        "",
        kept(results, workers, AIMS_OF_MORE),
        "",
    ]
    return [*table("Placing on workers: large batches of many callers, and leases that use artifacts", lines), *text]

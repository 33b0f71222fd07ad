"""The four services as processes on PostgreSQL, beside all of them in one process."""

from clusters import Cluster, Processes
from measure import row, table, timed


def bench_processes(base, runs):
    embedded, separate = [], []
    with Cluster(base) as cluster, Processes(base) as processes:
        processes.gateway("worker")
        one = lambda: cluster.run("run", "-q", "--", "true")
        four = lambda: processes.run("run", "-q", "--tag", "worker", "--", "true")
        for action in (one, four):
            timed(action, 5)
        # Both are measured in turns, so that they meet the same load.
        for _ in range(runs):
            embedded += timed(one, 1)
            separate += timed(four, 1)
    lines = [
        row("`gantry run -- true`, one process, SQLite, a Unix socket", embedded),
        row("the same, four processes, PostgreSQL (fsync on), TCP", separate, embedded),
    ]
    return [*table("Four processes", lines), "The goal is 1.5 ×.", ""]

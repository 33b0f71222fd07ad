"""An idle cluster: CPU time and context switches of its processes."""

import json
import pathlib
import time

from clusters import Cluster, Processes

HEAD = ["| Process | CPU | Context switches |", "|---|---|---|"]
GOAL = 0.3


def used(pid):
    """Returns the CPU time in seconds and the number of voluntary context switches of all threads of a process."""
    seconds, switches = 0, 0
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        seconds += int((task / "schedstat").read_text().split()[0]) / 1e9
        status = (task / "status").read_text().split("voluntary_ctxt_switches:")[1]
        switches += int(status.split()[0])
    return seconds, switches


def idle(processes, settle, seconds):
    """Measures processes that have had nothing to do for `settle` seconds. Returns rows of a table."""
    time.sleep(settle)
    before = {name: used(pid) for name, pid in processes.items()}
    begin = time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - begin
    rows = []
    for name, pid in processes.items():
        cpu, switches = (after - earlier for after, earlier in zip(used(pid), before[name]))
        rows.append(f"| {name} | {cpu / passed * 100:.2f} % | {switches / passed:.1f} /s |")
        print(rows[-1], flush=True)
    return rows


def bench_idle(base, settle, seconds):
    rows = []
    with Cluster(base) as cluster:
        cluster.run("run", "-q", "--", "true")
        one = json.loads((cluster.home / "state/gantry/cluster.lock").read_text())["process_id"]
        rows += idle({"the cluster on one machine, SQLite": one}, settle, seconds)
    with Processes(base) as processes:
        processes.gateway("worker")
        processes.run("run", "-q", "--tag", "worker", "--", "true")
        names = ("scheduler", "artifact-store", "streamer", "runtime-gateway")
        of = {f"{name}, PostgreSQL" if name in names[:2] else name: child.pid for name, child in zip(names, processes.children)}
        rows += idle(of, settle, seconds)
    note = f"Each process had nothing to do for {seconds} s after a `gantry run`. CPU is in percent of one core. The goal for the cluster is {GOAL} %."
    return ["### Idle", "", *HEAD, *rows, "", note, ""]

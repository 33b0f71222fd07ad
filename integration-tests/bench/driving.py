"""Callers that drive containers: many attached processes, and steps beside submitted workloads."""

import contextlib
import json
import pathlib
import statistics
import subprocess

from clusters import RELEASE, Processes, wait_for
from measure import row, table
from terminals import judged, p99

CONTAINERS = 10

# Descriptors of the gateway for each attached process: its connection, and those of the process.
DESCRIPTORS = 8

# Descriptors that may be open for other reasons.
NEAR = 10


class Caller:
    """Measuring program, which prints lines of JSON and continues after each line of input."""

    def __init__(self, processes, gateway, *arguments):
        command = [str(RELEASE / "examples/driving"), processes.common["GANTRY_SCHEDULER"], gateway, *map(str, arguments)]
        self.child = subprocess.Popen(command, env=processes.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def next(self):
        line = self.child.stdout.readline()
        if not line:
            raise RuntimeError(f"the measuring program has ended: {self.child.wait()}")
        return json.loads(line)

    def go_on(self):
        self.child.stdin.write("\n")
        self.child.stdin.flush()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.child.stdin.close()
        self.child.wait(60)
        self.child.stdout.close()


def memory(pid):
    """Proportional share of the resident memory of a process, in KiB."""
    lines = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def supervisors(gateway):
    """Returns the supervisors that a gateway has started, and their copies in containers."""
    parents, names = {}, {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
                names[int(entry.name)] = (entry / "cmdline").read_bytes().split(b"\0")[0]
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    def is_below(pid):
        while pid in parents and pid != gateway:
            pid = parents[pid]
        return pid == gateway
    return [pid for pid, name in names.items() if name == b"gantry-supervisor" and is_below(pid)]


class Usage:
    """Use of a gateway and its supervisors."""

    def __init__(self, gateway):
        self.descriptors = len(list(pathlib.Path(f"/proc/{gateway}/fd").iterdir()))
        self.gateway = memory(gateway)
        pids = supervisors(gateway)
        self.count, self.supervisors = len(pids), sum(map(memory, pids))

    def is_near(self, other):
        return self.count <= other.count and self.descriptors <= other.descriptors + NEAR


def bench_attached(base, attached):
    """Measures a gateway with this number of attached processes in terminals."""
    with Processes(base) as processes:
        address = processes.gateway("worker", {"GANTRY_WORKER_TAGS": ""})
        pid = processes.children[-1].pid
        each = attached // CONTAINERS
        with Caller(processes, address, "attached", "--containers", CONTAINERS, "--each", each) as caller:
            caller.next()
            before = Usage(pid)
            caller.go_on()
            times = caller.next()
            during = Usage(pid)
            caller.go_on()
            caller.next()
            # The table contains what is left after this time.
            with contextlib.suppress(TimeoutError):
                wait_for("the end of the processes", lambda: Usage(pid).is_near(before), 10)
            after = Usage(pid)
            caller.go_on()
    per_process = lambda figure: (getattr(during, figure) - getattr(before, figure)) / attached
    one = lambda what, figure, unit="": row(what, [figure], unit=unit)
    lines = [
        one("memory of the gateway, before", before.gateway / 1024, "MiB"),
        one("memory of the gateway, for each attached process", per_process("gateway"), "KiB"),
        one("memory of the supervisors, for each attached process", per_process("supervisors"), "KiB"),
        one("memory of the gateway after the end of all", after.gateway / 1024, "MiB"),
        one("descriptors of the gateway, before", before.descriptors),
        one("descriptors of the gateway, for each attached process", per_process("descriptors")),
        one("descriptors of the gateway after the end of all", after.descriptors),
        row("start of a process with a terminal, 16 at a time: median", [statistics.median(times["started"])]),
        row("start of a process with a terminal, 16 at a time: 99th percentile", [p99(times["started"])]),
        row("a byte and its echo, while all are attached: median", [statistics.median(times["keys"])]),
        row("a byte and its echo, while all are attached: 99th percentile", [p99(times["keys"])]),
    ]
    text = [
        f"{attached:,} further processes with terminals, {each} in each of {CONTAINERS} containers of one worker. Each has a caller with a connection of its own. All callers are in one",
        "process, without `gantry exec`. Memory is the proportional share (PSS), which counts a page of the program once. Of these figures:",
        "",
        judged("descriptors of the gateway, for each attached process", per_process("descriptors"), DESCRIPTORS, ""),
        judged("descriptors of the gateway after the end of all, more than before", after.descriptors - before.descriptors, NEAR, ""),
        "",
    ]
    return [*table(f"{attached:,} attached processes", lines), *text]


def bench_driven(base, steps, at_once, rounds):
    """Measures driven steps beside submitted workloads, in rounds of this number of steps."""
    # Containers are deleted beside the steps, as on a worker that is always busy.
    with Processes(base, {"GANTRY_COLLECT_INTERVAL": "1s"}) as processes:
        address = processes.gateway("worker", {"GANTRY_WORKER_TAGS": ""})
        arguments = ("steps", "--steps", steps, "--at-once", at_once, "--rounds", rounds)
        with Caller(processes, address, *arguments) as caller:
            figures = caller.next()
    submitted, driven = ([steps / rate for rate in figures[kind]] for kind in ("submitted", "driven"))
    ratio = statistics.median(driven) / statistics.median(submitted)
    lines = [
        row(f"{steps} workloads, {at_once} at a time, from `Submit` to `finished`", figures["submitted"], unit="/s"),
        row(f"{steps} driven steps, {at_once} at a time", figures["driven"], unit="/s"),
        row("time of the workloads", submitted, unit="s"),
        row("time of the driven steps", driven, submitted, unit="s"),
        *(row(f"a driven step: `{call}`", figures[call]) for call in ("Place", "CreateContainer", "Attach", "Publish", "Release")),
    ]
    text = [
        "Four processes, PostgreSQL (fsync on) and the callers share the cores. Both kinds run `echo` in a container with both namespaces, with one output, which becomes an",
        "artifact. The driven step attaches to its process. The caller of a workload reads only its events. Rounds alternate. Garbage is collected every second, and a round",
        "begins when the containers of the previous one are deleted. Of these figures:",
        "",
        judged("time of the driven steps, times that of the workloads", ratio, 1.2, "×"),
        "",
    ]
    return [*table("Driven containers", lines), *text]

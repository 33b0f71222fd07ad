"""Output of processes."""

import contextlib
import pathlib
import subprocess
import threading
import time

from clusters import GANTRY, Cluster
from measure import MIB, row, table, timed


def resident(pid):
    """Returns the peak resident memory of a process in MiB, without the pages that it shares with the page cache."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return 0


def bench_output(base, runs, size, stall):
    lines = []
    pipe = f"head -c {size} /dev/zero | cat >/dev/null"
    reference = timed(lambda: subprocess.run(["sh", "-c", pipe], check=True), runs)
    speed = lambda figures: [size / 1e6 / (figure / 1e3) for figure in figures]
    lines.append(row("a pipe, `head -c \\| cat`", speed(reference), unit="MB/s"))
    command = ["run", "-q", "--no-stdin", "--", "head", "-c", str(size), "/dev/zero"]
    with Cluster(base) as cluster:
        cluster.run("run", "-q", "--", "true")
        figures = timed(lambda: cluster.run(*command, stdout=subprocess.DEVNULL), runs)
        lines.append(row("`gantry run`, the same bytes", speed(figures), speed(reference), unit="MB/s"))
        most = {}

        def watch(stop):
            while not stop.is_set():
                for pid in cluster.pids():
                    most[pid] = max(most.get(pid, 0), resident(pid))
                time.sleep(0.2)

        stop = threading.Event()
        watcher = threading.Thread(target=watch, args=(stop,))
        watcher.start()
        reader = subprocess.Popen([str(GANTRY), *command], env=cluster.env, cwd=cluster.home, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        got = len(reader.stdout.read(10 * MIB))
        time.sleep(stall)
        while chunk := reader.stdout.read(MIB):
            got += len(chunk)
        stop.set()
        watcher.join()
        assert reader.wait() == 0 and got == size, (reader.returncode, got)
    memory = max(most.values())
    line = f"| largest process of Gantry, with a reader that stalls for {stall} s | {memory:.0f} MiB | | |"
    print(line)
    return table("Output, 1 GiB", [*lines, line])

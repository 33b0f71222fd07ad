"""Further processes in a running container, beside `runc exec`, and keystrokes in a terminal."""

import os
import pty
import shutil
import statistics
import subprocess
import time

from clusters import GANTRY, Cluster, succeeds, wait_for
from measure import not_applicable, row, table, timed
from start import runc_bundle


def bench_runc_exec(base, runs):
    bundle = runc_bundle(base, True)
    runc = ["runc", "--root", str(bundle / "state")]
    try:
        config = (bundle / "config.json").read_text().replace('["true"]', '["sleep", "1000"]')
        (bundle / "config.json").write_text(config)
        subprocess.run([*runc, "run", "--detach", "--bundle", str(bundle), "gantry-bench"], check=True,
                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        run = lambda: subprocess.run([*runc, "exec", "gantry-bench", "true"], check=True, stdin=subprocess.DEVNULL)
        timed(run, 3)
        return timed(run, runs)
    finally:
        subprocess.run([*runc, "delete", "--force", "gantry-bench"], check=True)
        subprocess.run(["umount", str(bundle / "rootfs")], check=True)
        shutil.rmtree(bundle)


def keystrokes(command, count, environment):
    """Round trips of single bytes through a terminal whose program sends them back, in ms."""
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe(command[0], command, environment)
    read = b""
    while b"ready" not in read:
        read += os.read(terminal, 4096)
    figures = []
    for number in range(count):
        key = b"%d" % (number % 10)
        begin = time.perf_counter()
        os.write(terminal, key)
        answer = b""
        while key not in answer:
            answer += os.read(terminal, 4096)
        figures.append((time.perf_counter() - begin) * 1e3)
    # The program, or the command line, ends with its terminal.
    os.close(terminal)
    os.waitpid(child, 0)
    return figures


# Sends each byte back.
ECHO = "stty raw -echo; echo ready; exec cat"


def quantile(name, figures):
    figures = sorted(figures)
    at = figures[min(len(figures) - 1, int(len(figures) * 0.99))]
    return [row(f"{name}: median", [statistics.median(figures)]), row(f"{name}: 99th percentile", [at])]


def bench_exec(base, runs, count):
    lines = []
    reference = None
    runc = "`runc exec`, `true` in a container with a network and a user namespace"
    if shutil.which("runc"):
        reference = bench_runc_exec(base, runs)
        lines.append(row(runc, reference))
    else:
        lines.append(not_applicable(runc, "there is no runc command"))
    with Cluster(base) as cluster:
        workload = cluster.run("run", "-d", "--", "sleep", "1000", stdout=subprocess.PIPE).stdout.decode().strip()
        run = lambda: cluster.run("exec", workload, "true")
        wait_for("the workload", lambda: succeeds([str(GANTRY), "exec", workload, "true"], env=cluster.env, cwd=cluster.home))
        timed(run, 3)
        lines.append(row("`gantry exec ID true` on a warm cluster", timed(run, runs), reference))
        local = keystrokes(["sh", "-c", ECHO], count, os.environ)
        lines.extend(quantile("a keystroke and its echo, in a local terminal", local))
        command = [str(GANTRY), "exec", "-it", workload, "sh", "-c", ECHO]
        lines.extend(quantile("the same through `gantry exec -it`", keystrokes(command, count, {**cluster.env, "TERM": "xterm"})))
        cluster.run("cancel", workload)
    goals = "The goals are 10 ms more than `runc exec`, and 2 ms for the 99th percentile of a keystroke."
    return [*table("Further processes and terminals", lines), goals, ""]

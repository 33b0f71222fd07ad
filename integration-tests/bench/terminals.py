"""Further processes in a running container, beside `runc exec`, and keystrokes in a terminal."""

import contextlib
import os
import pty
import shutil
import statistics
import subprocess

from clusters import GANTRY, Cluster, Processes, succeeds, wait_for
from measure import not_applicable, row, table, timed
from start import runc_bundle


@contextlib.contextmanager
def runc_container(base):
    """Runs a container of runc, and yields an action that runs a further process in it. `None`: there is no runc."""
    if not shutil.which("runc"):
        yield None
        return
    bundle = runc_bundle(base, True)
    runc = ["runc", "--root", str(bundle / "state")]
    try:
        config = (bundle / "config.json").read_text().replace('["true"]', '["sleep", "1000"]')
        (bundle / "config.json").write_text(config)
        subprocess.run([*runc, "run", "--detach", "--bundle", str(bundle), "gantry-bench"], check=True,
                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        yield lambda: subprocess.run([*runc, "exec", "gantry-bench", "true"], check=True, stdin=subprocess.DEVNULL)
    finally:
        subprocess.run([*runc, "delete", "--force", "gantry-bench"], check=True)
        subprocess.run(["umount", str(bundle / "rootfs")], check=True)
        shutil.rmtree(bundle)


# Sends each byte back.
ECHO = "stty raw -echo; echo ready; exec cat"


class Terminal:
    """Terminal with a program that sends each byte back."""

    def __init__(self, command, environment):
        self.child, self.terminal = pty.fork()
        if self.child == 0:
            os.execvpe(command[0], command, environment)
        # A later program must not keep this terminal open.
        os.set_inheritable(self.terminal, False)
        self.read_until(b"ready")

    def read_until(self, end):
        read = b""
        while end not in read:
            read += os.read(self.terminal, 4096)

    def keystroke(self, key):
        os.write(self.terminal, key)
        self.read_until(key)

    def close(self):
        # The program, or the command line, ends with its terminal.
        os.close(self.terminal)
        os.waitpid(self.child, 0)


def keystrokes(programs, count):
    """Round trips of single bytes through the terminal of each program, in ms.

    The terminals take turns, so that they meet the same load."""
    terminals = [Terminal(command, environment) for command, environment in programs]
    figures = [[] for _ in terminals]
    for number in range(count):
        for terminal, times in zip(terminals, figures):
            times += timed(lambda: terminal.keystroke(b"%d" % (number % 10)), 1)
    for terminal in terminals:
        terminal.close()
    return figures


def p99(figures):
    return sorted(figures)[int(len(figures) * 0.99)]


def judged(what, figure, most, unit="ms"):
    """Compares a figure with its goal."""
    with_unit = lambda figure: f"{figure} {unit}".strip()
    return f"- {what}: {with_unit(f'{figure:.2f}')}, {'met' if figure <= most else 'missed'}. The goal is {with_unit(most)}."


def detached(cluster, *options):
    """Starts a workload that waits, and returns its id when it runs."""
    workload = cluster.run("run", "-d", *options, "--", "sleep", "1000", stdout=subprocess.PIPE).stdout.decode().strip()
    wait_for("the workload", lambda: succeeds([str(GANTRY), "exec", workload, "true"], env=cluster.env, cwd=cluster.home))
    return workload


def bench_exec(base, runs, count):
    lines, goals = [], []
    with Cluster(base) as cluster, Processes(base) as processes, runc_container(base) as other:
        processes.gateway("worker")
        one, four = detached(cluster), detached(processes, "--tag", "worker")
        run = lambda: cluster.run("exec", one, "true")
        what = "`runc exec`, `true` in a container with a network and a user namespace"
        timed(run, 3)
        reference, figures = [], []
        for _ in range(runs):
            reference += timed(other, 1) if other else []
            figures += timed(run, 1)
        lines.append(row(what, reference) if other else not_applicable(what, "there is no runc command"))
        lines.append(row("`gantry exec ID true` on a warm cluster", figures, reference))
        if other:
            more = statistics.median(figures) - statistics.median(reference)
            goals.append(judged("`gantry exec`, more than `runc exec`", more, 10))
        behind = {**processes.env, "GANTRY_SERVER": f"{processes.env['GANTRY_SERVER']},proxy={processes.proxy()}"}
        shell = lambda workload: [str(GANTRY), "exec", "-it", workload, "sh", "-c", ECHO]
        terminals = [
            ("a keystroke and its echo, in a local terminal", ["sh", "-c", ECHO], os.environ, None),
            ("a keystroke through `gantry exec -it`, one process, a Unix socket", shell(one), cluster.env, 2),
            ("a keystroke through `gantry exec -it`, the gateway as a process, TCP", shell(four), processes.env, 2),
            ("a keystroke through `gantry exec -it` and a proxy", shell(four), behind, 5),
        ]
        programs = [(command, {**environment, "TERM": "xterm"}) for _, command, environment, _ in terminals]
        for (what, _, _, most), times in zip(terminals, keystrokes(programs, count)):
            lines.append(row(f"{what}: median of {count:,}", [statistics.median(times)]))
            lines.append(row(f"{what}: 99th percentile", [p99(times)]))
            if most:
                goals.append(judged(f"{what}, 99th percentile", p99(times), most))
        cluster.run("cancel", one)
        processes.run("cancel", four)
    text = "The commands and the terminals take turns. The command lines, the services and PostgreSQL share the cores. Of these figures:"
    return [*table("Further processes and terminals", lines), text, "", *goals, ""]

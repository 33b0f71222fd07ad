"""Starting a command as an ordinary user, beside bubblewrap and root."""

import os
import shutil
import subprocess
import tempfile

from clusters import NOBODY, RELEASE, Cluster
from measure import not_applicable, row, table, timed

AS_USER = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
# An empty `/tmp`, and namespaces of its own for everything, as in our containers.
SANDBOX = ["bwrap", "--ro-bind", "/", "/", "--tmpfs", "/tmp", "--dev", "/dev", "--proc", "/proc", "--unshare-all", "true"]


def supervisor(base, prefix, runs):
    """Starts `true` with our supervisor alone."""
    directory = tempfile.mkdtemp(prefix="gantry-bench-direct-", dir=base)
    os.chmod(directory, 0o777)
    command = [*prefix, str(RELEASE / "examples/direct"), f"{directory}/state", str(runs + 3), "none"]
    try:
        ended = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        return [float(line) for line in ended.stdout.split()][3:]
    finally:
        shutil.rmtree(directory)


def command_line(base, prefix, runs):
    """Runs `true` on a warm cluster."""
    with Cluster(base, prefix=prefix) as cluster:
        run = lambda: cluster.run("run", "-q", "--network", "none", "--", "true")
        timed(run, 3)
        return timed(run, runs)


def bench_users(base, runs):
    lines = []
    reference = None
    what = "`bwrap`, `true` with namespaces of its own"
    if shutil.which("bwrap"):
        run = lambda: subprocess.run([*AS_USER, *SANDBOX], check=True, stdin=subprocess.DEVNULL)
        timed(run, 3)
        reference = timed(run, runs)
        lines.append(row(what, reference))
    else:
        lines.append(not_applicable(what, "there is no bwrap command"))
    lines.append(row("our supervisor alone, as an ordinary user", supervisor(base, AS_USER, runs), reference))
    lines.append(row("our supervisor alone, as root", supervisor(base, [], runs), reference))
    lines.append(row("`gantry run --network none -- true` on a warm cluster, as an ordinary user", command_line(base, AS_USER, runs), reference))
    lines.append(row("`gantry run --network none -- true` on a warm cluster, as root", command_line(base, [], runs), reference))
    return table("Starting a command as an ordinary user", lines)

"""Start of commands, beside the tools of the system."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import tarfile
import tempfile

from clusters import RELEASE, Cluster
from measure import not_applicable, row, table, timed


# Number of user ids of a container of Gantry, and the first one.
IDS = {"containerID": 0, "hostID": 0x70000000, "size": 1 << 20}


def runc_bundle(base, users):
    """Makes a bundle like that of Gantry: an overlay on the root of the machine, a network namespace, and a user namespace if `users`."""
    bundle = pathlib.Path(tempfile.mkdtemp(prefix="gantry-bench-runc-", dir=base))
    bundle.chmod(0o755)
    for name in ("upper", "work", "rootfs"):
        (bundle / name).mkdir()
    options = f"lowerdir=/,upperdir={bundle}/upper,workdir={bundle}/work"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(bundle / "rootfs")], check=True)
    subprocess.run(["runc", "spec"], cwd=bundle, check=True)
    config = json.loads((bundle / "config.json").read_text())
    config["process"]["terminal"] = False
    config["process"]["args"] = ["true"]
    config["root"]["readonly"] = False
    if users:
        config["linux"]["namespaces"].append({"type": "user"})
        config["linux"]["uidMappings"] = config["linux"]["gidMappings"] = [IDS]
    (bundle / "config.json").write_text(json.dumps(config))
    return bundle


def no_engine():
    """Returns why `docker run` cannot be measured. `None`: an engine answers."""
    if not shutil.which("docker"):
        return "there is no docker command"
    try:
        asked = subprocess.run(["docker", "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired:
        return "no engine answers within 10 s"
    return None if asked.returncode == 0 else "no engine answers"


@contextlib.contextmanager
def image():
    """Makes an image of the program `true` of this machine and its libraries."""
    program = os.path.realpath(shutil.which("true"))
    linked = subprocess.run(["ldd", program], stdout=subprocess.PIPE, text=True, check=True).stdout
    libraries = [word for word in linked.split() if word.startswith("/")]
    name = f"gantry-bench-{os.getpid()}"
    with tempfile.TemporaryFile() as archive:
        with tarfile.open(fileobj=archive, mode="w", dereference=True) as tar:
            tar.add(program, "bin/true")
            for library in libraries:
                tar.add(library, library.lstrip("/"))
        archive.seek(0)
        subprocess.run(["docker", "import", "-", name], stdin=archive, stdout=subprocess.DEVNULL, check=True)
    try:
        yield name
    finally:
        subprocess.run(["docker", "image", "rm", name], stdout=subprocess.DEVNULL, check=True)


def bench_runc(base, runs, users):
    bundle = runc_bundle(base, users)
    try:
        command = ["runc", "--root", str(bundle / "state"), "run", "--bundle", str(bundle), "gantry-bench"]
        run = lambda: subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        timed(run, 3)
        return timed(run, runs)
    finally:
        subprocess.run(["umount", str(bundle / "rootfs")], check=True)
        shutil.rmtree(bundle)


def bench_docker(runs):
    with image() as name:
        command = ["docker", "run", "--rm", name, "/bin/true"]
        run = lambda: subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        timed(run, 3)
        return timed(run, runs)


def bench_start(base, runs):
    lines = []
    reference = None
    runc = "`runc run`, `true` in an overlay of the machine's root, with a network namespace"
    if shutil.which("runc"):
        lines.append(row(runc, bench_runc(base, runs, False)))
        reference = bench_runc(base, runs, True)
        lines.append(row("the same with a user namespace, too", reference))
    else:
        lines.append(not_applicable(runc, "there is no runc command"))
    directory = tempfile.mkdtemp(prefix="gantry-bench-direct-", dir=base)
    direct = subprocess.run([str(RELEASE / "examples/direct"), directory, str(runs + 3)], stdout=subprocess.PIPE, check=True)
    lines.append(row("our supervisor alone, with both namespaces", [float(line) for line in direct.stdout.split()][3:], reference))
    shutil.rmtree(directory)
    with Cluster(base) as cluster:
        run = lambda: cluster.run("run", "-q", "--", "true")
        timed(run, 3)
        lines.append(row("`gantry run -- true` on a warm cluster, with both namespaces", timed(run, runs), reference))
    if fact := no_engine():
        lines.append(not_applicable("`docker run`", fact))
    else:
        lines.append(row("`docker run`, an image of `true` alone", bench_docker(runs), reference))
    return table("Starting something", lines)

"""Measures the main job against the plain tools of the system, in one run, and writes docs/performance.md.

Every figure is a median with its minimum and maximum, in milliseconds or MB/s; ratios are of medians of the same run.
"""

import contextlib
import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
RELEASE = ROOT / "target/release"
GANTRY = RELEASE / "gantry"
MIB = 1 << 20


class Cluster:
    """A local cluster with directories of its own."""

    def __init__(self, base):
        self.home = pathlib.Path(tempfile.mkdtemp(prefix="gantry-bench-", dir=base))
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "XDG_STATE_HOME": str(self.home / "state"),
            "XDG_RUNTIME_DIR": str(self.home / "run"),
            "GANTRY_GC_GRACE": "0s",
        }

    def run(self, *args, **kwargs):
        options = {"env": self.env, "cwd": self.home, "stdin": subprocess.DEVNULL, "check": True}
        options.update(kwargs)
        return subprocess.run([str(GANTRY), *args], **options)

    def pids(self):
        """All processes of this cluster."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if str(self.home).encode() in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.run("down", "--force", check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(self.home, ignore_errors=True)


def timed(action, runs, before=lambda: None):
    figures = []
    for _ in range(runs):
        before()
        begin = time.perf_counter()
        action()
        figures.append((time.perf_counter() - begin) * 1e3)
    return figures


def row(name, figures, reference=None, unit="ms"):
    median = statistics.median(figures)
    digits = 1 if median < 100 else 0
    ratio = f"{median / statistics.median(reference):.2f} ×" if reference else ""
    cells = [name, f"{median:.{digits}f} {unit}", f"{min(figures):.{digits}f} – {max(figures):.{digits}f}", ratio]
    line = "| " + " | ".join(cells) + " |"
    print(line, flush=True)
    return line


def table(title, lines):
    return [f"### {title}", "", "| What | Median | Min – max | Ratio |", "|---|---|---|---|", *lines, ""]


def runc_bundle(base):
    """A bundle like ours: the machine's root below an overlay."""
    bundle = pathlib.Path(tempfile.mkdtemp(prefix="gantry-bench-runc-", dir=base))
    for name in ("upper", "work", "rootfs"):
        (bundle / name).mkdir()
    options = f"lowerdir=/,upperdir={bundle}/upper,workdir={bundle}/work"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(bundle / "rootfs")], check=True)
    subprocess.run(["runc", "spec"], cwd=bundle, check=True)
    config = json.loads((bundle / "config.json").read_text())
    config["process"]["terminal"] = False
    config["process"]["args"] = ["true"]
    config["root"]["readonly"] = False
    (bundle / "config.json").write_text(json.dumps(config))
    return bundle


def not_applicable(name, fact):
    print(f"{name}: not applicable: {fact}", flush=True)
    return f"| {name} | not applicable: {fact} | | |"


def no_engine():
    """Why `docker run` cannot be measured. `None`: an engine answers."""
    if not shutil.which("docker"):
        return "there is no docker command"
    try:
        asked = subprocess.run(["docker", "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired:
        return "no engine answers within 10 s"
    return None if asked.returncode == 0 else "no engine answers"


@contextlib.contextmanager
def image():
    """An image of this machine's `true` and what that is linked with."""
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


def bench_runc(base, runs):
    bundle = runc_bundle(base)
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
    runc = "`runc run`, `true` in an overlay of the machine's root"
    if shutil.which("runc"):
        reference = bench_runc(base, runs)
        lines.append(row(runc, reference))
    else:
        lines.append(not_applicable(runc, "there is no runc command"))
    directory = tempfile.mkdtemp(prefix="gantry-bench-direct-", dir=base)
    direct = subprocess.run([str(RELEASE / "examples/direct"), directory, str(runs + 3)], stdout=subprocess.PIPE, check=True)
    lines.append(row("our supervisor alone, the same", [float(line) for line in direct.stdout.split()][3:], reference))
    shutil.rmtree(directory)
    with Cluster(base) as cluster:
        run = lambda: cluster.run("run", "-q", "--", "true")
        timed(run, 3)
        lines.append(row("`gantry run -- true` on a warm cluster", timed(run, runs), reference))
    if fact := no_engine():
        lines.append(not_applicable("`docker run`", fact))
    else:
        lines.append(row("`docker run`, an image of `true` alone", bench_docker(runs), reference))
    return table("Starting something", lines)


def make_tree(root, files, size):
    """Files of one size, half of whose bytes compress well."""
    noise = random.Random(1)
    for index in range(files):
        directory = root / f"d{index % 100:02}"
        directory.mkdir(parents=True, exist_ok=True)
        half = noise.randbytes(size // 2)
        (directory / f"f{index:05}").write_bytes(half + b"gantry " * (size // 14) + b" " * (size - size // 2 - 7 * (size // 14)))


def bench_tree(name, base, runs, files, size):
    work = pathlib.Path(tempfile.mkdtemp(prefix="gantry-bench-tree-", dir=base))
    tree, copy, down = work / "tree", work / "copy", work / "down"
    make_tree(tree, files, size)
    # Files that were modified just now are never trusted to be unchanged; let the tree settle as any real one has.
    time.sleep(2.5)
    lines = []
    tar = f"mkdir {copy} && tar -C {tree} -c . | tar -C {copy} -x"
    clear = lambda path: lambda: shutil.rmtree(path, ignore_errors=True)
    timed(lambda: subprocess.run(["sh", "-c", tar], check=True), 1, clear(copy))
    reference = timed(lambda: subprocess.run(["sh", "-c", tar], check=True), runs, clear(copy))
    shutil.rmtree(copy)
    lines.append(row(f"{name}: `tar c \\| tar x`", reference))
    uploads, again, downloads, same = [], [], [], []
    for _ in range(runs):
        with Cluster(base) as cluster:
            cluster.run("status", check=False, stdout=subprocess.DEVNULL)
            cluster.run("run", "-q", "--", "true")
            out = subprocess.PIPE
            begin = time.perf_counter()
            artifact = cluster.run("upload", "-q", str(tree), stdout=out).stdout.decode().split()[-1]
            uploads.append((time.perf_counter() - begin) * 1e3)
            begin = time.perf_counter()
            cluster.run("upload", "-q", str(tree), stdout=out)
            again.append((time.perf_counter() - begin) * 1e3)
            shutil.rmtree(down, ignore_errors=True)
            begin = time.perf_counter()
            cluster.run("download", "-q", artifact, str(down))
            downloads.append((time.perf_counter() - begin) * 1e3)
            begin = time.perf_counter()
            cluster.run("download", "-q", artifact, str(down))
            same.append((time.perf_counter() - begin) * 1e3)
    lines.append(row(f"{name}: upload", uploads, reference))
    lines.append(row(f"{name}: upload again, unchanged", again, uploads))
    lines.append(row(f"{name}: download", downloads, reference))
    lines.append(row(f"{name}: download again, unchanged", same, downloads))
    shutil.rmtree(work)
    return lines


def resident(pid):
    """The most memory that a process ever had resident, in MiB, without what it shares with the page cache."""
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
    line = f"| largest process of ours, with a reader that stalls for {stall} s | {memory:.0f} MiB | | |"
    print(line)
    return table("Output, 1 GiB", [*lines, line])


def machine():
    cpus = os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return f"{cpus} cores, {memory:.0f} GiB, Linux {os.uname().release.split('-')[0]}"


def main():
    if os.geteuid() != 0:
        sys.exit("make bench runs containers: it needs root")
    quick = "--quick" in sys.argv
    runs = 5 if quick else 21
    tree_runs = 3 if quick else 5
    disk = "/var/tmp"
    text = ["# Performance", ""]
    text += [f"Measured by `make bench` on {machine()}. Medians; ratios are of medians of the same run.", ""]
    text += ["A file that was modified within the last two seconds is never trusted to be unchanged. The trees are older; an unchanged transfer is", "the next command after the first one, and sends the manifest, or its digest, and no content.", ""]
    text += bench_start(disk, runs)
    trees = []
    for name, base in (("/dev/shm", "/dev/shm"), ("disk", disk)):
        trees += bench_tree(name, base, tree_runs, 10_000, 107_374)
    text += table("1 GiB in 10,000 files, half of it compressible", trees)
    text += bench_output(disk, 3 if quick else 5, 1 << 30, 3 if quick else 30)
    if not quick:
        (ROOT / "docs/performance.md").write_text("\n".join(text).rstrip() + "\n")
        print("written to docs/performance.md")


main()

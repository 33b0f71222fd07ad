"""Upload and download of trees."""

import pathlib
import random
import shutil
import subprocess
import tempfile
import time

from clusters import Cluster
from measure import row, table, timed


def make_tree(root, files, size):
    """Makes files of one size, half of whose bytes compress well."""
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
    # The scanner never trusts recently modified files, so the tree must be older.
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


def bench_trees(disk, runs):
    lines = []
    for name, base in (("/dev/shm", "/dev/shm"), ("disk", disk)):
        lines += bench_tree(name, base, runs, 10_000, 107_374)
    return table("1 GiB in 10,000 files, half of it compressible", lines)

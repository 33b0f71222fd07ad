"""Edits a repository and runs again, as in a day of work, and checks how much of the disk the cluster takes.

usage: edits.py [--runs N] [--seed N] [--release]

The state of a local cluster is on a file system of 20 GiB. Its input is a tree of 2 GiB. Between two runs, some files change. Time runs SPEED times
as fast as in the office: runs, --keep and the grace of the collector are as much shorter, and otherwise the cluster has its defaults. The cluster
must never take more than 1.5 times the tree. Needs root, and 25 GiB of disk in /var/tmp.
"""

import argparse
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent / "bench"))

import clusters

GIB = 1 << 30
DISK, TREE, MOST = 20 * GIB, 2 * GIB, 1.5
FILES, DIRECTORIES = 30_000, 3_000
# In the office, a run begins every 90 seconds. Results are kept for an hour, the default of --keep.
PACE, SPEED = 90, 30
KEEP, GRACE = 3600 / SPEED, 300 / SPEED


def used(path):
    found = os.statvfs(path)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def make_repository(tree, source):
    """Most files are small, and few files have most of the bytes."""
    weights = [source.lognormvariate(0, 1.5) for _ in range(FILES)]
    paths = []
    for number, weight in enumerate(weights):
        path = tree / f"d{number % 50}/d{number % DIRECTORIES}/file{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.randbytes(int(weight / sum(weights) * TREE)))
        paths.append(path)
    return paths


def edit(paths, source, number):
    # Every now and then another branch is checked out.
    count = len(paths) // 100 if number % 60 == 59 else source.randint(1, 3)
    for path in source.sample(paths, count):
        path.write_bytes(source.randbytes(path.stat().st_size))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--release", action="store_true")
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("this mounts a file system: it needs root")
    if not options.release:
        clusters.RELEASE = clusters.ROOT / "target/debug"
        clusters.GANTRY = clusters.RELEASE / "gantry"
    print(f"seed {options.seed}", flush=True)
    source = random.Random(options.seed)
    work = pathlib.Path(tempfile.mkdtemp(prefix="gantry-edits-", dir="/var/tmp"))
    image, disk, tree = work / "image", work / "disk", work / "tree"
    with open(image, "wb") as file:
        file.truncate(DISK)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    disk.mkdir()
    subprocess.run(["mount", "-o", "loop", image, disk], check=True)
    try:
        paths = make_repository(tree, source)
        size = sum(path.stat().st_blocks * 512 for path in paths)
        with clusters.Cluster(disk, {"GANTRY_GC_GRACE": f"{GRACE:.0f}s"}) as cluster:
            cluster.run("run", "-q", "--", "true")
            empty, most, slowest = used(disk), 0, 0
            began = time.monotonic()
            for number in range(options.runs):
                # A run that took longer than its time delays the next ones.
                time.sleep(max(0, began + number * PACE / SPEED - time.monotonic()))
                edit(paths, source, number)
                begin = time.monotonic()
                words = ("run", "-q", "--keep", f"{KEEP:.0f}s", "-i", "src=.", "-o", f"out={work}/out", "--", "sh", "-c", "find src | sort > out/list")
                cluster.run(*words, cwd=tree)
                took, now = time.monotonic() - begin, used(disk) - empty
                most, slowest = max(most, now), max(slowest, took) if number else 0
                if number % 20 == 0:
                    print(f"run {number}: {took:.1f} s, {now / size:.2f} of the tree on the disk", flush=True)
            late = max(0, time.monotonic() - began - options.runs * PACE / SPEED)
            print(f"{options.runs} runs, {late:.0f} s late; the slowest after the first took {slowest:.1f} s", flush=True)
            print(f"at most {most / size:.2f} times the tree of {size / GIB:.1f} GiB were on the disk")
    finally:
        subprocess.run(["umount", disk], check=True)
        shutil.rmtree(work)
    if most > MOST * size:
        sys.exit(f"the cluster took more than {MOST} times the tree; seed {options.seed}")


main()

"""Runs with an input of which a part changes in between."""

import pathlib
import random
import shutil
import subprocess
import tempfile
import time

from clusters import Cluster
from measure import MIB, row, table, timed
from trees import make_tree

FILES, SIZE = 10_000, 97_000
EDITS, IN_PLACE = 20, 5


def used(path):
    """The bytes of a directory on the disk. Each file counts once. Overlays and files that vanish do not count."""
    return int(subprocess.run(["du", "-sx", "--block-size=1", str(path)], capture_output=True).stdout.split()[0])


def bench_versions(base, runs):
    work = pathlib.Path(tempfile.mkdtemp(prefix="gantry-bench-versions-", dir=base))
    tree = work / "tree"
    make_tree(tree, FILES, SIZE)
    # The scanner never trusts recently modified files, so the tree must be older.
    time.sleep(2.5)
    change = random.Random(1)
    figures = {what: [] for what in ("cold", "same", "edited", "renamed", "grown", "in_place", "in_place_grown")}
    try:
        for number in range(runs):
            with Cluster(base) as cluster:
                cluster.run("run", "-q", "--", "true")
                use = lambda: cluster.run("run", "-q", "-i", f"src={tree}", "--", "true")

                def edit():
                    path = tree / f"d{change.randrange(100):02}"
                    next(iter(sorted(path.iterdir()))).write_bytes(change.randbytes(SIZE))

                figures["cold"] += timed(use, 1)
                figures["same"] += timed(use, 1)
                before = used(cluster.home)
                figures["edited"] += timed(use, EDITS, edit)
                figures["grown"].append((used(cluster.home) - before) / EDITS / MIB)
                (tree / "d99").rename(tree / "elsewhere")
                figures["renamed"] += timed(use, 1)
                (tree / "elsewhere").rename(tree / "d99")
                edits = iter(range(IN_PLACE + 1))

                def in_place():
                    write = f"head -c {SIZE} /dev/urandom > src/d00/made{next(edits)}"
                    cluster.run("run", "-q", "-i", f"src={tree}", "-o", f"src={tree}", "--", "sh", "-c", write)

                in_place()
                before = used(cluster.home)
                figures["in_place"] += timed(in_place, IN_PLACE)
                figures["in_place_grown"].append((used(cluster.home) - before) / IN_PLACE / MIB)
    finally:
        shutil.rmtree(work)
    lines = [
        row("`gantry run -i src=.`, first", figures["cold"]),
        row("the same, unchanged", figures["same"], figures["cold"]),
        row("one file changed", figures["edited"], figures["cold"]),
        row("one directory renamed", figures["renamed"], figures["cold"]),
        row("growth of the disk, for each change of a file", figures["grown"], None, "MiB"),
        row("`gantry run -i src=. -o src=.`, one new file", figures["in_place"], figures["cold"]),
        row("growth of the disk, for each such run", figures["in_place_grown"], None, "MiB"),
    ]
    note = f"{FILES:,} files of {SIZE // 1000} kB. One file at a time changes, {EDITS} times in a row. Each time is that of the whole command, with `true` in the container. The disk grows by the file, and by the names of the others in a new tree."
    return [*table("Versions of an input", lines), note, ""]

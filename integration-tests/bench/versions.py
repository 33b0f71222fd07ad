"""Runs with an input of which a part changes in between."""

import json
import pathlib
import random
import shutil
import subprocess
import tempfile
import time

from clusters import Cluster, Processes
from measure import MIB, row, table, timed
from trees import make_tree

FILES, SIZE = 10_000, 97_000
LARGE = 4 << 30
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
    return [*table("Versions of an input", lines), note, "", *bench_elsewhere(base, runs), *bench_large(base)]


def bench_elsewhere(base, runs):
    """Copies of an input between workers, of which the destination has an earlier version."""
    work = pathlib.Path(tempfile.mkdtemp(prefix="gantry-bench-elsewhere-", dir=base))
    tree = work / "tree"
    figures = {what: [] for what in ("cold", "cold bytes", "changed", "changed bytes", "renamed", "renamed bytes")}
    try:
        for number in range(runs):
            shutil.rmtree(tree, ignore_errors=True)
            make_tree(tree, FILES, SIZE)
            change = random.Random(number)
            with Processes(base) as processes:

                def copied(what):
                    """Copies the tree from one worker to the other, and notes the time and the bytes."""
                    artifact = processes.run("upload", "-q", str(tree), capture_output=True, text=True).stdout.strip()
                    if what == "cold":
                        processes.gateway("b")
                        processes.run("run", "-q", "--tag", "b", "--", "true")
                    else:
                        processes.run("uncordon", "b", capture_output=True)
                    words = ("run", "-q", "--tag", "b", "-i", f"in=artifact:{artifact}:ro", "--", "true")
                    [first, again] = timed(lambda: processes.run(*words), 2)
                    figures[what].append(first - again)
                    runs = json.loads(processes.run("list", "workloads", "--json", "--limit", "2", capture_output=True, text=True).stdout.splitlines()[1])
                    shown = json.loads(processes.run("show", "workload", runs["workload_id"], "--json", capture_output=True, text=True).stdout)
                    figures[f"{what} bytes"].append(shown["usage"]["bytes_in"] / MIB)
                    # Uploads go to the other worker.
                    processes.run("cordon", "b", capture_output=True)

                processes.gateway("a")
                copied("cold")
                for path in change.sample(sorted(tree.glob("*/*")), FILES // 100):
                    path.write_bytes(change.randbytes(SIZE))
                copied("changed")
                (tree / "d99").rename(tree / "elsewhere")
                copied("renamed")
    finally:
        shutil.rmtree(work)
    lines = [
        row("an input that the other worker lacks", figures["cold"]),
        row("bytes", figures["cold bytes"], None, "MiB"),
        row("one per cent of its files changed", figures["changed"], figures["cold"]),
        row("bytes", figures["changed bytes"], figures["cold bytes"], "MiB"),
        row("one directory renamed", figures["renamed"], figures["cold"]),
        row("bytes", figures["renamed bytes"], figures["cold bytes"], "MiB"),
    ]
    note = f"{FILES:,} files of {SIZE // 1000} kB, between two host workers on this machine. The time of a run, minus the time of the same run again."
    return [*table("Versions of an input on another worker", lines), note, ""]


def bench_large(base):
    """A large file of which one per cent changes in the middle."""
    work = pathlib.Path(tempfile.mkdtemp(prefix="gantry-bench-large-", dir=base))
    (work / "tree").mkdir()
    file, noise = work / "tree/image", random.Random(1)
    with open(file, "wb") as out:
        for _ in range(LARGE >> 24):
            out.write(noise.randbytes(1 << 24))
    figures = {}
    try:
        with Cluster(base) as cluster:
            cluster.run("run", "-q", "--", "true")

            def use(what):
                time.sleep(2.5)
                before = used(cluster.home)
                run = lambda: cluster.run("run", "--json", "-i", f"src={work}/tree", "--", "true", stdout=subprocess.PIPE, text=True)
                begin = time.monotonic()
                events = [json.loads(line) for line in run().stdout.splitlines()]
                took = (time.monotonic() - begin) * 1000
                sent = next(event["sent_bytes"] for event in events if "sent_bytes" in event)
                figures[what] = ([took], [sent / MIB], [(used(cluster.home) - before) / MIB])

            use("cold")
            with open(file, "r+b") as out:
                out.seek(LARGE // 2)
                out.write(noise.randbytes(LARGE // 100))
            use("overwritten")
            with open(file, "r+b") as out:
                out.seek(LARGE // 2)
                rest = out.read()
                out.seek(LARGE // 2)
                out.write(noise.randbytes(1000) + rest)
            use("inserted")
    finally:
        shutil.rmtree(work)
    names = {"cold": "the first run", "overwritten": "1 % in the middle overwritten", "inserted": "1,000 bytes in the middle inserted"}
    lines = []
    for what, name in names.items():
        reference = figures["cold"] if what != "cold" else (None, None, None)
        for part, (unit, about) in enumerate((("ms", ""), ("MiB", ": bytes sent"), ("MiB", ": growth of the disk"))):
            lines.append(row(name + about, figures[what][part], reference[part], unit))
    note = f"A file of {LARGE >> 30} GiB on a file system without shared blocks (ext4)."
    return [*table("Versions of a large file", lines), note, ""]

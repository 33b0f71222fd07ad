"""Transfers of trees between workers."""

import contextlib
import pathlib
import shutil
import subprocess
import tempfile

from clusters import ConcourseWorkers, Processes, make_image
from measure import row, table, timed
from trees import make_tree

PEER_TO_PEER = {"GANTRY_PEER_TO_PEER": "true"}
PAIRS = {
    "host → host": ("a", "b", {}),
    "host → Garden": ("a", "g", {}),
    "Garden → Garden, through both gateways": ("g", "h", {}),
    "Garden → Garden, peer to peer": ("g", "h", PEER_TO_PEER),
}
GARDEN = ("g", "h")


def transfer(base, work, source, target, more):
    """Milliseconds of a run on `target` that needs a tree which only `source` has, less those of the same run again.

    Their gateways have `more` settings.
    """
    with contextlib.ExitStack() as stack:
        processes = stack.enter_context(Processes(base))
        concourse = stack.enter_context(ConcourseWorkers(base, *GARDEN))
        settings = lambda name: {**concourse.settings(name), **more} if name in GARDEN else {}
        upload = lambda path: processes.run("upload", "-q", str(path), stdout=subprocess.PIPE).stdout.decode().strip()
        # While there is only one worker, uploads are stored on it.
        processes.gateway(source, settings(source))
        tree, image = upload(work / "tree"), upload(work / "image")
        processes.gateway(target, settings(target))
        command = ["run", "-q", "--tag", target, "--image", f"artifact:{image}", "--no-stdin"]
        program = ["--", "/bin/true"]
        # The image is transferred first.
        processes.run(*command, *program)
        moved = lambda: processes.run(*command, "-i", f"in=artifact:{tree}:ro", *program)
        [first, again] = timed(moved, 2)
        # Waits for the image and the tree.
        sent = [request for request in concourse.requests() if "/stream-p2p-out?" in request]
        assert len(sent) == (2 if more else 0), sent
        return first - again


def bench_place(name, base, runs):
    work = pathlib.Path(tempfile.mkdtemp(prefix="gantry-bench-transfer-", dir=base))
    make_tree(work / "tree", 10_000, 107_374)
    make_image(work / "image")
    copy = work / "copy"
    tar = f"mkdir {copy} && tar -C {work}/tree -c . | tar -C {copy} -x"
    clear = lambda: shutil.rmtree(copy, ignore_errors=True)
    reference = timed(lambda: subprocess.run(["sh", "-c", tar], check=True), runs + 1, clear)[1:]
    clear()
    lines = [row(f"{name}: `tar c \\| tar x`", reference)]
    for pair, (source, target, more) in PAIRS.items():
        figures = [transfer(base, work, source, target, more) for _ in range(runs)]
        lines.append(row(f"{name}: {pair}", figures, reference))
    shutil.rmtree(work)
    return lines


def bench_transfers(disk, runs):
    lines = []
    for name, base in (("/dev/shm", "/dev/shm"), ("disk", disk)):
        lines += bench_place(name, base, runs)
    text = [
        "The time of a run on one worker with an input that only the other one has, minus the time of the same run again, which finds the input there. Both workers are",
        "on this machine, each with its own gateway, and connected by the loopback. The Garden and Baggageclaim servers are those of the tests. They copy where a real",
        "worker makes a layer. Both runs contain that copy. If the disk dominates it, the difference means little and may be below zero.",
        "",
    ]
    return [*table("Worker to worker: 1 GiB in 10,000 files, half of it compressible", lines), *text]

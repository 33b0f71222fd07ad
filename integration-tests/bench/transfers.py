"""Transfers of trees between workers."""

import contextlib
import os
import pathlib
import resource
import shutil
import subprocess
import tempfile

from clusters import ConcourseWorkers, Processes, make_image
from measure import MIB, row, table, timed
from trees import make_tree

PEER_TO_PEER = {"GANTRY_PEER_TO_PEER": "true"}
PAIRS = {
    "host → host": ("a", "b", {}),
    "host → Garden": ("a", "g", {}),
    "Garden → Garden, through both gateways": ("g", "h", {}),
    "Garden → Garden, peer to peer": ("g", "h", PEER_TO_PEER),
}
GARDEN = ("g", "h")


def processor_seconds(processes):
    """Returns the processor time that the processes have used."""
    ticks = 0
    for process in processes:
        fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def processor_seconds_of_children():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def forget_peak(process):
    pathlib.Path(f"/proc/{process.pid}/clear_refs").write_text("5")


def peak_mib(process):
    """Returns the largest resident memory of a process since `forget_peak`."""
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024 / MIB


def transfer(base, work, source, target, more):
    """A run on `target` that needs a tree which only `source` has, less the same run again. Their gateways have `more` settings.

    Returns the milliseconds, the processor seconds of both gateways and the streamer, and the largest memory of a gateway in MiB.
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
        gateways = [processes.named[source], processes.named[target]]
        used = lambda: processor_seconds([*gateways, processes.named["streamer"]])
        for gateway in gateways:
            forget_peak(gateway)
        seconds = [used()]
        [first, again] = timed(lambda: (moved(), seconds.append(used())), 2)
        # Waits for the image and the tree.
        sent = [request for request in concourse.requests() if "/stream-p2p-out?" in request]
        assert len(sent) == (2 if more else 0), sent
        peak = max(peak_mib(gateway) for gateway in gateways)
        return first - again, (seconds[1] - seconds[0]) - (seconds[2] - seconds[1]), peak


def bench_place(name, base, runs):
    work = pathlib.Path(tempfile.mkdtemp(prefix="gantry-bench-transfer-", dir=base))
    make_tree(work / "tree", 10_000, 107_374)
    make_image(work / "image")
    copy = work / "copy"
    tar = f"mkdir {copy} && tar -C {work}/tree -c . | tar -C {copy} -x"
    clear = lambda: shutil.rmtree(copy, ignore_errors=True)
    seconds = [processor_seconds_of_children()]
    copied = lambda: (subprocess.run(["sh", "-c", tar], check=True), seconds.append(processor_seconds_of_children()))
    reference = timed(copied, runs + 1, clear)[1:]
    used = [after - before for before, after in zip(seconds[1:], seconds[2:])]
    clear()
    lines = [row(f"{name}: `tar c \\| tar x`", reference), row(f"{name}: `tar c \\| tar x`, processor time", used, unit="s")]
    for pair, (source, target, more) in PAIRS.items():
        times, processors, peaks = zip(*[transfer(base, work, source, target, more) for _ in range(runs)])
        lines.append(row(f"{name}: {pair}", times, reference))
        lines.append(row(f"{name}: {pair}, processor time", processors, used, unit="s"))
        lines.append(row(f"{name}: {pair}, largest memory of a gateway", peaks, unit="MiB"))
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
        "Processor times are those of both gateways and the streamer, or of both `tar`. The memory of a gateway is measured from before the first run to the end of the second.",
        "",
    ]
    return [*table("Worker to worker: 1 GiB in 10,000 files, half of it compressible", lines), *text]

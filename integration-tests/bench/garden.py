"""Runs on a Concourse worker, beside direct calls to it."""

import contextlib
import json
import pathlib
import shutil
import subprocess
import tempfile

from clusters import RELEASE, Cluster, ConcourseWorkers, GardenServer, make_image
from measure import not_applicable, row, table, timed

BARE = "bare calls: volume, container, run, output, exit, destroy both"
REAL = "with real containers: "
# The default of the setting.
DEFAULT_GRACE = "5m"


@contextlib.contextmanager
def measured(base, image, server, grace):
    """Measures direct calls to a worker, and runs on it through a separate cluster that destroys containers `grace` after their ends."""
    with ConcourseWorkers(base, "garden") as concourse:
        worker = concourse.workers[0]
        if server:
            worker["addr"] = server.address
        with Cluster(base, {**concourse.settings("garden"), "GANTRY_GC_GRACE": grace}) as cluster:
            say = lambda *args: cluster.run(*args, stdout=subprocess.PIPE).stdout.decode().strip()
            artifact = say("upload", "-q", str(image))
            run = lambda: cluster.run("run", "-q", "--tag", "garden", "--image", f"artifact:{artifact}", "--", "/bin/true")
            timed(run, 5)
            # Both use the same volume as their root.
            copies = [copy for copy in map(json.loads, say("--json", "list", "volumes").splitlines()) if copy["purpose"] == "replica"]
            attended = {entry["worker_id"] for entry in map(json.loads, say("--json", "list", "workers").splitlines()) if entry["name"] == "garden"}
            image = next(copy["volume_handle"] for copy in copies if copy["artifact_id"] == artifact and copy["worker_id"] in attended)
            volumes = worker["baggageclaim_url"].removeprefix("http://")
            command = [str(RELEASE / "bare_garden"), worker["addr"], volumes, image]
            options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "check": True}
            yield lambda: float(subprocess.run(command, **options).stdout), run


def measure_garden(base, rounds, runs, server=None):
    """Measures, in milliseconds, direct calls, direct calls until the exit of the process, runs of Gantry, and runs while it destroys containers:
    `rounds` times `runs` of each, in turns, so that all meet the same load. Each run is a separate process. Containers are made by `server`,
    or by the fake server of the tests."""
    bare, ended, later, at_once = [], [], [], []
    work = pathlib.Path(tempfile.mkdtemp(prefix="gantry-bench-image-", dir=base))
    make_image(work / "image")
    with measured(base, work / "image", server, DEFAULT_GRACE) as (call, run), measured(base, work / "image", server, "0s") as (_, run_at_once):
        for _ in range(rounds):
            bare += timed(lambda: ended.append(call()), runs)
            later += timed(run, runs)
            at_once += timed(run_at_once, runs)
    shutil.rmtree(work)
    return bare, ended, later, at_once


def rows(before, bare, ended, later, at_once):
    return [
        row(before + BARE, bare),
        row(before + "the same until the end of the process is known, without the start of the program", ended, bare),
        row(before + "`gantry run -- /bin/true`", later, bare),
        row(before + "the same, with `--gc-grace 0s`, while the containers of earlier runs are deleted", at_once, bare),
    ]


def bench_garden(base, rounds, runs):
    lines = rows("", *measure_garden(base, rounds, runs))
    missing = [command for command in ("runc", "go") if not shutil.which(command)]
    if missing:
        lines.append(not_applicable(REAL + BARE, f"there is no {missing[0]} command"))
    else:
        with GardenServer(base) as server:
            lines += rows(REAL, *measure_garden(base, rounds, runs, server))
    text = [
        "Each run is a separate process, with a volume of the same image. The lines with real containers show the cost of a run compared with bare calls.",
        "The server of the tests makes containers in no time, so the lines without them show the cost of Gantry alone: the calls to the services (submit, prepare,",
        "start, finish), each of which writes to disk, the intent before the start, and the cleanup after the process. Gantry deletes containers five minutes after",
        "their end by default. The first bare figure includes the deletion. runc makes the real containers behind the genuine Garden server library, like guardian,",
        "with separate namespaces and cgroups, but without seccomp, limits or a network beyond the loopback. A real worker spends time on these, too. Volumes are",
        "copies of the small image. The goal is 1.2 × on a worker that makes containers.",
        "",
    ]
    return [*table("`true` on a Concourse worker (simulated servers that speak its protocol)", lines), *text]

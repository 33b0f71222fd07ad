"""A Concourse worker, beside the bare calls to it."""

import json
import pathlib
import shutil
import subprocess
import tempfile

from clusters import RELEASE, Cluster, ConcourseWorkers, make_image
from measure import row, table, timed


def bench_garden(base, rounds, runs):
    """Figures of `rounds` times `runs` runs of each, in turns, so that both meet the same load. Each run is a process of its own."""
    ended, destroyed, ours = [], [], []
    work = pathlib.Path(tempfile.mkdtemp(prefix="gantry-bench-image-", dir=base))
    make_image(work / "image")
    with ConcourseWorkers(base, "garden") as concourse, Cluster(base, concourse.settings("garden")) as cluster:
        say = lambda *args: cluster.run(*args, stdout=subprocess.PIPE).stdout.decode().strip()
        artifact = say("upload", "-q", str(work / "image"))
        run = lambda: cluster.run("run", "-q", "--tag", "garden", "--image", f"artifact:{artifact}", "--", "/bin/true")
        timed(run, 5)
        worker = concourse.workers[0]
        # Both make their root from the same volume.
        copies = [copy for copy in map(json.loads, say("--json", "list", "volumes").splitlines()) if copy["purpose"] == "replica"]
        attended = {entry["worker_id"] for entry in map(json.loads, say("--json", "list", "workers").splitlines()) if entry["name"] == "garden"}
        image = next(copy["volume_handle"] for copy in copies if copy["artifact_id"] == artifact and copy["worker_id"] in attended)
        volumes = worker["baggageclaim_url"].removeprefix("http://")
        command = [str(RELEASE / "bare_garden"), worker["addr"], volumes, image]
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "check": True}
        bare = lambda: ended.append(float(subprocess.run(command, **options).stdout))
        for _ in range(rounds):
            destroyed += timed(bare, runs)
            ours += timed(run, runs)
    shutil.rmtree(work)
    lines = [
        row("bare calls: volume, container, run, output, exit, destroy both", destroyed),
        row("the same until the end of the process is known, without the start of the program", ended, destroyed),
        row("`gantry run -- /bin/true`, which destroys later", ours, destroyed),
    ]
    text = [
        "Each is a process of its own, over the same volume with the image. The servers of the tests make a container in no time, where a real",
        "worker takes its own: what ours adds does not grow with that. It is the way through the services (submit, prepare, start, finish), each",
        "of which writes to disk what it has promised, and on the wire the intent before the start, and the end of whatever the process left.",
        "",
    ]
    return [*table("`true` on a Concourse worker (the servers of the tests)", lines), *text]

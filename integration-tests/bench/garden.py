"""A Concourse worker, beside the bare calls to it."""

import pathlib
import shutil
import subprocess
import tempfile

from clusters import RELEASE, Cluster, ConcourseWorkers, make_image
from measure import row, table, timed


def bench_garden(base, rounds, runs):
    """Figures of `rounds` times `runs` runs of each, in turns, so that both meet the same load."""
    ended, destroyed, ours = [], [], []
    work = pathlib.Path(tempfile.mkdtemp(prefix="gantry-bench-image-", dir=base))
    make_image(work / "image")
    with ConcourseWorkers(base, "garden") as concourse, Cluster(base, concourse.settings("garden")) as cluster:
        artifact = cluster.run("upload", "-q", str(work / "image"), stdout=subprocess.PIPE).stdout.decode().strip()
        run = lambda: cluster.run("run", "-q", "--tag", "garden", "--image", f"artifact:{artifact}", "--", "/bin/true")
        timed(run, 5)
        worker = concourse.workers[0]
        volumes = worker["baggageclaim_url"].removeprefix("http://")
        bare = [str(RELEASE / "bare_garden"), worker["addr"], volumes, str(work / "image"), str(runs)]
        for _ in range(rounds):
            lines = subprocess.run(bare, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
            for figures, column in ((ended, 0), (destroyed, 1)):
                figures += [float(line.split()[column]) for line in lines]
            ours += timed(run, runs)
    shutil.rmtree(work)
    lines = [
        row("bare calls: volume, container, run, wait, destroy both", destroyed),
        row("the same until the end of the process is known", ended, destroyed),
        row("`gantry run -- /bin/true`, which destroys later", ours, destroyed),
    ]
    text = [
        "The servers of the tests make a container in no time, where a real worker takes its own: what ours adds does not grow with that.",
        "It is the way through the services (submit, prepare, start, finish, settle), and on the wire, one after the other: whether the",
        "process was started before (asked of containers and of volumes), the image's `metadata.json`, the intent, the proof of the start,",
        "how it ended, and the end of whatever it left behind.",
        "",
    ]
    return [*table("`true` on a Concourse worker (the servers of the tests)", lines), *text]

"""Copies of one artifact to many workers at once, over links of limited rate."""

import contextlib
import json
import os
import pathlib
import random
import shutil
import subprocess
import tempfile
import time

from clusters import GANTRY, RELEASE, end, wait_for
from links import inside, run
from measure import MIB, row, table

WORKERS, RATES = 9, (250, 1000)
NETWORK = "10.83.18"


class Star:
    """A cluster without workers, and workers in network namespaces. Each has a link to a bridge, to which the cluster belongs, too."""

    def __init__(self, base, mbit):
        self.mbit = mbit
        self.home = pathlib.Path(tempfile.mkdtemp(prefix="gantry-bench-fanout-", dir=base))
        self.stack = contextlib.ExitStack()
        self.stack.callback(shutil.rmtree, self.home, ignore_errors=True)
        self.stack.callback(self.unmount)
        self.env = {"PATH": os.environ["PATH"], "HOME": str(self.home), "GANTRY_TOKEN_FILE": str(self.home / "token")}

    def unmount(self):
        for line in reversed(pathlib.Path("/proc/self/mountinfo").read_text().splitlines()):
            if (at := line.split()[4]).startswith(f"{self.home}/"):
                run("umount", "--lazy", at)

    def namespace(self, name, address, limited):
        """Makes a namespace with a link to the bridge in the first one."""
        hub = f"gf{os.getpid()}hub"
        run("ip", "netns", "add", name)
        self.stack.callback(subprocess.run, ["ip", "netns", "del", name])
        run("ip", "-n", hub, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "-n", hub, "link", "set", name, "master", "bridge", "up")
        run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            run("ip", "-n", name, "link", "set", device, "up")
        if limited:
            for namespace, device in ((name, "eth0"), (hub, name)):
                run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{self.mbit}mbit", "burst", "256kb", "latency", "50ms")

    def start(self, namespace, program, settings):
        env = {**self.env, **settings}
        with open(self.home / f"{namespace}-{program}.log", "wb") as log:
            command = [*inside(namespace), str(RELEASE / program)]
            child = subprocess.Popen(command, env=env, cwd=self.home, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.stack.callback(end, child)

    def call(self, *args, **kwargs):
        return subprocess.run(self.command(*args), env=self.env, cwd=self.home, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, **kwargs)

    def command(self, *args):
        return [*inside(self.near), str(GANTRY), *args]

    def __enter__(self):
        (self.home / "token").write_text("the-token-of-the-bench")
        hub, self.near = (f"gf{os.getpid()}{name}" for name in ("hub", "c"))
        run("ip", "netns", "add", hub)
        self.stack.callback(subprocess.run, ["ip", "netns", "del", hub])
        run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", hub, "link", "set", "bridge", "up")
        self.namespace(self.near, f"{NETWORK}.1", limited=False)
        at = {name: f"http://{NETWORK}.1:{port}" for name, port in (("scheduler", 7401), ("artifact-store", 7402), ("streamer", 7403))}
        self.env["GANTRY_SERVER"] = f"scheduler={at['scheduler']},artifacts={at['artifact-store']},streamer={at['streamer']}"
        peers = {"GANTRY_SCHEDULER": at["scheduler"], "GANTRY_ARTIFACT_STORE": at["artifact-store"], "GANTRY_STREAMER": at["streamer"]}
        for name, address in at.items():
            database = {} if name == "streamer" else {"GANTRY_DATABASE_URL": f"sqlite://{self.home}/{name}.db"}
            self.start(self.near, name, {"GANTRY_LISTEN": address.removeprefix("http://"), **peers, **database})
        for index in range(WORKERS):
            namespace, address = f"gf{os.getpid()}w{index}", f"{NETWORK}.{index + 11}"
            self.namespace(namespace, address, limited=True)
            own = {
                "GANTRY_LISTEN": f"{address}:7404",
                "GANTRY_WORKER_NAME": f"w{index}",
                "GANTRY_WORKER_ALLOW": "host-image",
                "GANTRY_STATE_DIR": str(self.home / f"state{index}"),
                "GANTRY_RUNTIME_DIR": str(self.home / f"run{index}"),
            }
            self.start(namespace, "runtime-gateway", {**peers, **own})
        self.wait_for(WORKERS)
        listed = [json.loads(line) for line in self.call("list", "workers", "--json").stdout.splitlines()]
        self.ids = {worker["name"]: worker["worker_id"] for worker in listed}
        return self

    def wait_for(self, count):
        def is_there():
            with contextlib.suppress(subprocess.CalledProcessError):
                return self.call("list", "workers", "--json").stdout.count('"state":"running"') >= count
            return False

        wait_for(f"{count} workers", is_there)

    def __exit__(self, kind, *_):
        if kind:
            for log in sorted(self.home.glob("*.log")):
                print(f"--- {log.name}", log.read_text()[-2000:], sep="\n")
        self.stack.close()


def copied(star, tree, size, destinations):
    """Seconds until all of these workers have started a process with a new input."""
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir()
    with open(tree / "file", "wb") as out:
        for _ in range(size // MIB):
            out.write(random.randbytes(MIB))
    artifact = star.call("upload", "-q", str(tree)).stdout.strip()
    shown = star.call("show", "artifact", artifact, "--json").stdout
    to = [name for name, worker in star.ids.items() if worker not in shown][:destinations]
    words = ("run", "-q", "--no-stdin", "--network", "none", "-i", f"in=artifact:{artifact}:ro")
    begin = time.monotonic()
    runs = [subprocess.Popen(star.command(*words, "--worker", name, "--", "true"), env=star.env, cwd=star.home, stdin=subprocess.DEVNULL) for name in to]
    codes = [each.wait() for each in runs]
    took = time.monotonic() - begin
    assert not any(codes), codes
    star.call("rm", artifact)
    return took * 1e3


def bench_fanout(base, size, runs):
    lines = []
    for mbit in RATES:
        one, many = [], []
        share = size * mbit // max(RATES)
        with Star(base, mbit) as star:
            # Starts each worker's first container.
            copied(star, star.home / "tree", MIB, WORKERS - 1)
            for _ in range(runs):
                one.append(copied(star, star.home / "tree", share, 1))
                many.append(copied(star, star.home / "tree", share, WORKERS - 1))
        lines.append(row(f"{mbit} Mbit/s: {share >> 20} MiB to one worker", one))
        lines.append(row(f"{mbit} Mbit/s: the same to {WORKERS - 1} workers at once", many, one))
    text = [
        "An input in memory, which one worker has, and commands on other workers that need it. Each worker has a network namespace with a link of this rate. The time is",
        "that until the end of all commands. All gateways and their networks share the processors of this machine, which are fully used at the higher rate.",
        "",
    ]
    return [*table("One to many", lines), *text]

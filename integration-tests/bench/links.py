"""Upload and download over a slow link, and the choice of compression."""

import contextlib
import fcntl
import os
import pathlib
import random
import re
import select
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque

from clusters import GANTRY, RELEASE, ROOT, Cluster, end, wait_for
from measure import MIB, row, table, timed

MBIT = 100
DELAY = 0.02
MTU = 1500
NEAR, FAR = "10.83.17.1", "10.83.17.2"
PORT = 7400


def open_tun(name):
    """Makes a TUN device, and returns its descriptor, from which the packets that it sends are read."""
    IFF_TUN, IFF_NO_PI, TUNSETIFF = 0x0001, 0x1000, 0x400454CA
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return tun


def forward(one, other, delay):
    """Copies packets between two devices in both directions, each `delay` seconds late."""
    targets = {one: other, other: one}
    waiting = {one: deque(), other: deque()}
    while True:
        due = min((queue[0][0] for queue in waiting.values() if queue), default=None)
        timeout = None if due is None else max(0, due - time.monotonic())
        for tun in select.select([one, other], [], [], timeout)[0]:
            with contextlib.suppress(BlockingIOError):
                while True:
                    waiting[tun].append((time.monotonic() + delay, os.read(tun, 65536)))
        now = time.monotonic()
        for tun, queue in waiting.items():
            while queue and queue[0][0] <= now:
                with contextlib.suppress(BlockingIOError):
                    os.write(targets[tun], queue.popleft()[1])


class Link:
    """Two network namespaces and a link between them, with this rate and delay in each direction.

    The kernel limits the rate (`tbf`). A process of the benchmark delays the packets, because `netem` is missing in some kernels.
    """

    def __init__(self, mbit=MBIT, delay=DELAY):
        names = [f"gb{os.getpid()}{side}" for side in "nf"]
        self.near, self.far = names
        self.stack = contextlib.ExitStack()
        tuns = []
        for name, own, peer in ((self.near, NEAR, FAR), (self.far, FAR, NEAR)):
            run("ip", "netns", "add", name)
            self.stack.callback(subprocess.run, ["ip", "netns", "del", name])
            tuns.append(open_tun(name))
            run("ip", "link", "set", "dev", name, "netns", name)
            inside = ["ip", "-n", name]
            run(*inside, "link", "set", "lo", "up")
            run(*inside, "address", "add", own, "peer", peer, "dev", name)
            run(*inside, "link", "set", "dev", name, "mtu", str(MTU), "txqueuelen", "1000", "up")
            run("tc", "-n", name, "qdisc", "add", "dev", name, "root", "tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "50ms")
        self.forwarder = os.fork()
        if self.forwarder == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            forward(*tuns, delay)
        self.stack.callback(self.stop)
        for tun in tuns:
            os.close(tun)

    def stop(self):
        os.kill(self.forwarder, signal.SIGTERM)
        os.waitpid(self.forwarder, 0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stack.close()


class Loopback:
    """The loopback of this machine, in place of a link."""

    near = far = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def run(*command):
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def inside(namespace):
    # Unlike `ip netns exec`, this keeps the cgroups visible in /sys.
    return ("nsenter", f"--net=/run/netns/{namespace}") if namespace else ()


def plain_rate(link, size):
    """Bytes per second of a plain TCP connection from the far side."""
    receiver = f"""
import socket, time
listener = socket.create_server(("{NEAR}", 7399))
print("ready", flush=True)
stream, _ = listener.accept()
begin, got = time.monotonic(), 0
while data := stream.recv(1 << 20):
    got += len(data)
print(got / (time.monotonic() - begin), flush=True)
"""
    sender = f"""
import socket
stream = socket.create_connection(("{NEAR}", 7399))
stream.sendall(bytes({size}))
"""
    python = [sys.executable, "-c"]
    with subprocess.Popen([*inside(link.near), *python, receiver], stdout=subprocess.PIPE, text=True) as listening:
        listening.stdout.readline()
        run(*inside(link.far), *python, sender)
        return float(listening.stdout.readline())


class LinkedCluster(Cluster):
    """Cluster in one process on the near side of a link, with the command line on the far side."""

    def __init__(self, base, link):
        super().__init__(base)
        self.link = link
        host = NEAR if link.near else "127.0.0.1"
        if link.near:
            self.port = PORT
        else:
            with socket.create_server((host, 0)) as free:
                self.port = free.getsockname()[1]
        self.address = f"{host}:{self.port}"
        self.children = []

    def __enter__(self):
        command = [*inside(self.link.near), str(GANTRY), "up", "--listen", self.address, "--insecure"]
        options = {"env": self.env, "cwd": self.home, "stdin": subprocess.DEVNULL}
        with open(self.home / "up.log", "wb") as log:
            self.children.append(subprocess.Popen(command, stdout=log, stderr=log, **options))
        token = self.home / "state/gantry/token"
        self.client = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "XDG_STATE_HOME": str(self.home / "client"),
            "XDG_RUNTIME_DIR": str(self.home / "client-run"),
            "GANTRY_SERVER": f"http://{self.address}",
            "GANTRY_TOKEN_FILE": str(token),
        }
        wait_for("the cluster", lambda: token.exists() and self.call("status", check=False, capture_output=True).returncode == 0)
        return self

    def call(self, *args, side=None, **kwargs):
        options = {"env": self.client, "cwd": self.home, "stdin": subprocess.DEVNULL, "check": True}
        options.update(kwargs)
        return subprocess.run([*inside(side or self.link.far), str(GANTRY), *args], **options)

    def add_far_worker(self):
        """Starts a worker with its gateway on the far side."""
        near = f"http://{self.address}"
        env = {
            "PATH": os.environ["PATH"],
            "GANTRY_TOKEN_FILE": self.client["GANTRY_TOKEN_FILE"],
            "GANTRY_SCHEDULER": near,
            "GANTRY_ARTIFACT_STORE": near,
            "GANTRY_STREAMER": near,
            "GANTRY_LISTEN": f"{FAR}:{PORT}",
            "GANTRY_WORKER_NAME": "far",
            "GANTRY_WORKER_ALLOW": "host-image",
            "GANTRY_STATE_DIR": str(self.home / "far"),
            "GANTRY_RUNTIME_DIR": str(self.home / "far-run"),
        }
        command = [*inside(self.link.far), str(RELEASE / "runtime-gateway")]
        with open(self.home / "far.log", "wb") as log:
            self.children.append(subprocess.Popen(command, env=env, cwd=self.home, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        on_far = ["run", "-q", "--no-stdin", "--worker", "far", "--network", "none", "--", "true"]
        wait_for("the far worker", lambda: self.call(*on_far, check=False, capture_output=True).returncode == 0)

    def __exit__(self, kind, *_):
        for child in reversed(self.children):
            end(child)
        if kind:
            for log in sorted(self.home.glob("*.log")):
                print(f"--- {log.name}", log.read_text()[-4000:], sep="\n")
        # Volumes that were not swept yet.
        for line in reversed(pathlib.Path("/proc/self/mountinfo").read_text().splitlines()):
            if (at := line.split()[4]).startswith(f"{self.home}/"):
                run("umount", "--lazy", at)
        shutil.rmtree(self.home, ignore_errors=True)


def make_source(root, size):
    """Copies source code until there is this much of it. Each copy has another first line, so that no content is repeated."""
    sources = [path for path in sorted((ROOT / "services").rglob("*.rs")) + sorted((ROOT / "shared").rglob("*.rs"))]
    texts = [(path.relative_to(ROOT), path.read_bytes()) for path in sources]
    written, copy = 0, 0
    while written < size:
        for path, text in texts:
            file = root / f"copy-{copy}" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            text = b"// %d\n" % copy + text
            file.write_bytes(text)
            written += len(text)
            if written >= size:
                break
        copy += 1
    return written


def make_noise(root, size):
    noise = random.Random(1)
    root.mkdir(parents=True)
    for index in range(size // MIB):
        (root / f"noise-{index:04}").write_bytes(noise.randbytes(MIB))
    return size // MIB * MIB


AMOUNT = r"([\d.,]+) ([KMGT]?i?B)"
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def on_the_wire(text, verb):
    """Returns the bytes that the contents took on the network, as a command printed them."""
    compressed = re.search(rf"{verb} as {AMOUNT}", text)
    found = compressed or re.search(rf"{AMOUNT} {verb}", text)
    return float(found[1].replace(",", "")) * UNITS[found[2]], bool(compressed)


class Transfers:
    """Seconds of uploads and downloads, and the bytes on the network."""

    def __init__(self, cluster, tree):
        down = cluster.home / "down"
        began = time.perf_counter()
        uploaded = cluster.call("upload", str(tree), capture_output=True, text=True)
        self.up = time.perf_counter() - began
        self.up_wire, self.up_compressed = on_the_wire(uploaded.stderr, "sent")
        artifact = uploaded.stdout.split()[-1]
        began = time.perf_counter()
        downloaded = cluster.call("download", artifact, str(down), capture_output=True, text=True)
        self.down = time.perf_counter() - began
        self.down_wire, self.down_compressed = on_the_wire(downloaded.stderr, "fetched")
        shutil.rmtree(down)


def copy_seconds(cluster, tree):
    """Seconds of a run on the far worker that needs a tree of the near one, less those of the same run again."""
    artifact = cluster.call("upload", "-q", str(tree), side=cluster.link.near, capture_output=True, text=True).stdout.split()[-1]
    cluster.add_far_worker()
    command = ["run", "-q", "--no-stdin", "--worker", "far", "--network", "none", "-i", f"in=artifact:{artifact}:ro", "--", "true"]
    [first, again] = timed(lambda: cluster.call(*command), 2)
    return (first - again) / 1e3


def bench_links(base, size, runs):
    work = pathlib.Path(tempfile.mkdtemp(prefix="gantry-bench-links-", dir=base))
    trees = {"source code": work / "source", "random bytes": work / "noise"}
    sizes = {"source code": make_source(trees["source code"], size), "random bytes": make_noise(trees["random bytes"], size)}
    time.sleep(2.5)
    lines, judged = [], []
    nominal = MBIT * 1e6 / 8
    with Link() as link:
        lines.append(row("a plain TCP connection", [plain_rate(link, 32 * MIB) / 1e6 for _ in range(runs)], unit="MB/s"))
        for what, tree in trees.items():
            done, copies = [], []
            for _ in range(runs):
                with LinkedCluster(base, link) as cluster:
                    done.append(Transfers(cluster, tree))
                with LinkedCluster(base, link) as cluster:
                    copies.append(sizes[what] / copy_seconds(cluster, tree) / 1e6)
            for verb, seconds, wire in (
                ("upload", [each.up for each in done], [each.up_wire for each in done]),
                ("download", [each.down for each in done], [each.down_wire for each in done]),
            ):
                rates = [sizes[what] / each / 1e6 for each in seconds]
                lines.append(row(f"{verb}, {what}", rates, [nominal / 1e6], unit="MB/s"))
                judged.append((f"{verb}, {what}", statistics.median(wire) / sizes[what]))
            lines.append(row(f"worker to worker, {what}", copies, [nominal / 1e6], unit="MB/s"))
    with Loopback() as link:
        compressed = 0
        for what, tree in trees.items():
            done = []
            for _ in range(runs):
                with LinkedCluster(base, link) as cluster:
                    done.append(Transfers(cluster, tree))
            compressed += sum(each.up_compressed + each.down_compressed for each in done)
            for verb, seconds in (("upload", [each.up for each in done]), ("download", [each.down for each in done])):
                rates = [sizes[what] / each / 1e6 for each in seconds]
                lines.append(row(f"loopback: {verb}, {what}", rates, unit="MB/s"))
    shutil.rmtree(work)
    text = [
        f"Two network namespaces with a link of {MBIT} Mbit/s in each direction, {DELAY * 1e3:.0f} ms each way, and packets of {MTU} bytes. The cluster is on one side, and the command line",
        f"on the other one. Rates are of contents, over the time of the whole command, and ratios are to the rate of the link ({nominal / 1e6:.1f} MB/s). Each tree has {size / MIB:.0f} MiB, in memory.",
        f"On the network, contents took these parts of their size: {'; '.join(f'{what}: {part:.2f}' for what, part in judged)}. Over the loopback, {compressed} transfers were compressed.",
        "",
    ]
    return [*table(f"A link of {MBIT} Mbit/s", lines), *text]

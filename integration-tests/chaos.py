"""Kills, freezes and restarts services at random while commands run, and checks each command from outside.

usage: chaos.py [--seconds N] [--seed N] [--release]

Four services and PostgreSQL run as processes, with two host workers. Six callers run commands with inputs and outputs, of which most files are
those of the command before. Each command must run once, exit with its own code and bring back what it computed: an outage of up to --patience
costs time, not the command. Workers are also evacuated and taken into service again, and their connections to each other are cut. In the end,
everything is deleted, and nothing may be left: no rows, volumes, mounts, control groups or processes. Needs root.
"""

import argparse
import collections
import ctypes
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent / "bench"))

import clusters

CALLERS = 6
TAG = "chaos"
# The groups of the gateways, by which their packets are recognized.
GIDS = {"left": 4711, "right": 4712}
# Files of each caller that most commands share.
FILES = 40
# In each group, one process after the other is harmed, and the next one when it is ready again.
GROUPS = (("scheduler", "artifact-store", "streamer", "PostgreSQL"), ("left", "right"))
# Longest time for which a service is frozen or away, in seconds. Shorter than the patience of a command.
AWAY = 20
CLONE_NEWNET = 0x40000000


def noting_errors(ledger, action, *arguments):
    """Runs a thread. Its error is a failure of the test."""
    try:
        action(*arguments)
    except Exception as error:
        ledger.add(0, f"{action.__name__} ended: {error!r}")


class Ledger:
    """What the callers found. Thread safe."""

    def __init__(self):
        self.lock = threading.Lock()
        self.commands = 0
        self.slowest = 0.0
        self.failures = []

    def add(self, seconds, failure):
        with self.lock:
            self.commands += 1
            self.slowest = max(self.slowest, seconds)
            if failure:
                self.failures.append(failure)
                print(f"FAILED: {failure}", flush=True)


class Witness:
    """Counts, outside of the cluster, how often each command ran."""

    def __init__(self):
        self.lock = threading.Lock()
        self.seen = collections.Counter()
        self.server = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self.server.getsockname()[1]
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        while True:
            connection, _ = self.server.accept()
            with connection, connection.makefile() as lines:
                try:
                    number = int(lines.readline())
                except (ValueError, OSError):
                    # The command was killed before it had said its number.
                    continue
                with self.lock:
                    self.seen[number] += 1
                # The command goes on when it was counted.
                connection.sendall(b"counted\n")

    def count(self, number):
        with self.lock:
            return self.seen[number]


def make_sources(directory, source):
    """Makes the directory of a caller, which changes a little from command to command."""
    for number in range(FILES):
        path = directory / f"d{number % 5}/file{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.randbytes(20_000))


def call(processes, home, source, number, witness):
    """Runs one command, and returns what is wrong with its end. `None`: nothing."""
    (home / f"in/d{number % 5}/file{source.randrange(FILES // 5) * 5 + number % 5}").write_bytes(source.randbytes(20_000))
    contents = source.randbytes(source.choice((1, 1000, 300_000, 3_000_000)))
    (home / "in/data").write_bytes(contents)
    code = source.choice((0, 0, 0, 7))
    # The results of some commands belong into their input.
    output = source.choice(("in", "out"))
    script = (
        f"exec 3<>/dev/tcp/127.0.0.1/{witness.port}; echo {number} >&3; read -r <&3; "
        f"sha256sum < in/data | cut -c 1-64 > {output}/sum; echo {number}; sleep {source.random():.2f}; exit {code}"
    )
    # Some commands need their input on the other worker.
    place = source.choice(((), (), ("--worker", "left"), ("--worker", "right")))
    # What a command leaves when it or an upload fails is deleted after these times. They are longer than outages, during which no result can be
    # downloaded.
    kept = ("--keep", "2m", "--abandoned-after", "2m")
    words = ("run", "-q", "--tag", TAG, "--network", "host", *place, *kept, "-i", "in=in", "-o", f"{output}={output}", "--", "bash", "-c", script)
    ended = processes.run(*words, cwd=home, check=False, capture_output=True, text=True)
    said = f"command {number} ended with {ended.returncode}, stdout {ended.stdout!r}, stderr {ended.stderr[-2000:]!r}"
    if ended.returncode != code:
        return f"exit code {code} was expected: {said}"
    if ended.stdout != f"{number}\n":
        return f"the output was to be {number}: {said}"
    if witness.count(number) != 1:
        return f"it ran {witness.count(number)} times: {said}"
    # The outputs of failed commands are brought back, too.
    result = home / output / "sum"
    found = result.read_text().strip() if result.exists() else "nothing"
    if found != hashlib.sha256(contents).hexdigest():
        return f"the result is {found}: {said}"
    result.unlink()
    if (home / "in/data").read_bytes() != contents:
        return f"the input changed: {said}"
    return None


def caller(processes, home, seed, index, ledger, stop, witness):
    source = random.Random(f"{seed}/{index}")
    home = home / str(index)
    make_sources(home / "in", source)
    number = index
    while not stop.is_set():
        begin = time.monotonic()
        failure = call(processes, home, source, number, witness)
        ledger.add(time.monotonic() - begin, failure)
        number += CALLERS


def harm(processes, group, source, stop):
    """Harms one process of a group after the other."""
    while not stop.wait(source.uniform(1, 5)):
        name = source.choice(group)
        how = "restart" if name == "PostgreSQL" else source.choice(("kill", "freeze", "end"))
        seconds = source.choice((0.2, 2, source.uniform(2, AWAY)))
        print(f"{how} {name}" + ("" if how == "restart" else f" for {seconds:.1f} s"), flush=True)
        if how == "restart":
            processes.postgres.restart()
        elif how == "freeze":
            child = processes.named[name]
            child.send_signal(signal.SIGSTOP)
            stop.wait(seconds)
            child.send_signal(signal.SIGCONT)
        else:
            clusters.end(processes.named[name], signal.SIGKILL if how == "kill" else signal.SIGTERM)
            stop.wait(seconds)
            processes.respawn(name)


def nft(*words):
    subprocess.run(["nft", *words], check=True, capture_output=True)


def cut(ports, source, stop):
    """Cuts the connections of one gateway to the other for a while. What it needs goes by way of the streamer."""
    nft("add", "table", "inet", "chaos")
    nft("add", "chain", "inet", "chaos", "out", "{ type filter hook output priority 0; }")
    while not stop.wait(source.uniform(5, 15)):
        name, other = source.choice((("left", "right"), ("right", "left")))
        how = source.choice(("drop", "reject"))
        print(f"{how} what {name} sends to {other}", flush=True)
        nft("add", "rule", "inet", "chaos", "out", "meta", "skgid", str(GIDS[name]), "tcp", "dport", ports[other], how)
        stop.wait(source.uniform(2, AWAY))
        nft("flush", "chain", "inet", "chaos", "out")


def evacuate(processes, source, stop):
    """Takes one worker after the other out of service for a while. What only it has is copied first."""
    while not stop.wait(source.uniform(5, 15)):
        name = source.choice(("left", "right"))
        print(f"evacuate {name}", flush=True)
        try:
            # With services that are harmed meanwhile, it may fail.
            processes.run("cordon", "--evacuate", name, check=False, timeout=source.uniform(2, AWAY), capture_output=True)
        except subprocess.TimeoutExpired:
            pass
        processes.run("uncordon", "--patience", "2m", name, capture_output=True)


def lines(processes, *words):
    return processes.run(*words, capture_output=True, text=True).stdout.splitlines()


def groups():
    """The control groups of containers."""
    return {str(path) for path in pathlib.Path("/sys/fs/cgroup").glob("**/*gantry*/**/") if path.is_dir()}


def remains(processes, groups_before):
    """Says what is left after everything was deleted. `None`: nothing."""
    for kind in ("volumes", "containers", "artifacts", "leases"):
        state = ("--state", "sealed") if kind == "artifacts" else ()
        if left := [json.loads(line) for line in lines(processes, "list", kind, "--json", *state)]:
            artifact = left[0].get("artifact_id")
            why = processes.run("explain", artifact, capture_output=True, text=True).stdout if artifact else ""
            return f"{len(left)} {kind}: {left[0]}, {why}"
    tables = {"its_artifact_store": ("volumes", "containers", "pins", "sweep_queue"), "its_scheduler": ("outbox",)}
    for schema, names in tables.items():
        for name in names:
            counted = subprocess.run(processes.postgres.asked(f"SELECT count(*) FROM {schema}.{name}") + ["-tA"], capture_output=True, text=True, **processes.postgres.options)
            if counted.stdout.strip() != "0":
                return f"rows of {name}: {counted.stdout} {counted.stderr}"
    home = str(processes.home)
    if left := [line.split()[4] for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines() if f" {home}/" in line]:
        return f"mounts: {left}"
    if left := groups() - groups_before:
        return f"control groups: {left}"
    if left := [str(path) for name in ("left", "right") for path in (processes.home / f"state-{name}/volumes").iterdir()]:
        return f"directories of volumes: {left}"
    if left := set(clusters.Cluster.pids(processes)) - {child.pid for child in processes.children} - {os.getpid()}:
        return f"processes: {left}"
    return None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--release", action="store_true")
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("this runs containers: it needs root")
    if not options.release:
        clusters.RELEASE = clusters.ROOT / "target/debug"
        clusters.GANTRY = clusters.RELEASE / "gantry"
    # Rules for packets apply only in a network namespace of this process.
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        sys.exit(f"cannot make a network namespace: {os.strerror(ctypes.get_errno())}")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    print(f"seed {options.seed}", flush=True)
    ledger, stop, witness = Ledger(), threading.Event(), Witness()
    home = pathlib.Path(tempfile.mkdtemp(prefix="gantry-chaos-", dir="/var/tmp"))
    with clusters.Processes("/var/tmp") as processes:
        processes.groups, ports = GIDS, {}
        for name in GIDS:
            settings = {"GANTRY_WORKER_TAGS": TAG, "GANTRY_WORKER_ALLOW": "host-image,host-network"}
            ports[name] = processes.gateway(name, settings).rsplit(":", 1)[1]
        processes.run("run", "-q", "--tag", TAG, "--", "true")
        groups_before = groups()
        callers = [
            threading.Thread(target=noting_errors, args=(ledger, caller, processes, home, options.seed, index, ledger, stop, witness))
            for index in range(CALLERS)
        ]
        sources = [(group, random.Random(f"{options.seed}/{group}")) for group in GROUPS]
        harmers = [threading.Thread(target=noting_errors, args=(ledger, harm, processes, group, source, stop)) for group, source in sources]
        for action, harmed in ((evacuate, processes), (cut, ports)):
            source = random.Random(f"{options.seed}/{action.__name__}")
            harmers.append(threading.Thread(target=noting_errors, args=(ledger, action, harmed, source, stop)))
        for thread in (*callers, *harmers):
            thread.start()
        stop.wait(options.seconds)
        stop.set()
        for thread in (*harmers, *callers):
            thread.join()
        # Everything ends when nothing disturbs it.
        clusters.wait_for("the end of all workloads", lambda: not lines(processes, "ps", "-q"))
        left = None

        def is_quiet():
            nonlocal left
            processes.run("prune", "-y", check=False, capture_output=True)
            left = remains(processes, groups_before)
            return not left

        try:
            clusters.wait_for("that nothing is left", is_quiet, 240)
        except TimeoutError:
            ledger.add(0, f"after everything was deleted, this is left: {left}")
    print(f"{ledger.commands} commands, {len(ledger.failures)} failed; the slowest took {ledger.slowest:.0f} s; seed {options.seed}")
    if ledger.failures or not ledger.commands:
        sys.exit(f"what the failed commands left is in {home}")
    shutil.rmtree(home)


main()

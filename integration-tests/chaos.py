"""Kills, freezes and restarts services at random while commands run, and checks each command from outside.

usage: chaos.py [--seconds N] [--seed N] [--release]

Four services and PostgreSQL run as processes, with two host workers. Six callers run commands with inputs and outputs. Each command must exit
with its own code and bring back what it computed: an outage of up to --patience costs time, not the command. Needs root.
"""

import argparse
import hashlib
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent / "bench"))

import clusters

CALLERS = 6
TAG = "chaos"
# In each group, one process after the other is harmed, and the next one when it is ready again.
GROUPS = (("scheduler", "artifact-store", "streamer", "PostgreSQL"), ("left", "right"))
# Longest time for which a service is frozen or away, in seconds. Shorter than the patience of a command.
AWAY = 20


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


def call(processes, home, source, number):
    """Runs one command, and returns what is wrong with its end. `None`: nothing."""
    here = pathlib.Path(tempfile.mkdtemp(dir=home))
    contents = source.randbytes(source.choice((1, 1000, 300_000, 3_000_000)))
    code = source.choice((0, 0, 0, 7))
    (here / "in").mkdir()
    (here / "in/data").write_bytes(contents)
    # Not every tree is new.
    (here / "in/kind").write_text(str(number % 5))
    script = f"sha256sum < in/data | cut -c 1-64 > out/sum; echo {number}; sleep {source.random():.2f}; exit {code}"
    ended = processes.run(
        "run", "-q", "--tag", TAG, "-i", "in=in", "-o", "out=out", "--", "sh", "-c", script, cwd=here, check=False, capture_output=True, text=True
    )
    said = f"command {number} ended with {ended.returncode}, stdout {ended.stdout!r}, stderr {ended.stderr[-2000:]!r}"
    if ended.returncode != code:
        return f"exit code {code} was expected: {said}"
    if ended.stdout != f"{number}\n":
        return f"the output was to be {number}: {said}"
    # The outputs of failed commands are brought back, too.
    found = (here / "out/sum").read_text().strip() if (here / "out/sum").exists() else "nothing"
    if found != hashlib.sha256(contents).hexdigest():
        return f"the result is {found}: {said}"
    shutil.rmtree(here)
    return None


def caller(processes, home, seed, index, ledger, stop):
    source = random.Random(f"{seed}/{index}")
    number = index
    while not stop.is_set():
        begin = time.monotonic()
        failure = call(processes, home, source, number)
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
    print(f"seed {options.seed}", flush=True)
    ledger, stop = Ledger(), threading.Event()
    home = pathlib.Path(tempfile.mkdtemp(prefix="gantry-chaos-", dir="/var/tmp"))
    with clusters.Processes("/var/tmp") as processes:
        for name in ("left", "right"):
            processes.gateway(name, {"GANTRY_WORKER_TAGS": TAG})
        processes.run("run", "-q", "--tag", TAG, "--", "true")
        callers = [threading.Thread(target=noting_errors, args=(ledger, caller, processes, home, options.seed, index, ledger, stop)) for index in range(CALLERS)]
        sources = [(group, random.Random(f"{options.seed}/{group}")) for group in GROUPS]
        harmers = [threading.Thread(target=noting_errors, args=(ledger, harm, processes, group, source, stop)) for group, source in sources]
        for thread in (*callers, *harmers):
            thread.start()
        stop.wait(options.seconds)
        stop.set()
        for thread in (*harmers, *callers):
            thread.join()
        # Everything ends when nothing disturbs it.
        clusters.wait_for("the end of all workloads", lambda: not processes.run("ps", "-q", capture_output=True, text=True).stdout)
    print(f"{ledger.commands} commands, {len(ledger.failures)} failed; the slowest took {ledger.slowest:.0f} s; seed {options.seed}")
    if ledger.failures or not ledger.commands:
        sys.exit(f"what the failed commands left is in {home}")
    shutil.rmtree(home)


main()

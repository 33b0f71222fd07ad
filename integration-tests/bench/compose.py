"""Results of the test of compose.yaml: time until the cluster is healthy, and sizes of images."""

import re
import subprocess

from clusters import ROOT
from measure import not_applicable
from start import no_engine

TITLE = "Compose"
HEALTHY = re.compile(r"^compose: healthy after ([\d.]+) s$", re.MULTILINE)
IMAGE = re.compile(r"^compose: image (\S+): (\S+)$", re.MULTILINE)


def read(output):
    """Parses the rows that the test printed."""
    [seconds] = HEALTHY.findall(output)
    images = IMAGE.findall(output)
    if not images:
        raise ValueError("the test of compose.yaml names no image")
    lines = [f"| healthy, from `up` with images that are there | {seconds} s |"]
    lines += [f"| image {name}, with binaries that are not optimized | {size}B |" for name, size in images]
    print(*lines, sep="\n", flush=True)
    return lines


def bench_compose():
    if fact := no_engine():
        not_applicable("compose", fact)
        return []
    test = subprocess.run([ROOT / "integration-tests/compose.sh"], stdout=subprocess.PIPE, text=True, check=True)
    return [f"### {TITLE}", "", "| What | |", "|---|---|", *read(test.stdout)]

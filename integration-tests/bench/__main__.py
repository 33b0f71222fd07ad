"""Measures against plain tools, and writes docs/performance.md: all of it, or the sections that are named. The first figures are edited by hand.

Every figure is a median with its minimum and maximum; ratios are of medians of the same run. `--quick` measures less and writes nothing.
"""

import os
import re
import signal
import sys

from clusters import ROOT
from compose import bench_compose
from driving import bench_attached, bench_driven
from terminals import bench_exec
from fanout import bench_fanout
from garden import bench_garden
from idle import bench_idle
from images import bench_images
from links import bench_links
from measure import machine
from output import bench_output
from placing import bench_placing, bench_placing_more
from processes import bench_processes
from start import bench_start
from store import bench_store
from synchronizing import bench_synchronizing
from transfers import bench_transfers
from trees import bench_trees
from users import bench_users
from versions import bench_versions
from waiting import bench_waiting

DISK = "/var/tmp"
FILE = ROOT / "docs/performance.md"
HEAD = """# Performance

Eleven figures, measured from 20 to 29 November 2026 on one machine with 2 cores, 24 GiB of memory and Linux 6.18.
Services, callers and databases share its cores. Each figure is a median. The tables below have the details.

| Operation | Median | Compared with |
|---|---|---|
| `gantry run -- true` on a warm cluster | 57.9 ms | `runc run`: 32.4 ms |
| upload of 1 GiB in 10,000 files, in memory | 1.6 s | `tar c \\| tar x`: 1.4 s |
| the same upload again, unchanged | 53 ms | |
| `gantry run` after one of 10,000 files of its input changed, 925 MiB | 448 ms | the first run: 5.6 s |
| an input of which another worker has an earlier version, one per cent of 925 MiB changed | 306 ms | without that version: 3.6 s |
| an input of 128 MiB to 8 workers at once, links of 250 Mbit/s | 5.0 s | to one: 4.6 s |
| upload of source code over 100 Mbit/s and 20 ms | 35.9 MB/s | the link: 12.5 MB/s |
| copy of 1 GiB between two host workers, in memory | 1.7 s | `tar c \\| tar x`: 1.6 s |
| output of a command | 992 MB/s | a pipe: 2,317 MB/s |
| leases granted by `PlaceMany` of 100, 10,000 workers, 16 callers | 26,286 /s | the goal: 20,000 /s |
| pairs of `Place` and `Release`, 10,000 workers, 64 callers | 5,264 /s | the goal: 4,000 /s |
| `Explain` over 10,000 workers, 99th percentile | 11.5 ms | the goal: 20 ms |
| 100,000 connected workers without changes: CPU of the scheduler | 40.5 % of a core | |
| marking 10,000 of 1,000,000 artifacts and their volumes as garbage | 269 ms | row by row: 9.9 s |

The figures of leases were measured before [decision 44](decisions/0044-remove-three-scheduler-mechanisms.md), which says what it costs.

## How it is measured

`make bench` measures everything. `integration-tests/bench.sh SECTION…` measures some sections. Each section names its machine and its load.
Ratios compare medians of the same run.

A file that was modified within the last two seconds is never assumed to be unchanged. The files of the benchmarks are older. An unchanged transfer
is the second run of a command. It sends the manifest or its digest, and no content.
"""


def sections(quick):
    """Returns the benchmarks in the order of their sections in the document."""
    runs = 5 if quick else 21
    few = 2 if quick else 5
    return {
        "start": lambda: bench_start(DISK, runs),
        "users": lambda: bench_users(DISK, runs),
        "processes": lambda: bench_processes(DISK, 5 if quick else 60),
        "idle": lambda: bench_idle(DISK, 5 if quick else 30, 5 if quick else 60),
        "exec": lambda: bench_exec(DISK, runs, 200 if quick else 2_000),
        "attached": lambda: bench_attached(DISK, 100 if quick else 1_000),
        "driven": lambda: bench_driven(DISK, 48 if quick else 200, 16, 1 if quick else 3),
        "garden": lambda: bench_garden(DISK, 2 if quick else 8, 5 if quick else 10),
        "trees": lambda: bench_trees(DISK, few),
        "versions": lambda: bench_versions(DISK, 1 if quick else 3),
        "images": lambda: bench_images(DISK, 1 if quick else 3),
        "transfers": lambda: bench_transfers(DISK, 1 if quick else 3),
        "links": lambda: bench_links("/dev/shm", (32 if quick else 160) << 20, 1 if quick else 3),
        "fanout": lambda: bench_fanout("/dev/shm", (32 if quick else 512) << 20, 1 if quick else 3),
        "output": lambda: bench_output(DISK, few, 1 << 30, 3 if quick else 30),
        "store": lambda: bench_store(DISK, 100_000 if quick else 1_000_000, 20_000 if quick else 100_000, 1 if quick else 2),
        "placing": lambda: bench_placing(DISK, (10, 1_000) if quick else (10, 100, 1_000, 10_000), 1 if quick else 2, 1 if quick else 65, 1 if quick else 3),
        "placing_more": lambda: bench_placing_more(DISK, (10, 1_000) if quick else (10, 100, 1_000, 10_000), 1 if quick else 2, 1 if quick else 3),
        "waiting": lambda: bench_waiting(DISK, (10, 1_000) if quick else (10, 100, 1_000, 10_000), 5_000 if quick else 100_000, 100 if quick else 1_000, 1 if quick else 3, 1 if quick else 3),
        "synchronizing": lambda: bench_synchronizing(DISK, (1_000,) if quick else (1_000, 10_000, 100_000), 10 if quick else 60, 20 if quick else 500, 1 if quick else 3),
        "compose": bench_compose,
    }


def written():
    """Returns the sections of the document by name. Each starts with a comment that names it."""
    if not FILE.exists():
        return {}
    parts = re.split(r"^<!-- (\w+) -->\n", FILE.read_text(), flags=re.MULTILINE)
    return {name: text.strip() + "\n" for name, text in zip(parts[1::2], parts[2::2])}


def main():
    if os.geteuid() != 0:
        sys.exit("make bench runs containers: it needs root")
    # A signal also triggers the cleanup.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    quick = "--quick" in sys.argv
    all_of_them = sections(quick)
    named = [name for name in sys.argv[1:] if not name.startswith("--")]
    if unknown := set(named) - set(all_of_them):
        sys.exit(f"no such section: {', '.join(unknown)}. There are {', '.join(all_of_them)}")
    for name, measure in all_of_them.items():
        if named and name not in named or f"--skip-{name}" in sys.argv:
            continue
        before = machine()
        measured = measure()
        if quick or not measured:
            continue
        title, *lines = measured
        # Another run may have changed other sections meanwhile.
        text = written()
        text[name] = "\n".join([title, "", before, *lines]).strip() + "\n"
        parts = [f"<!-- {name} -->\n{text[name]}" for name in all_of_them if name in text]
        FILE.write_text("\n".join([HEAD, *parts]))
        print(f"written to {FILE.relative_to(ROOT)}: {name}", flush=True)


main()

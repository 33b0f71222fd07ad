"""Measurements, and their tables."""

import os
import statistics
import time

MIB = 1 << 20


def timed(action, runs, before=lambda: None):
    figures = []
    for _ in range(runs):
        before()
        begin = time.perf_counter()
        action()
        figures.append((time.perf_counter() - begin) * 1e3)
    return figures


def in_words(ratio):
    return f"{ratio:.2f} ×" if ratio > 0.1 else f"{ratio:.3f} ×"


def row(name, figures, reference=None, unit="ms"):
    median = statistics.median(figures)
    digits = 2 if unit == "s" else 1 if median < 100 else 0
    ratio = in_words(median / statistics.median(reference)) if reference else ""
    cells = [name, f"{median:.{digits}f} {unit}", f"{min(figures):.{digits}f} – {max(figures):.{digits}f}", ratio]
    line = "| " + " | ".join(cells) + " |"
    print(line, flush=True)
    return line


def table(title, lines):
    return [f"### {title}", "", "| What | Median | Min – max | Ratio |", "|---|---|---|---|", *lines, ""]


def not_applicable(name, fact):
    print(f"{name}: not applicable: {fact}", flush=True)
    return f"| {name} | not applicable: {fact} | | |"


def machine():
    """Returns the machine, the time and the load of a measurement."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    load = "%.1f" % os.getloadavg()[0]
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, Linux {os.uname().release.split('-')[0]}; load {load} when it began."

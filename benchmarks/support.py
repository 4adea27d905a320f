"""What the benchmarks share: the state of the machine, and comparisons that survive noise."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch


def machine() -> str:
    """One line about where the figures come from: processor, cores, load, torch."""
    one, five, _ = os.getloadavg()
    return (
        f"machine: {_processor()}, {os.cpu_count()} cores, load {one:.1f} (1 min) {five:.1f} (5 min), "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def _processor() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            found = next((line for line in lines if line.startswith("model name")), "")
    except OSError:
        return platform.machine()
    return found.partition(":")[2].strip() or platform.machine()


def busy_seconds() -> float:
    """Processor seconds that the whole machine has spent since it started (Linux; 0.0
    elsewhere).
    """
    try:
        with Path("/proc/stat").open(encoding="utf-8") as lines:
            fields = [int(f) for f in lines.readline().split()[1:]]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields[:8]
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def compared(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """How many times as fast as *theirs* *ours* is, from seconds per round of alternating rounds:
    the ratio of minima, and the median of the ratios within a round. A difference counts only if
    both agree.
    """
    within = [b / a for a, b in zip(ours, theirs, strict=True)]
    return min(theirs) / min(ours), median(within)


def spread(seconds: Sequence[float], unit: float = 1e3) -> str:
    """Minimum and median, in milliseconds unless *unit* says otherwise."""
    return f"min {min(seconds) * unit:8.1f} median {median(seconds) * unit:8.1f}"

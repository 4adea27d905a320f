"""``piper doctor``: is this machine ready to train, and if not, what to do about it."""

import os
import platform
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol, cast

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from piper.capture.joint import TESTED_TORCH

MINIMUM_PYTHON = (3, 11)
MINIMUM_RAY = (2, 40)
# Four local workers that train the example need about 0.5 GB each, and Ray itself about 1 GB.
LITTLE_MEMORY_GB = 4.0
LITTLE_SHARED_MEMORY_GB = 1.0
_GLOO_SECONDS = 15.0


class Status(StrEnum):
    """Outcome of a check: ``WARN`` is usable but slow or untested, ``FAIL`` is not usable."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row of the report; *remedy* is empty where nothing is to be done."""

    subject: str
    status: Status
    found: str
    remedy: str = ""


class _AllReduces(Protocol):
    """What torch's stub of ``ProcessGroupGloo`` leaves out."""

    def allreduce(self, tensors: list[torch.Tensor]) -> dist.Work: ...


def doctor(console: Console) -> bool:
    """Print a table of checks to *console*; true if none of them failed."""
    findings = examine(os.environ)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("what was found")
    table.add_column("what to do")
    for finding in findings:
        table.add_row(
            finding.subject,
            Text(finding.status.value, style=_STYLES[finding.status]),
            Text(finding.found),
            Text(finding.remedy),
        )
    console.print(table)
    counts = {status: sum(finding.status is status for finding in findings) for status in Status}
    console.print(_verdict(counts))
    return counts[Status.FAIL] == 0


def examine(environment: Mapping[str, str]) -> tuple[Finding, ...]:
    """Run every check; *environment* is ``os.environ``."""
    cores = usable_cores()
    return (
        check_python(sys.version_info[:3]),
        check_torch(torch.__version__),
        check_ray(_installed("ray")),
        check_gloo(gloo_pair),
        check_cores(cores),
        check_memory(available_memory_gb()),
        check_shared_memory(_free_gb(Path("/dev/shm"))),  # noqa: S108 (Ray's own choice)
        check_threads(environment.get("OMP_NUM_THREADS"), cores),
        check_gpus(_gpus()),
    )


def check_python(found: tuple[int, int, int]) -> Finding:
    """Python is new enough."""
    words = f"Python {found[0]}.{found[1]}.{found[2]} on {platform.system()}"
    if found[:2] >= MINIMUM_PYTHON:
        return Finding(subject="Python", status=Status.OK, found=words)
    least = ".".join(map(str, MINIMUM_PYTHON))
    return Finding(
        subject="Python",
        status=Status.FAIL,
        found=words,
        remedy=f"install Python {least} or newer and create the virtual environment with it",
    )


def check_torch(found: str) -> Finding:
    """PyTorch is one of the releases whose graphs piper knows how to read."""
    tested = " or ".join(TESTED_TORCH)
    if ".".join(map(str, _release(found))) not in TESTED_TORCH:
        return Finding(
            subject="PyTorch",
            status=Status.FAIL,
            found=f"{found}; piper can capture models with {tested} only",
            remedy=f"pip install 'torch=={TESTED_TORCH[-1]}.*'",
        )
    return Finding(subject="PyTorch", status=Status.OK, found=f"{found}, a tested version")


def check_ray(found: str | None) -> Finding:
    """Ray, which starts the workers, is installed and new enough."""
    least = ".".join(map(str, MINIMUM_RAY))
    remedy = f"pip install 'ray>={least}', or train with backend = \"inprocess\""
    if found is None:
        return Finding(
            subject="Ray",
            status=Status.WARN,
            found="not installed; it starts one worker process per device",
            remedy=remedy,
        )
    if _release(found) < MINIMUM_RAY:
        return Finding(
            subject="Ray",
            status=Status.FAIL,
            found=f"{found}; piper needs {least} or newer",
            remedy=remedy,
        )
    return Finding(subject="Ray", status=Status.OK, found=f"{found}; starts the worker processes")


def check_gloo(attempt: Callable[[], float]) -> Finding:
    """*attempt* lets two ranks exchange a tensor and returns the seconds that took."""
    try:
        seconds = attempt()
    except (RuntimeError, OSError, TimeoutError) as error:
        return Finding(
            subject="network",
            status=Status.FAIL,
            found=f"two ranks on this machine could not exchange a tensor: {_first_line(error)}",
            remedy=(
                "allow TCP connections of this machine to itself (firewall, container network, "
                "/etc/hosts entry of its host name), or set GLOO_SOCKET_IFNAME to an interface "
                "that works, such as lo"
            ),
        )
    return Finding(
        subject="network",
        status=Status.OK,
        found=f"two ranks exchanged a tensor over gloo ({seconds * 1000:.0f} ms with set-up)",
    )


def check_cores(cores: int) -> Finding:
    """There are cores for the demo's four workers."""
    words = f"{cores} that this process may use"
    if cores >= 2:
        return Finding(subject="CPU cores", status=Status.OK, found=words)
    return Finding(
        subject="CPU cores",
        status=Status.WARN,
        found=words,
        remedy="workers will take turns; results are the same, training is slower",
    )


def check_memory(gigabytes: float | None) -> Finding:
    """There is memory for a few local workers."""
    if gigabytes is None:
        return Finding(
            subject="memory",
            status=Status.WARN,
            found="the free memory could not be read on this system",
            remedy=f"make sure that {LITTLE_MEMORY_GB:.0f} GB are free",
        )
    words = f"{gigabytes:.1f} GB free"
    if gigabytes >= LITTLE_MEMORY_GB:
        return Finding(subject="memory", status=Status.OK, found=words)
    return Finding(
        subject="memory",
        status=Status.WARN,
        found=words,
        remedy=(
            f"four local workers want {LITTLE_MEMORY_GB:.0f} GB: close other programs, use fewer "
            'workers, or backend = "inprocess"'
        ),
    )


def check_shared_memory(gigabytes: float | None) -> Finding:
    """Ray's object store has room in /dev/shm."""
    if gigabytes is None:
        return Finding(
            subject="shared memory",
            status=Status.WARN,
            found="/dev/shm is missing; Ray falls back to files, which is slower",  # noqa: S108
            remedy="mount a tmpfs on /dev/shm",
        )
    words = f"{gigabytes:.1f} GB free in /dev/shm"
    if gigabytes >= LITTLE_SHARED_MEMORY_GB:
        return Finding(subject="shared memory", status=Status.OK, found=words)
    return Finding(
        subject="shared memory",
        status=Status.WARN,
        found=f"{words}; Ray falls back to files, which is slower",
        remedy="in Docker: start the container with --shm-size=2g",
    )


def check_threads(setting: str | None, cores: int) -> Finding:
    """OMP_NUM_THREADS is a number that does not oversubscribe the cores."""
    if setting is None:
        return Finding(
            subject="threads",
            status=Status.OK,
            found="OMP_NUM_THREADS is not set; Ray gives each worker its share of the cores",
        )
    if not setting.isdecimal() or int(setting) < 1:
        return Finding(
            subject="threads",
            status=Status.WARN,
            found=f"OMP_NUM_THREADS is {setting!r}, which is not a number of threads",
            remedy="unset OMP_NUM_THREADS or set it to 1",
        )
    if int(setting) > cores:
        return Finding(
            subject="threads",
            status=Status.WARN,
            found=f"OMP_NUM_THREADS={setting}, more than the {cores} cores",
            remedy=f"set it to {max(1, cores // 4)}: several workers share the cores",
        )
    return Finding(
        subject="threads", status=Status.OK, found=f"OMP_NUM_THREADS={setting} in each process"
    )


def check_gpus(names: tuple[str, ...]) -> Finding:
    """Report the GPUs that PyTorch can use; none is fine."""
    if not names:
        return Finding(
            subject="GPUs",
            status=Status.OK,
            found="none that PyTorch can use; piper trains on the CPU",
        )
    return Finding(
        subject="GPUs",
        status=Status.OK,
        found=f"{len(names)}: {', '.join(sorted(set(names)))}",
    )


def gloo_pair() -> float:
    """All-reduce a tensor between two ranks, two threads of this process, over real sockets.

    Returns the seconds from the first connection to the result.

    Raises:
        RuntimeError: gloo is missing, cannot connect, or computed a wrong sum.
        TimeoutError: the ranks did not meet within 15 s.
    """
    if not dist.is_available() or not dist.is_gloo_available():
        raise RuntimeError("this build of PyTorch has no gloo")
    store = dist.HashStore()  # type: ignore[attr-defined]  # exported, but missing in torch's __all__
    values = [torch.ones(4) * (rank + 1) for rank in range(2)]
    errors: list[RuntimeError] = []

    def meet(rank: int) -> None:
        try:
            gloo = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=_GLOO_SECONDS))
            cast(_AllReduces, gloo).allreduce([values[rank]]).wait()
        except RuntimeError as error:
            errors.append(error)

    start = time.perf_counter()
    ranks = [threading.Thread(target=meet, args=(rank,), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(_GLOO_SECONDS)
    if errors:
        raise errors[0]
    if any(rank.is_alive() for rank in ranks):
        raise TimeoutError(f"no connection within {_GLOO_SECONDS:.0f} s")
    if not all(torch.equal(value, torch.full((4,), 3.0)) for value in values):
        raise RuntimeError(f"expected a sum of 3, found {[value[0].item() for value in values]}")
    return time.perf_counter() - start


def usable_cores() -> int:
    """Cores that this process may use: its affinity, limited by its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _words(Path("/sys/fs/cgroup/cpu.max"))
    if len(quota) == 2 and quota[0].isdecimal():
        return max(1, min(cores or 1, int(quota[0]) // int(quota[1])))
    return cores or 1


def available_memory_gb() -> float | None:
    """Free memory in units of 1e9 bytes, limited by the control group; None where unknown."""
    lines = _lines(Path("/proc/meminfo"))
    kilobytes = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    if not kilobytes:
        return None
    free = kilobytes[0] * 1024
    limit = _words(Path("/sys/fs/cgroup/memory.max"))
    used = _words(Path("/sys/fs/cgroup/memory.current"))
    if limit and used and limit[0].isdecimal():
        free = min(free, max(0, int(limit[0]) - int(used[0])))
    return free / 1e9


def _verdict(counts: Mapping[Status, int]) -> Text:
    if counts[Status.FAIL]:
        return Text(
            f"Not ready: {counts[Status.FAIL]} failed. Follow the last column, then run this again.",
            style=_STYLES[Status.FAIL],
        )
    if counts[Status.WARN]:
        return Text(f"Ready, with {counts[Status.WARN]} to look at.", style=_STYLES[Status.WARN])
    return Text("Ready.", style=_STYLES[Status.OK])


def _release(found: str) -> tuple[int, int]:
    """``(2, 13)`` of ``"2.13.0+cpu"``."""
    major, minor = found.split(".")[:2]
    return int(major), int(minor)


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _gpus() -> tuple[str, ...]:
    if not torch.cuda.is_available():
        return ()
    return tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _free_gb(folder: Path) -> float | None:
    return shutil.disk_usage(folder).free / 1e9 if folder.is_dir() else None


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.is_file() else []


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__

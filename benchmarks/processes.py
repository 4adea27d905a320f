"""Benchmark processes: how they are started, meet, and run Piper as its workers do."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from benchmarks.links import Link
from torch._C._distributed_c10d import Store, TCPStore

from piper.backends.workers import WorkerBackend
from piper.devices.base import TorchDevice
from piper.devices.cpu import CpuDevice
from piper.devices.gloo import GlooCommunicator
from piper.devices.heap import keep_freed_memory
from piper.ids import DeviceId
from piper.ops.base import CommunicatorId
from piper.runtime.worker import CommunicatorFactory, Worker

ROOT = Path(__file__).parent.parent
LIMIT = timedelta(seconds=300)

MakeWorker: TypeAlias = Callable[[int, int, Callable[[], TorchDevice], CommunicatorFactory], Worker]


def launch(
    module: str,
    told: str,
    prefixes: Sequence[Sequence[str]],
    *,
    timeout: float = 600.0,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """Run ``python -m module --rank R told`` once per prefix, R counting from 0; the lines that
    rank 0 printed.

    When one process fails the others are stopped at once. Raises :class:`RuntimeError` then.
    """
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        **(environment or {}),
    }
    processes = [
        subprocess.Popen(
            [*prefix, sys.executable, "-m", module, "--rank", str(rank), told],
            stdout=subprocess.PIPE,
            text=True,
            env=variables,
            cwd=ROOT,
        )
        for rank, prefix in enumerate(prefixes)
    ]
    failed = threading.Event()

    def watch(process: subprocess.Popen[str]) -> None:
        if process.wait():
            failed.set()
            for other in processes:
                other.kill()

    watchers = [threading.Thread(target=watch, args=(p,), daemon=True) for p in processes]
    try:
        for watcher in watchers:
            watcher.start()
        output = processes[0].communicate(timeout=timeout)[0]
        for watcher in watchers:
            watcher.join(timeout=60.0)
    finally:
        for process in processes:
            process.kill()
    if failed.is_set():
        raise RuntimeError(f"a process of {module} failed; see above")
    return output.splitlines()


def pinned(rank: int) -> None:
    """Give this process one core and one thread, and let it keep its memory as Piper's workers do
    (which is as good for what they are compared with).
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    keep_freed_memory()


def join(rank: int, size: int, link: Link, port: int) -> Store:
    """Make torch's default process group of *size* processes, two of which may be at the ends of
    *link*.
    """
    end = rank % 2
    os.environ["GLOO_SOCKET_IFNAME"] = link.interfaces[end]
    store = TCPStore(link.addresses[0], port, is_master=rank == 0, timeout=LIMIT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=LIMIT)
    return store


class OneOf(WorkerBackend):
    """The backend of a program that is itself one of the workers: what the driver asks of all, each
    process asks of its own.

    ``worker`` is the process's own. Communicators meet in *store*, which no other instance may use
    at the same names.
    """

    def __init__(
        self, rank: int, size: int, store: Store, host: str, make: MakeWorker = Worker
    ) -> None:
        super().__init__()
        self._rank, self._size, self._store, self._own_host = rank, size, store, host
        self.worker = make(rank, size, CpuDevice, self._communicator)

    def _communicator(
        self, name: CommunicatorId, members: tuple[DeviceId, ...]
    ) -> GlooCommunicator:
        return GlooCommunicator(
            name, members, DeviceId(self._rank), self._store, host=self._own_host
        )

    def _start(self, num_devices: int) -> None:
        assert num_devices == self._size

    def _call(self, method: str, arguments: Sequence[Mapping[str, object]]) -> list[object]:
        result = getattr(self.worker, method)(**arguments[self._rank])
        return [result] * self._size

    def _stop(self) -> None:
        """Ends with the process."""

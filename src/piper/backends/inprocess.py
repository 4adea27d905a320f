"""Every device a thread of this process: no cluster, a debugger works, sixteen devices on a
laptop.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from piper.backends.failures import failure_of, root_cause
from piper.backends.workers import WorkerBackend
from piper.devices.cpu import CpuDevice
from piper.devices.memory import Hub
from piper.ids import DeviceId
from piper.ops.base import Communicator, CommunicatorId
from piper.runtime.worker import Worker


class InProcessBackend(WorkerBackend):
    """Implements :class:`~piper.backends.base.Backend` with threads and in-memory communicators.

    *timeout*, *delay*, *poison* and *delay_seed* are the hub's (see
    :class:`~piper.devices.memory.Hub`). *threads* is the number of threads that one device computes
    with (default: the machine's cores divided among the devices).
    """

    def __init__(
        self,
        *,
        timeout: float = 300.0,
        threads: int | None = None,
        delay: float = 0.0,
        delay_seed: int = 0,
        poison: bool = False,
    ) -> None:
        super().__init__()
        self._hub = Hub(timeout=timeout, delay=delay, seed=delay_seed, poison=poison)
        self._asked_threads = threads
        self._threads = 1
        self._workers: list[Worker] = []

    def _start(self, num_devices: int) -> None:
        self._threads = self._asked_threads or max(1, (os.cpu_count() or 1) // num_devices)
        self._workers = [self._worker(rank, num_devices) for rank in range(num_devices)]

    def _worker(self, rank: int, num_devices: int) -> Worker:
        def communicator(name: CommunicatorId, members: tuple[DeviceId, ...]) -> Communicator:
            return self._hub.communicator(name, members, DeviceId(rank))

        return Worker(rank, num_devices, CpuDevice, communicator)

    def _call(self, method: str, arguments: Sequence[Mapping[str, object]]) -> list[object]:
        results: list[object] = [None] * len(self._workers)
        failed: dict[int, BaseException] = {}

        def call(rank: int) -> None:
            torch.set_num_threads(self._threads)
            try:
                results[rank] = getattr(self._workers[rank], method)(**arguments[rank])
            except BaseException as error:  # noqa: BLE001 (the driver raises it)
                failed[rank] = error
                first_line = str(error).partition("\n")[0]
                self._hub.abort(f"device {rank}: {first_line}")

        self._run_threads(call)
        if failed:
            failure = root_cause([failure_of(rank, error) for rank, error in failed.items()])
            raise failure.error() from failed[failure.device]
        return results

    @contextmanager
    def computing_alike(self) -> Iterator[None]:
        """Inside, this thread computes on as many threads as each worker: some kernels (the
        backward of a layer norm) add up one part per thread, and round each part.
        """
        mine = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            torch.set_num_threads(mine)

    def _run_threads(self, call: Callable[[int], None]) -> None:
        """Run ``call(rank)`` on a thread per device, to the end of all of them."""
        # Not `Thread.join` alone: an interrupted join (CPython 3.11) takes a running thread for a
        # stopped one.
        finished = [threading.Event() for _ in self._workers]

        def run(rank: int) -> None:
            try:
                call(rank)
            finally:
                finished[rank].set()

        threads = [
            threading.Thread(target=run, args=(rank,), name=f"piper device {rank}", daemon=True)
            for rank in range(len(self._workers))
        ]
        # Setting a thread's number of compute threads sets the default of the others too.
        mine = torch.get_num_threads()
        try:
            for thread in threads:
                thread.start()
            for event in finished:
                event.wait()
        except BaseException:  # Ctrl-C: nobody is left behind
            self._hub.abort("the driver was interrupted")
            for thread, event in zip(threads, finished, strict=True):
                if thread.ident is not None:
                    event.wait()
            raise
        else:
            for thread in threads:
                thread.join()
        finally:
            torch.set_num_threads(mine)

    def _stop(self) -> None:
        self._hub.abort("the backend was closed")
        self._workers = []

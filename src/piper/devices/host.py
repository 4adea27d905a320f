"""Host memory for what a CPU device puts aside: a file that is mapped into memory, so that the
operating system may write it to disk and what the device itself uses can be told apart from it; and
threads that copy there and back, one per stream, while the device computes.
"""

import mmap
import os
import queue
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO

import numpy as np
import numpy.typing as npt
import torch

from piper.devices.tensors import as_torch
from piper.errors import RunError
from piper.ids import Stream
from piper.ops.base import Tensor

Bytes = npt.NDArray[np.uint8]

PAGE = mmap.ALLOCATIONGRANULARITY


class Region:
    """Some bytes of a pool; it takes them back when the last reference goes."""

    __slots__ = ("__weakref__", "data", "nbytes")

    def __init__(self, data: Bytes, nbytes: int) -> None:
        self.data, self.nbytes = data, nbytes


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A tensor's copy in host memory: the memory that the tensor was in, and how it lay there."""

    region: Region
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def placed(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor, in memory that holds what the region does."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)

    @classmethod
    def of(cls, tensor: torch.Tensor, region: Region) -> "HostTensor":
        """*tensor*, whose memory is copied to *region*."""
        return cls(
            region, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        )


def as_host(tensor: Tensor) -> HostTensor:
    """The copy in host memory that an opaque tensor of the ops layer is."""
    assert isinstance(tensor, HostTensor)
    return tensor


class HostPool:
    """Memory in one temporary file of this process.

    The file has no name: nothing is left of it when the process ends, however it ends. It grows to
    the most that was ever used at once. ``live`` are the bytes that regions hold.
    """

    def __init__(self) -> None:
        self.live = 0
        self._file: IO[bytes] | None = None
        self._size = 0
        self._unused: dict[int, list[Bytes]] = {}  # by length
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Region:
        """A region of *nbytes* with undefined contents.

        Raises :class:`RunError` if there is no room for it on the disk.
        """
        length = max(1, -(-nbytes // PAGE)) * PAGE
        with self._lock:
            unused = self._unused.get(length)
            data = unused.pop() if unused else self._extend(length)
            self.live += nbytes
        region = Region(data, nbytes)
        weakref.finalize(region, self._give_back, data, nbytes).atexit = False
        return region

    def _extend(self, length: int) -> Bytes:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="piper-offload-")  # noqa: SIM115 (as long as the pool)
        number = self._file.fileno()
        try:
            # Reserved now: writing to a mapped page for which there is no room kills the process.
            os.posix_fallocate(number, self._size, length)
        except OSError as error:
            raise RunError(
                f"no room for {self._size + length} bytes of offloaded activations in {tempfile.gettempdir()} ({error.strerror}); "
                "point TMPDIR to a larger disk, or offload less"
            ) from error
        mapped = mmap.mmap(number, length, offset=self._size)
        self._size += length
        return np.frombuffer(mapped, dtype=np.uint8)

    def _give_back(self, data: Bytes, nbytes: int) -> None:
        # Called wherever the last reference happens to go: also on a thread that copies.
        with self._lock:
            self._unused.setdefault(len(data), []).append(data)
            self.live -= nbytes


class CopyHandle:
    """A copy in flight. Implements :class:`~piper.ops.base.Handle`."""

    __slots__ = ("_error", "_finished")

    def __init__(self) -> None:
        self._finished = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """It is complete, or has failed."""
        self._error = error
        self._finished.set()

    def wait(self) -> None:
        """See :class:`~piper.ops.base.Handle`. Raises :class:`RunError` if the copy failed."""
        self._finished.wait()
        if self._error is not None:
            raise RunError(f"a copy between device and host failed: {self._error}") from self._error

    def done(self) -> bool:
        """See :class:`~piper.ops.base.Handle`."""
        return self._finished.is_set()


Job = Callable[[], None]


class CopyThreads:
    """A thread per stream, which copies in the order in which it was asked to. Threads start with
    the first copy of a step, and end with the step.
    """

    def __init__(self) -> None:
        self._queues: dict[Stream, queue.SimpleQueue[tuple[Job, CopyHandle] | None]] = {}
        self._threads: list[threading.Thread] = []

    def submit(
        self, stream: Stream, pairs: Sequence[tuple[Bytes, Bytes]], regions: Iterable[Region]
    ) -> CopyHandle:
        """Copy, for each pair, the second to the first; both, and *regions*, are kept until that is
        done.
        """
        handle = CopyHandle()
        self._queue(stream).put((partial(_copy, pairs, tuple(regions)), handle))
        return handle

    def end(self) -> None:
        """Finish all copies, and end the threads."""
        for waiting in self._queues.values():
            waiting.put(None)
        for thread in self._threads:
            thread.join()
        self._queues.clear()
        self._threads.clear()

    def _queue(self, stream: Stream) -> "queue.SimpleQueue[tuple[Job, CopyHandle] | None]":
        if stream not in self._queues:
            waiting = self._queues[stream] = queue.SimpleQueue()
            name = f"{threading.current_thread().name} {stream}"
            thread = threading.Thread(target=_serve, args=(waiting,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        return self._queues[stream]


def _serve(waiting: "queue.SimpleQueue[tuple[Job, CopyHandle] | None]") -> None:
    while (item := waiting.get()) is not None:
        job, handle = item
        del item
        error: BaseException | None = None
        try:
            job()
        except Exception as raised:  # noqa: BLE001 (the device's thread raises it)
            error = raised
        # What was copied is given up before anyone hears of it: what is alive does not depend on
        # timing.
        del job
        handle.finish(error)
        del handle


def _copy(pairs: Sequence[tuple[Bytes, Bytes]], _regions: tuple[Region, ...]) -> None:
    # NumPy's copy: it lets other threads run, and uses none but this one.
    for target, source in pairs:
        np.copyto(target, source)


def storage_bytes(storage: torch.UntypedStorage) -> Bytes:
    """The memory of a CPU storage; it is kept alive."""
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    array: Bytes = flat.numpy()
    return array


class HostCopies:
    """The two copies of a CPU device."""

    def __init__(self) -> None:
        self.pool = HostPool()
        self._threads = CopyThreads()

    def out(self, tensors: Sequence[Tensor], stream: Stream) -> tuple[list[HostTensor], CopyHandle]:
        """See :meth:`~piper.ops.base.Device.to_host`."""
        regions: dict[int, Region] = {}
        pairs: list[tuple[Bytes, Bytes]] = []
        copies: list[HostTensor] = []
        for tensor in map(as_torch, tensors):
            storage = tensor.untyped_storage()
            key = storage._cdata  # noqa: SLF001 (the address of torch's storage: equal tensors share it)
            if key not in regions:
                region = regions[key] = self.pool.take(storage.nbytes())
                pairs.append((region.data[: region.nbytes], storage_bytes(storage)))
            copies.append(HostTensor.of(tensor, regions[key]))
        return copies, self._threads.submit(stream, pairs, regions.values())

    def back(
        self, copies: Sequence[Tensor], stream: Stream
    ) -> tuple[list[torch.Tensor], CopyHandle]:
        """See :meth:`~piper.ops.base.Device.from_host`."""
        storages: dict[Region, torch.UntypedStorage] = {}
        pairs: list[tuple[Bytes, Bytes]] = []
        tensors: list[torch.Tensor] = []
        for copy in map(as_host, copies):
            region = copy.region
            if region not in storages:
                whole = torch.empty(region.nbytes, dtype=torch.uint8)
                storage = storages[region] = whole.untyped_storage()
                pairs.append((storage_bytes(storage), region.data[: region.nbytes]))
            tensors.append(copy.placed(storages[region]))
        return tensors, self._threads.submit(stream, pairs, storages)

    def end(self) -> None:
        """The end of a step: finish all copies."""
        self._threads.end()

"""CUDA GPUs. Not yet run on a GPU."""

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from piper.devices.base import DEVICES, Closure
from piper.devices.tensors import TensorOperations, as_torch
from piper.errors import ConfigError
from piper.ids import COMPUTE, EventId, Stream
from piper.ops.base import Handle, Tensor


@dataclass(frozen=True, slots=True)
class PinnedTensor:
    """A tensor's copy in pinned host memory: the memory that the tensor was in, and how it lay
    there. Not yet run on a GPU.
    """

    memory: torch.Tensor  # bytes
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Ordered:
    """The handle of work that its CUDA stream orders: the host has nothing to wait for."""

    def wait(self) -> None:
        """See :class:`~piper.ops.base.Handle`."""

    def done(self) -> bool:
        """See :class:`~piper.ops.base.Handle`."""
        return True


class CudaDevice(TensorOperations):
    """Logical streams are CUDA streams, waits are CUDA events; the host only issues. Not yet run on
    a GPU.

    A communication handle's ``wait`` makes the current CUDA stream wait, as torch's NCCL work does;
    so it is called right after the launch, on the communication's own stream.
    """

    kind: ClassVar[str] = "cuda"

    def __init__(self, index: int) -> None:
        if index >= torch.cuda.device_count():
            raise ConfigError(
                f"device cuda:{index} does not exist: this machine has {torch.cuda.device_count()} GPUs; "
                f"use fewer devices per machine, or device='cpu'"
            )
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(index)
        self._streams: dict[Stream, torch.cuda.Stream] = {}
        self._events: dict[EventId, torch.cuda.Event] = {}
        self._pinned: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self._began: torch.cuda.Event | None = None
        self._began_at = 0.0

    @property
    def host_bytes(self) -> int:
        """See :class:`~piper.devices.base.TorchDevice`."""
        return sum(memory.numel() for memory in self._pinned)

    def to_host(
        self, tensors: Sequence[Tensor], stream: Stream
    ) -> tuple[Sequence[PinnedTensor], Handle]:
        """See :class:`~piper.ops.base.Device`. On the current CUDA stream, which is that of
        *stream*; torch gives pinned memory to nobody else before the copies that use it are
        complete. Not yet run on a GPU.
        """
        del stream
        memories: dict[int, torch.Tensor] = {}
        copies: list[PinnedTensor] = []
        for tensor in map(as_torch, tensors):
            storage = tensor.untyped_storage()
            key = storage.data_ptr()
            if key not in memories:
                memory = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
                memory.copy_(_whole(storage), non_blocking=True)
                memories[key] = memory
                self._pinned.add(memory)
            copies.append(
                PinnedTensor(
                    memories[key],
                    tensor.dtype,
                    tensor.shape,
                    tensor.stride(),
                    int(tensor.storage_offset()),
                )
            )
        return copies, _Ordered()

    def from_host(
        self, copies: Sequence[Tensor], stream: Stream
    ) -> tuple[Sequence[torch.Tensor], Handle]:
        """See :class:`~piper.ops.base.Device`, and :meth:`to_host`."""
        del stream
        storages: dict[int, torch.UntypedStorage] = {}
        tensors: list[torch.Tensor] = []
        for copy in copies:
            assert isinstance(copy, PinnedTensor)
            key = id(copy.memory)
            if key not in storages:
                whole = torch.empty_like(copy.memory, device=self.torch_device, pin_memory=False)
                whole.copy_(copy.memory, non_blocking=True)
                storages[key] = whole.untyped_storage()
            empty = torch.empty(0, dtype=copy.dtype, device=self.torch_device)
            tensors.append(empty.set_(storages[key], copy.offset, copy.shape, copy.stride))
        return tensors, _Ordered()

    def on_stream(
        self,
        stream: Stream,
        launch: Callable[[], Handle | None],
        record: EventId | None,
        *,
        asynchronous: bool,
    ) -> Closure:
        """See :class:`~piper.ops.base.Device`."""
        del asynchronous
        target = self._stream(stream)
        event = None
        if record is not None:
            event = self._events[record] = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own

        def issue() -> None:
            torch.cuda.set_stream(target)
            handle = launch()
            if handle is not None:
                handle.wait()
            if event is not None:
                event.record(target)

        return issue

    def waiter(self, stream: Stream, event: EventId) -> Closure:
        """The stream waits for the event; the host does not."""
        target, recorded = self._stream(stream), self._events[event]
        return lambda: target.wait_event(recorded)

    def after_stream(self, stream: Stream) -> None:
        """CUDA streams run in order."""
        del stream

    def releaser(self, stream: Stream) -> Callable[[Tensor], None]:
        """Memory may come from another stream's pool: it must not be reused before *stream* got
        here.
        """
        target = self._stream(stream)
        return lambda tensor: as_torch(tensor).record_stream(target)

    def synchronize(self) -> None:
        """Wait for all streams of the GPU."""
        torch.cuda.synchronize(self.torch_device)

    def abandon(self) -> None:
        """Nothing is kept on the host."""

    def start_clock(self) -> float:
        """An event whose time on the host's clock is known, since the GPU is idle."""
        torch.cuda.synchronize(self.torch_device)
        self._began = self.mark()
        torch.cuda.synchronize(self.torch_device)
        self._began_at = time.perf_counter()
        return self._began_at

    def mark(self) -> torch.cuda.Event:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def seconds(self, mark: object) -> float:
        """From the event that :meth:`start_clock` recorded."""
        assert isinstance(mark, torch.cuda.Event)
        assert self._began is not None, "start_clock comes before mark"
        milliseconds: float = self._began.elapsed_time(mark)
        return self._began_at + milliseconds / 1e3

    def _stream(self, stream: Stream) -> torch.cuda.Stream:
        if stream not in self._streams:
            device = self.torch_device
            if stream == COMPUTE:
                self._streams[stream] = torch.cuda.default_stream(device)
            else:
                self._streams[stream] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
        return self._streams[stream]


def _whole(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of *storage*."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage)


DEVICES.add(CudaDevice.kind, CudaDevice)

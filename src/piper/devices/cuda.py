"""CUDA GPUs. Not yet run on a GPU."""

import time
from collections.abc import Callable
from typing import ClassVar

import torch

from piper.devices.base import DEVICES, Closure
from piper.devices.tensors import TensorOperations, as_torch
from piper.errors import ConfigError
from piper.ids import COMPUTE, EventId, Stream
from piper.ops.base import Handle, Tensor


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
        self._began: torch.cuda.Event | None = None
        self._began_at = 0.0

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


DEVICES.add(CudaDevice.kind, CudaDevice)

"""The CPU: computes where it is told to, keeps communication in flight per stream."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from piper.devices.base import DEVICES, Closure
from piper.devices.host import HostCopies, HostTensor
from piper.devices.tensors import TensorOperations
from piper.ids import EventId, Stream
from piper.ops.base import Handle, Tensor


class _Queue:
    """The communication in flight on one stream, oldest first.

    ``bound`` counts the asynchronous instructions bound so far, ``completed`` those that completed
    in this step.
    """

    __slots__ = ("bound", "completed", "flying")

    def __init__(self) -> None:
        self.flying: deque[Handle] = deque()
        self.bound = 0
        self.completed = 0

    def push(self, handle: Handle) -> None:
        """Add *handle*; give up finished ones, which hold memory."""
        flying = self.flying
        while flying and flying[0].done():
            self._pop()
        flying.append(handle)

    def wait_until(self, position: int) -> None:
        """Wait for the first *position* pieces of work of this step."""
        while self.completed < position:
            self._pop()

    def drain(self) -> None:
        """Wait for everything, and begin the next step's count."""
        while self.flying:
            self._pop()
        self.completed = 0

    def _pop(self) -> None:
        # Taken off first: a handle that fails is not waited for again.
        handle = self.flying.popleft()
        self.completed += 1
        handle.wait()


class CpuDevice(TensorOperations):
    """Compute runs inline; communication is asynchronous through its handles, copies to and from
    host memory (a pool of their own: a mapped temporary file) on a thread per stream.

    A stream is a queue of handles. Waiting for an event waits, in order, for the handles that were
    issued on its stream up to there; an event of a stream without communication has always
    happened.
    """

    kind: ClassVar[str] = "cpu"

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._queues: dict[Stream, _Queue] = {}
        self._events: dict[EventId, tuple[Stream, int]] = {}
        self._host = HostCopies()

    @property
    def host_bytes(self) -> int:
        """See :class:`~piper.devices.base.TorchDevice`."""
        return self._host.pool.live

    def to_host(
        self, tensors: Sequence[Tensor], stream: Stream
    ) -> tuple[Sequence[HostTensor], Handle]:
        """See :class:`~piper.ops.base.Device`."""
        return self._host.out(tensors, stream)

    def from_host(
        self, copies: Sequence[Tensor], stream: Stream
    ) -> tuple[Sequence[torch.Tensor], Handle]:
        """See :class:`~piper.ops.base.Device`."""
        return self._host.back(copies, stream)

    def on_stream(
        self,
        stream: Stream,
        launch: Callable[[], Handle | None],
        record: EventId | None,
        *,
        asynchronous: bool,
    ) -> Closure:
        """See :class:`~piper.ops.base.Device`."""
        queue = self._queue(stream)
        queue.bound += asynchronous
        if record is not None:
            self._events[record] = (stream, queue.bound)
        if not asynchronous:
            # Complete when it returns, and returns no handle: nothing to keep.
            return launch  # type: ignore[return-value]
        push = queue.push

        def issue() -> None:
            handle = launch()
            assert handle is not None, "an asynchronous instruction returned no handle"
            push(handle)

        return issue

    def waiter(self, stream: Stream, event: EventId) -> Closure | None:
        """Waiting blocks the whole device: work is issued in plan order."""
        del stream
        source, position = self._events[event]
        return self._wait(source, position)

    def releaser(self, stream: Stream) -> None:
        """Memory is free when the last reference goes: work on it is complete."""
        del stream

    def after_stream(self, stream: Stream) -> Closure | None:
        """Waits for the handles in flight on *stream*."""
        return self._wait(stream, self._queue(stream).bound)

    def synchronize(self) -> None:
        """Wait for everything in flight, streams in order of first use."""
        for queue in self._queues.values():
            queue.drain()
        self._host.end()

    def abandon(self) -> None:
        """Drop all handles; wait for copies only, which depend on nobody."""
        self._host.end()
        for queue in self._queues.values():
            queue.flying.clear()
            queue.completed = 0

    def start_clock(self) -> float:
        """The host's clock is the device's."""
        return time.perf_counter()

    # The clock itself: around every recorded instruction a method would be most of the cost.
    mark = staticmethod(time.perf_counter)

    def seconds(self, mark: object) -> float:
        """Marks are times."""
        assert isinstance(mark, float)
        return mark

    def _queue(self, stream: Stream) -> _Queue:
        return self._queues.setdefault(stream, _Queue())

    def _wait(self, stream: Stream, position: int) -> Closure | None:
        if position == 0:
            return None
        queue = self._queue(stream)
        wait_until = queue.wait_until

        def wait() -> None:
            if queue.completed < position:
                wait_until(position)

        return wait


DEVICES.add(CpuDevice.kind, lambda _index: CpuDevice())

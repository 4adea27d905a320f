"""Record when the instructions of a step run: closures of their own, so that a program that is not
recorded pays nothing.
"""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from piper.devices.base import TorchDevice
from piper.ops.base import Handle, Instruction

Launch = Callable[[], Handle | None]


@dataclass(frozen=True, slots=True)
class Spans:
    """When the instructions of one step ran on one device, on its host's ``time.perf_counter()``.

    ``begin[i]`` and ``end[i]`` belong to the instruction at position i of the device's program;
    both are 0 for one that does nothing there. Communication begins when it is issued, and ends
    when the device is seen to have waited for it. ``finished`` is the end of the step.
    """

    begin: tuple[float, ...]
    end: tuple[float, ...]
    began: float
    finished: float


@dataclass(frozen=True, slots=True)
class Clock:
    """One reading of a worker's clock, and a name of the machine that it belongs to."""

    machine: str
    seconds: float


def read_clock() -> Clock:
    """This process's clock: the machine's, so that processes of one machine agree (Linux: since it
    was started).
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text().strip() if boot.exists() else socket.gethostname()
    return Clock(name, time.perf_counter())


class Recorder:
    """Wraps what a program launches. Use: :meth:`start`, one step, the device's ``synchronize``,
    :meth:`spans`.

    *ranges*: each launch is also a range of :mod:`torch.profiler`, named by *name*.
    """

    def __init__(
        self,
        device: TorchDevice,
        count: int,
        name: Callable[[Instruction], str],
        *,
        ranges: bool = False,
    ) -> None:
        self._device, self._name, self._ranges = device, name, ranges
        self._begin: list[object] = [None] * count
        self._end: list[object] = [None] * count
        self._began = 0.0

    def around(self, position: int, instruction: Instruction, launch: Launch) -> Launch:
        """*launch*, recorded as the instruction at *position*."""
        begin, end, mark = self._begin, self._end, self._device.mark

        if instruction.asynchronous:

            def issue() -> Handle | None:
                begin[position] = mark()
                handle = launch()
                assert handle is not None, "an asynchronous instruction returned no handle"
                return _Recorded(handle, end, position, mark)

            recorded: Launch = issue
        else:

            def run() -> Handle | None:
                begin[position] = mark()
                handle = launch()
                end[position] = mark()
                return handle

            recorded = run
        return self._ranged(instruction, recorded) if self._ranges else recorded

    def _ranged(self, instruction: Instruction, launch: Launch) -> Launch:
        name = self._name(instruction)

        def run() -> Handle | None:
            with torch.profiler.record_function(name):
                return launch()

        return run

    def start(self) -> None:
        """Begin a step."""
        count = len(self._begin)
        self._begin[:], self._end[:] = [None] * count, [None] * count
        self._began = self._device.start_clock()

    def spans(self) -> Spans:
        """What the step, which is complete, took."""
        finished = time.perf_counter()
        seconds = self._device.seconds
        begin = tuple(0.0 if mark is None else seconds(mark) for mark in self._begin)
        end = tuple(0.0 if mark is None else seconds(mark) for mark in self._end)
        return Spans(begin, end, self._began, finished)


class _Recorded:
    """A handle that notes when it was waited for."""

    __slots__ = ("_end", "_handle", "_mark", "_position")

    def __init__(
        self, handle: Handle, end: list[object], position: int, mark: Callable[[], object]
    ) -> None:
        self._handle, self._end, self._position, self._mark = handle, end, position, mark

    def wait(self) -> None:
        """See :class:`~piper.ops.base.Handle`."""
        self._handle.wait()
        self._end[self._position] = self._mark()

    def done(self) -> bool:
        """See :class:`~piper.ops.base.Handle`."""
        return self._handle.done()

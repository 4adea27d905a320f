"""Timelines of steps that were run."""

from collections.abc import Sequence
from typing import Protocol

from piper.plan.memory import DeviceMemory
from piper.plan.model import Plan
from piper.simulate.build import build_timeline
from piper.simulate.engine import NOTHING, Connections, Place, Run, connect
from piper.simulate.timeline import Source, Timeline


class Recorded(Protocol):
    """When the instructions of one device ran: see :class:`piper.runtime.record.Spans`. All
    devices' on one clock.
    """

    @property
    def begin(self) -> Sequence[float]: ...

    @property
    def end(self) -> Sequence[float]: ...

    @property
    def began(self) -> float: ...

    @property
    def finished(self) -> float: ...


def measured_timeline(
    plan: Plan,
    spans: Sequence[Recorded],
    memory: Sequence[DeviceMemory],
    *,
    host_blocks: bool,
    clock_error: float = 0.0,
    peak: float | None = None,
) -> Timeline:
    """The timeline of a step of *plan* with *spans* by device. *memory* is the planned one, on the
    measured times.

    The step lasts from when the first device begins it until the last is done: longer than any
    device takes, as they do not begin together. A message or collective is drawn from when its last
    member issued it to when its first member was seen to have it.
    """
    links = connect(plan, host_blocks=host_blocks)
    zero = min(span.began for span in spans)
    _fill(links.run, spans, zero)
    for places in links.members:
        _meet(links.run, places)
    _find_causes(links, host_blocks=host_blocks)
    return build_timeline(
        plan,
        links.run,
        memory,
        peak=peak,
        source=Source.MEASURED,
        seconds=max(span.finished for span in spans) - zero,
        clock_error=clock_error,
    )


def _fill(run: Run, spans: Sequence[Recorded], zero: float) -> None:
    """Copy the times; what was not recorded happened, at no cost, right after what came before
    it.
    """
    for device, span in enumerate(spans):
        now = span.began - zero
        for place, begin, end in zip(run.places(device), span.begin, span.end, strict=True):
            if not begin:
                run.start[place] = run.end[place] = now
                continue
            run.start[place] = begin - zero
            # Communication that nobody waited for is complete at the end of the step.
            run.end[place] = (end or span.finished) - zero
            now = run.start[place] if run.meeting[place] != NOTHING else run.end[place]


def _meet(run: Run, places: Sequence[Place]) -> None:
    last = max(places, key=lambda place: run.start[place])
    start = run.start[last]
    end = max(start, min(run.end[place] for place in places))
    for place in places:
        if place != last and run.start[place] < start:
            run.cause[place] = last
    for place in places:
        run.start[place], run.end[place] = start, end


def _find_causes(links: Connections, *, host_blocks: bool) -> None:
    """Of everything that an instruction needs, the cause is what was complete last."""
    run = links.run
    for device in range(len(run.offsets) - 1):
        host = NOTHING  # what the host was last held up by
        for place in run.places(device):
            candidates = list(links.sources[place])
            if host_blocks and host != NOTHING:
                candidates.append(host)
            cause = max(candidates, key=lambda p: (run.end[p], p), default=NOTHING)
            if run.cause[place] == NOTHING:
                run.cause[place] = cause
            if run.meeting[place] == NOTHING:
                host = place
                # A wait is over when what it waits for is complete.
                if run.end[place] == run.start[place] and cause != NOTHING:
                    run.end[place] = run.start[place] = max(run.end[place], run.end[cause])

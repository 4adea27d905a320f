"""Times of one worker's clock on another's."""

import time
from collections.abc import Callable, Sequence

from piper.runtime.record import Clock, Spans

_READINGS = 20


def clock_offsets(read: Callable[[], Sequence[Clock]]) -> tuple[list[float], float]:
    """How far each worker's clock is ahead of device 0's, and by how much that may be wrong, in
    seconds. *read* lets every worker read its clock; the result is by device.

    A worker reads its clock between the driver's call and the answer, so of several calls the
    quickest bounds the offset most narrowly (Cristian, "Probabilistic clock synchronization",
    1989). Workers on one machine share its clock.
    """
    quickest, ahead = float("inf"), [0.0]
    for _ in range(_READINGS):
        asked = time.perf_counter()
        clocks = read()
        answered = time.perf_counter()
        if len({clock.machine for clock in clocks}) == 1:
            return [0.0] * len(clocks), 0.0
        if answered - asked < quickest:
            quickest = answered - asked
            ahead = [clock.seconds - (asked + answered) / 2 for clock in clocks]
    return [offset - ahead[0] for offset in ahead], quickest


def on_other_clock(spans: Spans, ahead: float) -> Spans:
    """*spans* of a clock that is *ahead* of another one, in times of that one."""
    if not ahead:
        return spans
    begin = tuple(t - ahead if t else t for t in spans.begin)
    end = tuple(t - ahead if t else t for t in spans.end)
    return Spans(begin, end, spans.began - ahead, spans.finished - ahead)

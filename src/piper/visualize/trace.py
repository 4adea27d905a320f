"""A timeline as a trace for Perfetto (https://ui.perfetto.dev) or ``chrome://tracing``.

One process per device, a track per stream (several where its boxes overlap, which a viewer would
draw as one call inside of another), an arrow for each message, a counter track for memory. The
format is Google's *Trace Event Format* (JSON, times in microseconds); times are rounded to the
viewers' whole nanoseconds, so that boxes that touch do not overlap.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec

from piper.ids import COMPUTE
from piper.simulate.timeline import SECONDS, Box, DeviceTimeline, Timeline
from piper.visualize.checks import check_drawable
from piper.visualize.page_data import nanoseconds

Event: TypeAlias = dict[str, object]

_COLOURS = {
    "F": "thread_state_running",
    "B": "thread_state_runnable",
    "BI": "thread_state_runnable",
    "BW": "thread_state_iowait",
    "UPDATE": "thread_state_unknown",
}
"""Names from the viewers' fixed palette, by pass."""


def trace_events(timeline: Timeline) -> Iterator[Event]:
    """The events, device by device."""
    sent = _meetings(timeline, "send") & _meetings(timeline, "post_receive")
    for device in timeline.devices:
        count = len(device.stands_for)
        name = f"device {device.device}" + (f" (and {count - 1} like it)" if count > 1 else "")
        if timeline.unit != SECONDS:
            name += f", 1 s is 1 {timeline.unit}"
        yield _named("process_name", device.device, 0, name)
        yield {**_at("M", device.device, 0), "name": "process_sort_index"} | {
            "args": {"sort_index": device.device}
        }
        for number, (stream, boxes) in enumerate(_tracks(device)):
            yield _named("thread_name", device.device, number, stream)
            yield _at("M", device.device, number) | {
                "name": "thread_sort_index",
                "args": {"sort_index": number},
            }
            for box in boxes:
                yield _box(device, number, box)
                if box.meeting in sent:
                    yield _arrow(device, number, box)
        yield from _memory(device)


def _meetings(timeline: Timeline, op: str) -> set[str]:
    """The messages of which one end is in the timeline: of a folded plan, some have one only."""
    return {box.meeting for device in timeline.devices for box in device.boxes() if box.op == op}


def _tracks(device: DeviceTimeline) -> Iterator[tuple[str, list[Box]]]:
    """Names of tracks, and boxes that do not overlap."""
    for lane in sorted(device.lanes, key=lambda lane: (lane.stream != COMPUTE, lane.stream)):
        tracks: list[list[Box]] = []
        for box in sorted(lane.boxes, key=lambda box: (box.start, box.end)):
            free = (t for t in tracks if nanoseconds(t[-1].end) <= nanoseconds(box.start))
            track = next(free, None)
            if track is None:
                tracks.append([box])
            else:
                track.append(box)
        for number, track in enumerate(tracks):
            yield f"{lane.stream} ({number + 1})" if number else str(lane.stream), track


def save_trace(timeline: Timeline, path: str | Path) -> None:
    """Write the trace of *timeline* to *path* (JSON). Raises :class:`~piper.errors.PictureError` if
    a time or count is not finite.
    """
    check_drawable(timeline, "the timeline")
    contents = {
        "displayTimeUnit": "ms",
        "otherData": {
            "source": timeline.source,
            "step_seconds": timeline.seconds,
            "unit": timeline.unit,
        },
        "traceEvents": list(trace_events(timeline)),
    }
    Path(path).write_bytes(msgspec.json.encode(contents))


def _at(phase: str, process: int, thread: int) -> Event:
    return {"ph": phase, "pid": process, "tid": thread}


def _named(what: str, process: int, thread: int, name: str) -> Event:
    return {**_at("M", process, thread), "name": what, "args": {"name": name}}


def _box(device: DeviceTimeline, track: int, box: Box) -> Event:
    event: Event = {
        **_at("X", device.device, track),
        "name": box.label,
        "cat": box.op,
        "ts": nanoseconds(box.start) / 1000,
        "dur": (nanoseconds(box.end) - nanoseconds(box.start)) / 1000,
        "args": {
            "node": box.node,
            "position": box.position,
            "op": box.op,
            "microbatch": box.microbatch,
            "tags": dict(box.tags),
            "bytes": box.nbytes,
            "flops": box.flops,
            "waits_on": list(box.waits_on),
            "critical": box.critical,
        },
    }
    if (colour := _COLOURS.get(box.pass_)) is not None and box.op == "compute":
        event["cname"] = colour
    return event


def _arrow(device: DeviceTimeline, track: int, box: Box) -> Event:
    """One end of a message's arrow, from the start of its send to the end of its receive."""
    sends = box.op == "send"
    start, end = nanoseconds(box.start), nanoseconds(box.end)
    event: Event = {
        **_at("s" if sends else "f", device.device, track),
        "name": "message",
        "cat": "message",
        "id": box.meeting,
        # Inside of its box: at the end of it, the next one may have begun.
        "ts": (start if sends else max(start, end - 1)) / 1000,
    }
    # "e": the arrow ends at the box around that time, not at the next one.
    return event if sends else {**event, "bp": "e"}


def _memory(device: DeviceTimeline) -> Iterator[Event]:
    curve = device.memory
    for i, time in enumerate(curve.times):
        alive = {category: values[i] for category, values in curve.nbytes.items()}
        yield {
            **_at("C", device.device, 0),
            "name": "memory",
            "ts": nanoseconds(time) / 1000,
            "args": alive,
        }

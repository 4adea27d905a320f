"""A timeline as a trace for Perfetto (https://ui.perfetto.dev) or ``chrome://tracing``.

One process per device, one track per stream, an arrow for each message, a counter track for memory. The format is Google's *Trace Event Format*
(JSON, times in microseconds).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec

from piper.ids import COMPUTE
from piper.simulate.timeline import SECONDS, Box, DeviceTimeline, Lane, Timeline

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
    for device in timeline.devices:
        count = len(device.stands_for)
        name = f"device {device.device}" + (f" (and {count - 1} like it)" if count > 1 else "")
        if timeline.unit != SECONDS:
            name += f", 1 s is 1 {timeline.unit}"
        yield _named("process_name", device.device, 0, name)
        yield {**_at("M", device.device, 0), "name": "process_sort_index"} | {
            "args": {"sort_index": device.device}
        }
        for track, lane in enumerate(_ordered(device)):
            yield _named("thread_name", device.device, track, str(lane.stream))
            yield _at("M", device.device, track) | {
                "name": "thread_sort_index",
                "args": {"sort_index": track},
            }
            for box in lane.boxes:
                yield _box(device, track, box)
                if (arrow := _arrow(device, track, box)) is not None:
                    yield arrow
        yield from _memory(device)


def save_trace(timeline: Timeline, path: str | Path) -> None:
    """Write the trace of *timeline* to *path* (JSON)."""
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


def _ordered(device: DeviceTimeline) -> list[Lane]:
    """Compute first."""
    return sorted(device.lanes, key=lambda lane: (lane.stream != COMPUTE, lane.stream))


def _at(phase: str, process: int, thread: int) -> Event:
    return {"ph": phase, "pid": process, "tid": thread}


def _named(what: str, process: int, thread: int, name: str) -> Event:
    return {**_at("M", process, thread), "name": what, "args": {"name": name}}


def _box(device: DeviceTimeline, track: int, box: Box) -> Event:
    event: Event = {
        **_at("X", device.device, track),
        "name": box.label,
        "cat": box.op,
        "ts": box.start * 1e6,
        "dur": box.seconds * 1e6,
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


def _arrow(device: DeviceTimeline, track: int, box: Box) -> Event | None:
    """A message's arrow, from the start of its send to the end of its receive."""
    if box.op not in ("send", "post_receive"):
        return None
    sends = box.op == "send"
    event: Event = {
        **_at("s" if sends else "f", device.device, track),
        "name": "message",
        "cat": "message",
        "id": box.meeting,
        "ts": (box.start if sends else box.end) * 1e6,
    }
    # "e": the arrow ends at the box around that time, not at the next one.
    return event if sends else {**event, "bp": "e"}


def _memory(device: DeviceTimeline) -> Iterator[Event]:
    curve = device.memory
    for i, time in enumerate(curve.times):
        alive = {category: values[i] for category, values in curve.nbytes.items()}
        yield {**_at("C", device.device, 0), "name": "memory", "ts": time * 1e6, "args": alive}

"""What every device does when, in one step: predicted by :func:`piper.simulate`, or measured by
``Trainer.profile``.

Times are seconds from the start of the step. A :class:`Box` is one instruction on one stream that
takes time (chunks, additions, updates, messages, collectives); waits and frees have none. Boxes of
one stream do not overlap and stand in issue order, with one exception: measured communication is
seen to end only when its device waits for it.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import chain, pairwise
from pathlib import Path

import msgspec

from piper.boundary import public
from piper.brief import brief, count
from piper.errors import PlanError
from piper.ids import COMPUTE, DeviceId, NodeId, Stream
from piper.limits import MAX_DEVICES, MAX_NUMBER
from piper.reading import decode_json, read_file

VERSION = 1
"""Format version of timeline files; a file of another version is refused."""


SECONDS = "s"
FORWARDS = "F"
"""Times are in units of one forward of a stage: F = 1."""


class Source(StrEnum):
    """Where the times come from."""

    SIMULATED = "simulated"
    MEASURED = "measured"


class Box(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One instruction on one stream of one device.

    ``position`` is its index in the device's program, ``node`` the DAG node that it comes from (-1:
    none), ``label`` the node's text for people, ``op`` the instruction's registered name, ``pass_``
    ``F``, ``B``, ``BI``, ``BW``, ``UPDATE`` or empty. ``tags`` are the region path and the split
    dimensions. ``microbatch`` is the number within the replica (``None``: belongs to none).
    ``nbytes`` is what communication carries (one member's payload), or the memory that a chunk
    touches. ``waits_on`` lists the nodes whose completion its start waited for last (several for a
    rendezvous); empty at the start of the step. ``meeting`` is the same text on all members of one
    message or collective, and empty for local work. ``needs`` are the boxes, by device and
    position, that had to be complete before, whether or not they were last (see
    :func:`piper.simulate.needs.needs`); what the other members of its meeting need is not listed
    again.
    """

    position: int
    node: NodeId
    op: str
    label: str
    pass_: str
    tags: tuple[tuple[str, int], ...]
    microbatch: int | None
    start: float
    end: float
    nbytes: int = 0
    flops: float = 0.0
    waits_on: tuple[NodeId, ...] = ()
    critical: bool = False
    meeting: str = ""
    needs: tuple[tuple[DeviceId, int], ...] = ()

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end - self.start


def _brief_lane(it: "Lane") -> str:
    return f"{it.stream!r}: {len(it.boxes)} boxes"


@brief(_brief_lane)
class Lane(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stream of a device and its boxes in issue order."""

    stream: Stream
    boxes: tuple[Box, ...]


def _brief_memory_curve(it: "MemoryCurve") -> str:
    return f"{count(len(it.times), 'time')}, {len(it.nbytes)} categories"


@brief(_brief_memory_curve)
class MemoryCurve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes that are alive: ``nbytes[category][i]`` from ``times[i]`` on. Empty where memory was
    not counted.
    """

    times: tuple[float, ...] = ()
    nbytes: dict[str, tuple[int, ...]] = {}


def _brief_device_timeline(it: "DeviceTimeline") -> str:
    return f"device {it.device}: {count(len(it.lanes), 'stream')}, bubble {it.bubble:.1%}"


@brief(_brief_device_timeline)
class DeviceTimeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one device does.

    ``stands_for`` lists all devices that do the same, itself first (see ``Plan.roles``). ``busy``
    is the seconds in which the compute stream runs something, ``bubble`` the share of the step in
    which it does not, ``exposed`` the seconds of this in which communication of the device is in
    flight. ``peak`` is the most bytes alive at once, ``peak_by_category`` what they consist of.
    """

    device: DeviceId
    stands_for: tuple[DeviceId, ...]
    lanes: tuple[Lane, ...]
    memory: MemoryCurve
    busy: float
    bubble: float
    exposed: float
    peak: int = 0
    peak_by_category: dict[str, int] = {}

    def boxes(self) -> Iterator[Box]:
        """All boxes, stream by stream."""
        for lane in self.lanes:
            yield from lane.boxes


class Critical(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One link of the critical path: a box, by device and position, and when it runs."""

    device: DeviceId
    position: int
    node: NodeId
    label: str
    op: str
    start: float
    end: float


def _brief_timeline(it: "Timeline") -> str:
    return f"{it.source.value}, {time_text(it.seconds, it.unit)}, {count(it.num_devices, 'device')}, bubble {it.bubble:.1%}"


@brief(_brief_timeline)
class Timeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One training step. ``seconds`` is its length, ``splits`` the names of the tags that are split
    dimensions. ``flops`` counts the chunks' floating-point operations on all devices,
    ``recomputed`` those of them that were done before. ``hfu`` (hardware FLOPs utilisation) is the
    share of the devices' peak that all of them use, ``mfu`` (model FLOPs utilisation) what the
    others use (Chowdhery et al., 2022); ``None`` if no peak is known. ``unit`` is what times are
    counted in, wherever it says seconds: ``"s"``, or :data:`FORWARDS`. ``critical_path`` is a
    longest chain of boxes each of which starts when the one before ends, first to last: shortening
    anything else does not shorten the step.
    """

    version: int
    source: Source
    seconds: float
    num_devices: int
    splits: tuple[str, ...]
    flops: float
    mfu: float | None
    devices: tuple[DeviceTimeline, ...]
    critical_path: tuple[Critical, ...]
    clock_error: float = 0.0
    recomputed: float = 0.0
    hfu: float | None = None
    unit: str = SECONDS

    @property
    def bubble(self) -> float:
        """The mean share of the step in which a device's compute stream is idle."""
        return sum(d.bubble * len(d.stands_for) for d in self.devices) / self.num_devices

    @property
    def exposed(self) -> float:
        """The mean seconds in which communication of a device is in flight and nothing is computed
        there.
        """
        return sum(d.exposed * len(d.stands_for) for d in self.devices) / self.num_devices

    def save(self, path: str | Path) -> None:
        """Write JSON. Raises :class:`PlanError` if the file cannot be written."""
        try:
            Path(path).write_bytes(msgspec.json.encode(self))
        except OSError as error:
            raise PlanError(f"cannot write timeline {path}: {error.strerror}") from error


def time_text(value: float, unit: str) -> str:
    """*value*, counted in *unit*, for people: ``"12.3 ms"``; forwards as ``"4 F"``."""
    if unit != SECONDS:
        return f"{value:.4g} {unit}"
    if value == 0:
        return "0 s"
    scales = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
    # 0.9995: what would be rounded to 1000 of a unit is 1 of the next
    scale, name = next((s for s in scales if abs(value) >= 0.9995 * s[0]), scales[-1])
    return f"{value / scale:.3g} {name}"


class _Version(msgspec.Struct):
    version: int


@public
def load_timeline(path: str | Path) -> Timeline:
    """The timeline that :meth:`Timeline.save` wrote. Raises :class:`PlanError` for another version
    or an unreadable or malformed file.
    """
    data = read_file(Path(path), f"cannot read timeline {path}", PlanError)
    where = f"timeline file {path}"
    found = decode_json(data, _Version, where, PlanError, whole=False).version
    if found != VERSION:
        raise PlanError(
            f"{where} has format version {found!r:.40}, this piper reads version {VERSION}; simulate or profile again"
        )
    timeline = decode_json(data, Timeline, where, PlanError)
    if problem := next(_problems(timeline), None):
        raise PlanError(f"{where}: {problem}")
    return timeline


def _problems(timeline: Timeline) -> Iterator[str]:
    """What no simulation and no measurement gives, with its place."""
    if timeline.unit not in (SECONDS, FORWARDS):
        yield f"unit: expected {SECONDS!r} or {FORWARDS!r}, found {timeline.unit!r:.40}"
    if not 1 <= timeline.num_devices <= MAX_DEVICES:
        yield f"num_devices: expected 1 to {MAX_DEVICES}, found {timeline.num_devices!r:.40}"
    if not 0 <= timeline.seconds <= _LONGEST:
        yield f"seconds: expected 0 to {_LONGEST:g}, found {timeline.seconds:g}"
    seen: set[DeviceId] = set()
    for i, device in enumerate(timeline.devices):
        here = f"devices[{i}]"
        for number in device.stands_for:
            if not 0 <= number < timeline.num_devices or number in seen:
                yield f"{here}.stands_for: device {number!r:.40} does not exist, or is there twice"
            seen.add(number)
        if device.device not in device.stands_for:
            yield f"{here}.stands_for: expected device {device.device!r:.40} among them"
        yield from (f"{here}: {text}" for text in _memory_problems(device))
        for box in device.boxes():
            yield from (f"{here}, {box.label!r:.60}: {text}" for text in _box_problems(box))


def _memory_problems(device: DeviceTimeline) -> Iterator[str]:
    memory = device.memory
    if any(len(values) != len(memory.times) for values in memory.nbytes.values()):
        yield "memory: expected a value per time in each category"
    if any(not abs(time) <= _LONGEST for time in memory.times):
        yield f"memory: expected times up to {_LONGEST:g}"
    counts = chain((device.peak,), device.peak_by_category.values(), *memory.nbytes.values())
    if any(abs(count) > MAX_NUMBER for count in counts):
        yield "memory: expected numbers of bytes of 64 bits"


def _box_problems(box: Box) -> Iterator[str]:
    if not -_LONGEST <= box.start <= box.end <= _LONGEST:
        yield f"it runs from {box.start:g} to {box.end:g}"
    numbers = (box.position, box.node, box.nbytes, box.microbatch or 0)
    if any(abs(number) > MAX_NUMBER for number in numbers):
        yield "it has a number of more than 64 bits"


_LONGEST = 1e9
"""Seconds, or forwards, that a step may take in a file: thirty years."""


def busy_and_exposed(lanes: Sequence[Lane], seconds: float) -> tuple[float, float, float]:
    """Seconds in which the compute stream is busy, the share of *seconds* in which it is not, and
    the seconds in which some other stream is busy meanwhile.
    """
    compute = _union([b for lane in lanes if lane.stream == COMPUTE for b in lane.boxes])
    everything = _union([b for lane in lanes for b in lane.boxes])
    busy = _length(compute)
    bubble = 1 - busy / seconds if seconds > 0 else 0.0
    return busy, bubble, _length(everything) - busy


def _union(boxes: Sequence[Box]) -> list[tuple[float, float]]:
    """The intervals that *boxes* cover, disjoint and in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted((b.start, b.end) for b in boxes):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    assert all(a[1] < b[0] for a, b in pairwise(found))
    return found


def _length(intervals: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)

"""What a page shows of a timeline, as columns of numbers: small to store and quick to read for a
browser.

Times are whole nanoseconds, texts are numbers of a table of strings, boxes are numbered stream by
stream. ``assets/data.js`` is the reader.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import msgspec

from piper.ids import DeviceId, NodeId
from piper.simulate.timeline import Box, DeviceTimeline, MemoryCurve, Timeline
from piper.visualize.colours import LOOKS

SHOWN_WAITS = 8
"""A box is linked to at most so many of the boxes that it waited for; they all ended at the same
time.
"""

NOWHERE = ("", 0)
"""Stands for the region of a box outside of all."""

Window = tuple[float, float]
"""Seconds: a part of the step, from, until."""


class LaneData(msgspec.Struct, frozen=True):
    """One stream: its name and how many boxes it has."""

    stream: str
    count: int


class Group(msgspec.Struct, frozen=True):
    """Devices that do the same: how many, and which, shortened."""

    count: int
    text: str


class MemoryData(msgspec.Struct, frozen=True):
    """:class:`~piper.simulate.timeline.MemoryCurve` with times in nanoseconds."""

    times: list[int]
    nbytes: dict[str, list[int]]


class DeviceData(msgspec.Struct, frozen=True):
    """One device: streams in the order in which their boxes are numbered, and its totals (see
    ``DeviceTimeline``).
    """

    device: int
    stands_for: Group
    lanes: list[LaneData]
    memory: MemoryData
    busy: float
    bubble: float
    exposed: float
    peak: int


class BoxColumns(msgspec.Struct):
    """One entry per box.

    ``gap`` is the nanoseconds since the end of the box before on the same stream (0 before the
    first), ``length`` its own; ``label``, ``op``, ``pass`` and ``region`` are strings by number;
    ``microbatch`` and ``meeting`` (equal for the members of a message or collective) are -1 for
    none; ``odd`` is 1 for every second stage of a device. ``waits`` are the boxes whose end it
    needed, the first ``bound`` of them those that it waited for last; ``away`` is how many more of
    them are in another part.
    """

    gap: list[int] = []
    length: list[int] = []
    node: list[int] = []
    label: list[int] = []
    op: list[int] = []
    pass_: list[int] = msgspec.field(default=[], name="pass")
    region: list[int] = []
    microbatch: list[int] = []
    odd: list[int] = []
    critical: list[int] = []
    meeting: list[int] = []
    nbytes: list[int] = []
    flops: list[float] = []
    waits: list[list[int]] = []
    bound: list[int] = []
    away: list[int] = []


class TimelineData(msgspec.Struct, frozen=True):
    """One timeline, or the part of it that lies between ``from`` and ``until`` (seconds)."""

    name: str
    source: str
    seconds: float
    from_: float = msgspec.field(name="from")
    until: float
    num_devices: int
    bubble: float
    exposed: float
    mfu: float | None
    hfu: float | None
    flops: float
    clock_error: float
    devices: list[DeviceData]
    boxes: BoxColumns
    strings: list[str]
    critical_path: list[int]


class PassData(msgspec.Struct, frozen=True):
    """A pass and its looks, see :mod:`piper.visualize.colours`."""

    name: str
    meaning: str
    colour: str
    darker: str


class PageData(msgspec.Struct, frozen=True):
    """One page: one timeline or two, the file names of all parts of which it is number ``part``,
    and what times are counted in.
    """

    timelines: list[TimelineData]
    parts: list[str]
    part: int
    unit: str
    passes: tuple[PassData, ...] = tuple(PassData(name, *look) for name, look in LOOKS.items())


@dataclass(frozen=True, slots=True)
class Waits:
    """What one box needed, boxes numbered stream by stream: ``binding`` ended last, so that it
    started then; ``others`` had to end too.
    """

    binding: tuple[int, ...]
    others: tuple[int, ...] = ()


def timeline_data(
    timeline: Timeline, name: str, waits: Sequence[Waits], window: Window | None = None
) -> TimelineData:
    """What a page shows of *timeline* with its :func:`links`, under *name*: all of it, or what
    happens in *window*.
    """
    begin, end = window or (0.0, timeline.seconds)
    columns = _Columns(timeline, waits, begin, end, last=end >= timeline.seconds)
    devices = [columns.device(device) for device in timeline.devices]
    return TimelineData(
        name=name,
        source=timeline.source.value,
        seconds=timeline.seconds,
        from_=begin,
        until=end,
        num_devices=timeline.num_devices,
        bubble=timeline.bubble,
        exposed=timeline.exposed,
        mfu=timeline.mfu,
        hfu=timeline.hfu if timeline.recomputed else None,
        flops=timeline.flops,
        clock_error=timeline.clock_error,
        devices=devices,
        boxes=columns.finished(),
        strings=list(columns.strings),
        critical_path=columns.critical_path(),
    )


def windows(timelines: Sequence[Timeline], most: int) -> list[Window]:
    """Parts of the longest of the steps in which at most *most* boxes start, all timelines
    together.

    A part may have more if they start at the same time.
    """
    until = max(t.seconds for t in timelines)
    starts = sorted(b.start for t in timelines for d in t.devices for b in d.boxes())
    cuts = sorted({0.0, *starts[most::most]})
    return list(zip(cuts, [*cuts[1:], until], strict=True))


def stage_ranks(device: DeviceTimeline, splits: frozenset[str]) -> Mapping[tuple[str, int], int]:
    """The outermost regions that *device* computes, numbered in their order."""
    computed = (outermost(box, splits) for box in device.boxes() if not box.meeting)
    return {r: i for i, r in enumerate(sorted({r for r in computed if r is not None}))}


def outermost(box: Box, splits: frozenset[str]) -> tuple[str, int] | None:
    """The outermost region that *box* belongs to, for instance ``("PP", 1)``."""
    return next((tag for tag in box.tags if tag[0] not in splits), None)


# ------------------------------------------------------------------ who waits for whom


def links(timeline: Timeline) -> list[Waits]:
    """For each box, numbered stream by stream, what it needed.

    What it waited for last, a box says by node, and a node runs on several devices. Meant are those
    boxes of the node, on the box's own device or on one that it meets, that ended last before it
    started.
    """
    boxes = [(d.device, box) for d in timeline.devices for box in d.boxes()]
    numbers = {(device, box.position): i for i, (device, box) in enumerate(boxes)}
    found = list[Waits]()
    for (_, box), binding in zip(boxes, _Links(timeline).find(), strict=True):
        others = (numbers[place] for place in box.needs if place in numbers)
        found.append(Waits(binding, tuple(j for j in others if j not in binding)))
    return found


@dataclass(slots=True)
class _Ends:
    """The boxes of one node on one device, by when they end."""

    ends: list[float] = field(default_factory=list)
    boxes: list[int] = field(default_factory=list)

    def last_before(self, time: float, slack: float, but: int) -> list[tuple[float, int]]:
        """When and which boxes other than number *but* end last, but before *time*."""
        stop = bisect.bisect_right(self.ends, time + slack)
        if stop and self.boxes[stop - 1] == but:
            stop -= 1
        if not stop:
            return []
        first = bisect.bisect_left(self.ends, self.ends[stop - 1] - slack, 0, stop)
        return [(self.ends[k], self.boxes[k]) for k in range(first, stop)]


class _Links:
    """Finds who waits for whom."""

    def __init__(self, timeline: Timeline) -> None:
        self._numbered = list(
            enumerate((d.device, box) for d in timeline.devices for box in d.boxes())
        )
        self._slack = 1e-9 + 1e-9 * timeline.seconds + timeline.clock_error
        self._places: dict[NodeId, dict[DeviceId, _Ends]] = defaultdict(lambda: defaultdict(_Ends))
        self._members: dict[str, list[DeviceId]] = defaultdict(list)
        self._met: dict[tuple[str, NodeId], list[tuple[float, int]]] = {}
        for i, (device, box) in sorted(self._numbered, key=lambda item: item[1][1].end):
            ends = self._places[box.node][device]
            ends.ends.append(box.end)
            ends.boxes.append(i)
            if box.meeting:
                self._members[box.meeting].append(device)

    def find(self) -> list[tuple[int, ...]]:
        """For each box, those that it waited for last."""
        found = list[tuple[int, ...]]()
        for i, (device, box) in self._numbered:
            mine = [j for node in box.waits_on for j in self._waited(i, device, box, node)]
            found.append(tuple(dict.fromkeys(mine))[:SHOWN_WAITS])
        return found

    def _waited(self, number: int, device: DeviceId, box: Box, node: NodeId) -> list[int]:
        """The boxes of *node* that box *number* waited for."""
        places = self._places.get(node)
        if places is None:
            return []
        own = self._last(number, box, [places[device]] if device in places else [])
        if not box.meeting:
            return [j for _, j in own or self._last(number, box, list(places.values()))]
        if (met := self._met.get((box.meeting, node))) is None:
            there = [places[d] for d in self._members[box.meeting] if d in places]
            met = self._met[box.meeting, node] = self._last(number, box, there)
        # Of several that ended together, the box's own says it all.
        late = own and own[0][0] >= max(end for end, _ in met or own) - self._slack
        return [j for _, j in (own if late else met)]

    def _last(self, number: int, box: Box, places: Sequence[_Ends]) -> list[tuple[float, int]]:
        """When and which of the boxes at *places* end last before *box* starts.

        If none does, since the clocks of a measurement differ a little: the first to end of those
        that start before it.
        """
        ended = [e for place in places for e in place.last_before(box.start, self._slack, number)]
        if ended:
            latest = max(end for end, _ in ended)
            return [(end, j) for end, j in ended if end >= latest - self._slack]
        boxes = ((place.ends[0], place.boxes[0]) for place in places if place.boxes[0] != number)
        started = [(end, j) for end, j in boxes if self._numbered[j][1][1].start <= box.start]
        return [min(started)] if started else []


# ------------------------------------------------------------------ columns


@dataclass
class _Columns:
    """Collects the boxes of one part, device by device."""

    timeline: Timeline
    waits: Sequence[Waits]
    begin: float
    end: float
    last: bool
    """Whether the part reaches to the end of the step."""
    columns: BoxColumns = field(default_factory=BoxColumns)
    strings: dict[str, int] = field(default_factory=dict)
    meetings: dict[str, int] = field(default_factory=dict)
    number: dict[int, int] = field(default_factory=dict)
    """The number in this part of a box of the whole timeline."""
    place: dict[tuple[DeviceId, int], int] = field(default_factory=dict)
    """The number in this part of the box at a position of a device's program."""

    def __post_init__(self) -> None:
        self.splits = frozenset(self.timeline.splits)
        counts = accumulate(
            (len(lane.boxes) for d in self.timeline.devices for lane in d.lanes), initial=0
        )
        self.first_of_lane = iter(counts)

    def device(self, device: DeviceTimeline) -> DeviceData:
        """Take over the boxes of *device*."""
        ranks = stage_ranks(device, self.splits)
        lanes = list[LaneData]()
        for lane in device.lanes:
            first = next(self.first_of_lane)
            order = sorted(range(len(lane.boxes)), key=lambda i: lane.boxes[i].start)
            inside = [i for i in order if self._shows(lane.boxes[i])]
            now = 0
            for i in inside:
                box = lane.boxes[i]
                self.number[first + i] = len(self.columns.length)
                self.place[device.device, box.position] = len(self.columns.length)
                region = outermost(box, self.splits) or NOWHERE
                now = self._add(box, now, odd=region in ranks and ranks[region] % 2 == 1)
            lanes.append(LaneData(str(lane.stream), len(inside)))
        return DeviceData(
            device=device.device,
            stands_for=Group(len(device.stands_for), _shortened(device.stands_for)),
            lanes=lanes,
            memory=self._memory(device.memory),
            busy=device.busy,
            bubble=device.bubble,
            exposed=device.exposed,
            peak=device.peak,
        )

    def finished(self) -> BoxColumns:
        """All columns, once every device has been taken over."""
        number = self.number
        for old in number:
            waits = self.waits[old]
            binding = [number[i] for i in waits.binding if i in number]
            others = [number[i] for i in waits.others if i in number]
            self.columns.waits.append(binding + others)
            self.columns.bound.append(len(binding))
            away = len(waits.binding) + len(waits.others) - len(binding) - len(others)
            self.columns.away.append(away)
        return self.columns

    def critical_path(self) -> list[int]:
        """The numbers of the boxes of the critical path that are in this part."""
        places = ((c.device, c.position) for c in self.timeline.critical_path)
        return [self.place[p] for p in places if p in self.place]

    def _shows(self, box: Box) -> bool:
        if box.end > self.begin and box.start < self.end:
            return True
        at_the_end = self.last and box.start >= self.end
        return self.begin <= box.start < self.end or at_the_end

    def _add(self, box: Box, now: int, *, odd: bool) -> int:
        start, end = nanoseconds(box.start), nanoseconds(box.end)
        columns = self.columns
        columns.gap.append(start - now)
        columns.length.append(end - start)
        columns.node.append(box.node)
        columns.label.append(self._string(box.label))
        columns.op.append(self._string(box.op))
        columns.pass_.append(self._string(box.pass_))
        regions = " ".join(f"{n}={i}" for n, i in box.tags if n not in self.splits)
        columns.region.append(self._string(regions))
        columns.microbatch.append(-1 if box.microbatch is None else box.microbatch)
        columns.odd.append(int(odd))
        columns.critical.append(int(box.critical))
        meeting = self.meetings.setdefault(box.meeting, len(self.meetings)) if box.meeting else -1
        columns.meeting.append(meeting)
        columns.nbytes.append(box.nbytes)
        columns.flops.append(round(box.flops))
        return end

    def _string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings))

    def _memory(self, curve: MemoryCurve) -> MemoryData:
        """The points of the part, and the one that holds at its beginning."""
        low = max(0, bisect.bisect_right(curve.times, self.begin) - 1)
        high = len(curve.times) if self.last else bisect.bisect_left(curve.times, self.end)
        times = [nanoseconds(max(t, self.begin)) for t in curve.times[low:high]]
        return MemoryData(times, {name: list(v[low:high]) for name, v in curve.nbytes.items()})


def nanoseconds(seconds: float) -> int:
    """The nearest whole number."""
    return round(seconds * 1e9)


def _shortened(devices: Sequence[DeviceId]) -> str:
    """Device numbers for people: ``0–3, 8, 10, …``."""
    runs = list(_runs(sorted(devices)))
    shown = [str(a) if a == b else f"{a}–{b}" for a, b in runs[:6]]
    return ", ".join(shown + ["…"] * (len(runs) > len(shown)))


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of consecutive numbers."""
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last

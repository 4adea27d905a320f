"""From an execution of a plan, simulated or measured, to a
:class:`~piper.simulate.timeline.Timeline`.
"""

from collections.abc import Sequence

from piper.ids import COMPUTE, DeviceId, NodeId, Stream
from piper.ops.base import Instruction
from piper.ops.compute import Compute
from piper.plan.memory import DeviceMemory
from piper.plan.model import DevicePlan, Plan
from piper.plan.recomputed import recomputed_flops
from piper.plan.work import body_work, touched_bytes
from piper.simulate.critical import critical_path, waited_on
from piper.simulate.describe import Described, describe
from piper.simulate.engine import NOTHING, Place, Run
from piper.simulate.needs import needs
from piper.simulate.timeline import (
    SECONDS,
    VERSION,
    Box,
    DeviceTimeline,
    Lane,
    MemoryCurve,
    Source,
    Timeline,
    busy_and_exposed,
)


def build_timeline(
    plan: Plan,
    found: Run,
    memory: Sequence[DeviceMemory],
    *,
    peak: float | None = None,
    source: Source = Source.SIMULATED,
    seconds: float | None = None,
    clock_error: float = 0.0,
    unit: str = SECONDS,
) -> Timeline:
    """The timeline of *found*, in which *memory* was used (by device). *seconds*: the step's
    length, if it did not end with the last instruction; *peak*: floating-point operations per
    second of one device; *unit*: what times are counted in.
    """
    length = max(found.end, default=0.0) if seconds is None else seconds
    builder = _Builder(plan, found, length)
    return builder.build(memory, peak=peak, source=source, clock_error=clock_error, unit=unit)


class _Builder:
    """From the engine's outcome to a timeline."""

    def __init__(self, plan: Plan, found: Run, seconds: float) -> None:
        self.plan, self.run, self.seconds = plan, found, seconds
        self.work = {name: body_work(body, plan.bindings) for name, body in plan.dag.bodies.items()}
        self.described: dict[tuple[NodeId, type[Instruction]], Described] = {}
        self.path = critical_path(plan, found)
        self.critical = {(link.device, link.position) for link in self.path}
        self.shown = [self._has_box(place) for place in range(len(found.instructions))]
        self.needs = needs(found, self.shown)
        # One pair for each box, however many need it.
        self.pairs = [
            (device, place - found.offsets[device]) for place, device in enumerate(found.device)
        ]

    def build(
        self,
        memory: Sequence[DeviceMemory],
        *,
        peak: float | None,
        source: Source,
        clock_error: float,
        unit: str,
    ) -> Timeline:
        """The whole timeline."""
        stands_for = {role[0]: role for role in self.plan.represented()}
        devices = tuple(
            self._device(mine, stands_for[mine.device], memory[mine.device])
            for mine in self.plan.devices
            if mine.device in stands_for
        )
        flops = sum(b.flops * len(d.stands_for) for d in devices for b in d.boxes())
        again = recomputed_flops(self.plan.dag, self.plan.bindings)
        recomputed = sum(
            again.get(b.node, 0.0) * len(d.stands_for)
            for d in devices
            for b in d.boxes()
            if again and b.flops
        )
        whole = self.seconds * self.plan.num_devices * (peak or 0.0)
        return Timeline(
            version=VERSION,
            source=source,
            seconds=self.seconds,
            num_devices=self.plan.num_devices,
            splits=tuple(split.name for split in self.plan.dag.splits),
            flops=flops,
            recomputed=recomputed,
            mfu=(flops - recomputed) / whole if whole else None,
            hfu=flops / whole if whole else None,
            unit=unit,
            devices=devices,
            critical_path=self.path,
            clock_error=clock_error,
        )

    def _device(
        self, mine: DevicePlan, stands_for: tuple[DeviceId, ...], memory: DeviceMemory
    ) -> DeviceTimeline:
        lanes: dict[Stream, list[Box]] = {COMPUTE: []}
        first = self.run.offsets[mine.device]
        for position, instruction in enumerate(mine.instructions):
            lane = lanes.setdefault(instruction.stream, [])
            if self.shown[first + position]:
                lane.append(self._box(mine.device, position, instruction))
        made = tuple(Lane(stream, tuple(boxes)) for stream, boxes in lanes.items() if boxes)
        busy, bubble, exposed = busy_and_exposed(made, self.seconds)
        return DeviceTimeline(
            device=mine.device,
            stands_for=stands_for,
            lanes=made,
            memory=self._curve(mine.device, memory),
            busy=busy,
            bubble=bubble,
            exposed=exposed,
            peak=memory.peak,
            peak_by_category={c.value: n for c, n in memory.by_category.items() if n},
        )

    def _box(self, device: DeviceId, position: int, instruction: Instruction) -> Box:
        place = self.run.offsets[device] + position
        meeting = instruction.rendezvous()
        described = self._described(instruction)
        flops, nbytes = 0.0, 0
        if isinstance(instruction, Compute):
            work = self.work[instruction.body]
            flops, nbytes = work.flops, work.nbytes
        elif meeting is not None:
            nbytes = meeting.nbytes
        else:
            nbytes = touched_bytes(self.plan.devices[device], instruction)
        number = self.run.meeting[place]
        return Box(
            position=position,
            node=instruction.node,
            op=instruction.op,
            label=described.label,
            pass_=described.pass_,
            tags=described.tags,
            microbatch=described.microbatch,
            start=self.run.start[place],
            end=self.run.end[place],
            nbytes=nbytes,
            flops=flops,
            waits_on=waited_on(self.run, place),
            critical=(device, position) in self.critical,
            meeting=""
            if number == NOTHING or meeting is None
            else f"{meeting.communicator}#{number}",
            needs=tuple(self.pairs[p] for p in self.needs[place]),
        )

    def _has_box(self, place: Place) -> bool:
        """Waits, frees and what takes no time have none."""
        instruction = self.run.instructions[place]
        takes_time = self.run.end[place] > self.run.start[place]
        return takes_time and bool(instruction.reads() or instruction.writes())

    def _described(self, instruction: Instruction) -> Described:
        """Remembered: all members of a node have instructions of one or two types."""
        key = (instruction.node, type(instruction))
        if (known := self.described.get(key)) is None:
            known = self.described[key] = describe(self.plan, instruction)
        return known

    def _curve(self, device: DeviceId, memory: DeviceMemory) -> MemoryCurve:
        """Memory after each instruction, at the time at which it is complete. Communication takes
        its memory when it is issued, which does not wait for the peers: with the instruction before
        it.
        """
        return curve(memory, [self._when(place) for place in self.run.places(device)])

    def _when(self, place: int) -> float:
        return 0.0 if self.run.meeting[place] != NOTHING else self.run.end[place]


def curve(memory: DeviceMemory, times: Sequence[float]) -> MemoryCurve:
    """The points at which *memory* changes; instruction i has its effect at ``times[i]``, but never
    before the instructions before it.
    """
    columns = {c.value: values for c, values in memory.curves.items()}
    kept: list[int] = []
    now: list[float] = []
    latest = 0.0
    before: tuple[int, ...] | None = None
    for i, row in enumerate(zip(*columns.values(), strict=True)):
        latest = max(latest, times[i])
        if row != before:
            kept.append(i)
            now.append(latest)
            before = row
    return MemoryCurve(
        tuple(now), {name: tuple(values[i] for i in kept) for name, values in columns.items()}
    )

"""What a plan would do, without running it.

``engine`` executes the plan in simulated time, ``memory`` follows its allocations, ``critical`` finds what its length is made of, ``timeline`` is
the result as data.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from piper.ids import COMPUTE, DeviceId, NodeId, Stream
from piper.ops.base import Instruction, Rendezvous
from piper.ops.compute import Compute
from piper.pausing import collector_paused
from piper.plan.costs import Costs, UnitCosts, hardware
from piper.plan.memory import DeviceMemory
from piper.plan.model import DevicePlan, Plan
from piper.plan.topology import Port, Topology, Traffic, traffic
from piper.plan.work import body_work
from piper.simulate.critical import critical_path, waited_on
from piper.simulate.describe import describe
from piper.simulate.engine import NOTHING, Flow, Run, run
from piper.simulate.memory import OptimizerBytes, account
from piper.simulate.timeline import (
    VERSION,
    Box,
    DeviceTimeline,
    Lane,
    MemoryCurve,
    Source,
    Timeline,
    busy_and_exposed,
)

__all__ = ["simulate"]


def simulate(
    plan: Plan,
    costs: Costs | str | None = None,
    *,
    optimizer_bytes: OptimizerBytes = 0,
    frame_bytes: Callable[[int], int] = int,
) -> Timeline:
    """What *plan* would do, instruction by instruction. Deterministic.

    *costs* are :class:`~piper.plan.costs.UnitCosts` (the default), a :class:`~piper.plan.costs.Hardware` or its preset's name
    (``"H100"``), or a :class:`~piper.plan.profile.Profile`. *optimizer_bytes* and *frame_bytes* are those of
    :func:`~piper.simulate.memory.account`.

    Raises :class:`~piper.errors.ConfigError` for an unknown preset, too few devices, or a chunk that was not measured;
    :class:`~piper.errors.PlanError` for a plan that never ends.
    """
    chosen = hardware(costs) if isinstance(costs, str) else costs or UnitCosts()
    with collector_paused():
        timing = _Timing(plan, chosen, chosen.topology_for(plan.num_devices))
        found = run(plan, timing)
        memory = account(plan, optimizer_bytes, frame_bytes=frame_bytes)
        return _Builder(plan, found, timing).build(memory, chosen.peak_flops)


@dataclass
class _Timing:
    """Implements :class:`~piper.simulate.engine.Timing` with costs."""

    plan: Plan
    costs: Costs
    topology: Topology | None
    _chunks: dict[NodeId, float] = field(default_factory=dict)
    _traffic: dict[tuple[str, tuple[DeviceId, ...], int], Traffic] = field(default_factory=dict)
    _crossings: dict[int, dict[Port, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.host_blocks, self.launch = self.costs.host_blocks, self.costs.launch
        self._slots = [mine.slots for mine in self.plan.devices]
        self._present = {mine.device for mine in self.plan.devices if mine.instructions}

    def local(self, device: DeviceId, instruction: Instruction) -> float:
        """Seconds of a chunk; of all else by the bytes that it reads and writes."""
        if isinstance(instruction, Compute):
            node = instruction.node
            if (seconds := self._chunks.get(node)) is None:
                chunk = self.plan.dag.nodes[node]
                # Only chunks are computed: the verifier saw to it.
                seconds = self.costs.chunk(self.plan.dag, self.plan.bindings, chunk)  # type: ignore[arg-type]
                self._chunks[node] = seconds
            return seconds
        nbytes = self.touched(device, instruction)
        return self.costs.local(instruction.op, nbytes) if nbytes else 0.0

    def touched(self, device: DeviceId, instruction: Instruction) -> int:
        """Bytes of what an instruction reads and writes."""
        slots = self._slots[device]
        return sum(slots[s].message.nbytes for s in (*instruction.reads(), *instruction.writes()))

    def flow(self, members: Sequence[tuple[DeviceId, Instruction]]) -> Flow:
        """By the topology."""
        if self.topology is None:
            return Flow(0.0)
        instruction = members[0][1]
        meeting = instruction.rendezvous()
        assert meeting is not None
        key = (meeting.role, meeting.members, meeting_bytes(meeting))
        if (asked := self._traffic.get(key)) is None:
            asked = self._traffic[key] = traffic(self.topology, *key)
        shares = self._shares(instruction.node) if self.plan.roles else {}
        ports = tuple((port, shares.get(port, 1.0), part) for port, part in asked.ports)
        return Flow(asked.latency, asked.nbytes, ports)

    def _shares(self, node: NodeId) -> dict[Port, float]:
        """Of a folded plan: how many of a node's groups go through each port, for each of those that have a program."""
        assert self.topology is not None
        groups: tuple[tuple[DeviceId, ...], ...] = self.plan.dag.nodes[node].groups  # type: ignore[union-attr]  # a communication
        if (known := self._crossings.get(id(groups))) is None:
            everyone: dict[Port, int] = {}
            represented: dict[Port, int] = {}
            role = self.plan.dag.nodes[node].work.kind
            for group in groups:
                mine = not self._present.isdisjoint(group)
                for port, _ in traffic(self.topology, _ROLES.get(role, role), group, 1.0).ports:
                    everyone[port] = everyone.get(port, 0) + 1
                    represented[port] = represented.get(port, 0) + mine
            known = {p: everyone[p] / count for p, count in represented.items() if count}
            self._crossings[id(groups)] = known
        return known

    def bandwidth(self, port: Port) -> float:
        """Bytes per second."""
        assert self.topology is not None
        return self.topology.bandwidth(port)


_ROLES = {"transfer": "send"}
"""A node's kind → the role of its rendezvous, where they differ."""


def meeting_bytes(meeting: Rendezvous) -> int:
    """Bytes of what crosses."""
    return sum(message.nbytes for message in meeting.messages)


class _Builder:
    """From the engine's outcome to a timeline."""

    def __init__(self, plan: Plan, found: Run, timing: _Timing) -> None:
        self.plan, self.run, self.timing = plan, found, timing
        self.work = {name: body_work(body, plan.bindings) for name, body in plan.dag.bodies.items()}
        self.path = critical_path(plan, found)
        self.critical = {(link.device, link.position) for link in self.path}
        self.seconds = max(found.end, default=0.0)

    def build(self, memory: Sequence[DeviceMemory], peak: float | None) -> Timeline:
        """The whole timeline."""
        stands_for = {role[0]: role for role in self.plan.represented()}
        devices = tuple(
            self._device(mine, stands_for[mine.device], memory[mine.device])
            for mine in self.plan.devices
            if mine.device in stands_for
        )
        flops = sum(b.flops * len(d.stands_for) for d in devices for b in d.boxes())
        whole = self.seconds * self.plan.num_devices * (peak or 0.0)
        return Timeline(
            version=VERSION,
            source=Source.SIMULATED,
            seconds=self.seconds,
            num_devices=self.plan.num_devices,
            splits=tuple(split.name for split in self.plan.dag.splits),
            flops=flops,
            mfu=flops / whole if whole else None,
            devices=devices,
            critical_path=self.path,
        )

    def _device(
        self, mine: DevicePlan, stands_for: tuple[DeviceId, ...], memory: DeviceMemory
    ) -> DeviceTimeline:
        lanes: dict[Stream, list[Box]] = {COMPUTE: []}
        first = self.run.offsets[mine.device]
        for position, instruction in enumerate(mine.instructions):
            lane = lanes.setdefault(instruction.stream, [])
            takes_time = self.run.end[first + position] > self.run.start[first + position]
            if takes_time and (instruction.reads() or instruction.writes()):
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
        described = describe(self.plan, instruction)
        flops, nbytes = 0.0, 0
        if isinstance(instruction, Compute):
            work = self.work[instruction.body]
            flops, nbytes = work.flops, work.nbytes
        elif meeting is not None:
            nbytes = meeting_bytes(meeting)
        else:
            nbytes = self.timing.touched(device, instruction)
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
        )

    def _curve(self, device: DeviceId, memory: DeviceMemory) -> MemoryCurve:
        """Memory after each instruction, at the time at which it is complete; of communication, issued."""
        return curve(memory, [self._when(place) for place in self.run.places(device)])

    def _when(self, place: int) -> float:
        asynchronous = self.run.meeting[place] != NOTHING
        return self.run.start[place] if asynchronous else self.run.end[place]


def curve(memory: DeviceMemory, times: Sequence[float]) -> MemoryCurve:
    """The points at which *memory* changes; instruction i has its effect at ``times[i]``, but never before the instructions before it."""
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

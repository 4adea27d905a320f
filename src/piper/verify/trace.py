"""A plan unfolded once, so that each check is one tight loop over plain lists."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from piper.ids import DeviceId, EventId, NodeId, Slot, Stream, ValueId
from piper.ir.body import TensorSpec
from piper.ir.dag import Dag
from piper.ops.base import CommunicatorId, Instruction, Message, Rendezvous
from piper.plan.model import DevicePlan, Plan
from piper.plan.roles import Roles


@dataclass(frozen=True, slots=True)
class Problem:
    """One violation: the check that found it and a text for people (several lines, monospace)."""

    check: str
    text: str


@dataclass(frozen=True, slots=True)
class Trace:
    """One device's program as parallel lists, indexed by position in issue order.

    ``values`` has the DAG value of each slot, ``state`` the state slots. ``streams`` holds indices
    into ``stream_names``; ``uses`` are ``reads`` and the state slots that these are views of;
    ``waits`` the position of the instruction whose completion is waited for (-1: not a wait).
    """

    device: DeviceId
    instructions: Sequence[Instruction]
    values: Sequence[ValueId]
    state: frozenset[Slot]
    stream_names: list[Stream] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    reads: list[tuple[Slot, ...]] = field(default_factory=list)
    uses: list[tuple[Slot, ...]] = field(default_factory=list)
    writes: list[tuple[Slot, ...]] = field(default_factory=list)
    frees: list[tuple[Slot, ...]] = field(default_factory=list)
    meetings: list[Rendezvous | None] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    recorders: dict[EventId, int] = field(default_factory=dict)


class Messages:
    """The bound shape and type of each DAG value; specs that values share are bound once."""

    def __init__(self, dag: Dag, bindings: Mapping[str, int]) -> None:
        self._dag = dag
        self._bindings = bindings
        self._of_spec: dict[int, Message] = {}
        self._of_values: dict[tuple[ValueId, ...], tuple[Message, ...]] = {}

    def of(self, spec: TensorSpec) -> Message:
        """*spec*, bound; it is remembered by identity."""
        message = self._of_spec.get(id(spec))
        if message is None:
            bound = spec.bound(self._bindings)
            message = Message(tuple(int(d) for d in bound.shape if isinstance(d, int)), bound.dtype)
            self._of_spec[id(spec)] = message
        return message

    def of_values(self, values: tuple[ValueId, ...]) -> tuple[Message, ...]:
        """The messages of several values; remembered, since every member of a communication
        asks.
        """
        messages = self._of_values.get(values)
        if messages is None:
            known = self._dag.values
            messages = tuple(self.of(known[value].spec) for value in values)
            self._of_values[values] = messages
        return messages


@dataclass(frozen=True)
class Subject:
    """The plan under verification and its traces, one per device, in device order. Of a folded
    plan, ``roles`` says which devices others stand for; these have empty traces.
    """

    plan: Plan
    traces: tuple[Trace, ...]
    messages: Messages
    roles: Roles | None = None

    @property
    def dag(self) -> Dag:
        """The training DAG that the plan must implement."""
        return self.plan.dag

    @cached_property
    def present(self) -> frozenset[DeviceId]:
        """The devices that have a program."""
        return frozenset(role[0] for role in self.plan.represented())

    def members(self, meeting: Rendezvous) -> tuple[DeviceId, ...]:
        """The members of a rendezvous that have a program."""
        if self.roles is None:
            return meeting.members
        known = self._members.get(meeting.communicator)
        if known is None:
            known = tuple(d for d in meeting.members if d in self.present)
            self._members[meeting.communicator] = known
        return known

    @cached_property
    def _members(self) -> dict[CommunicatorId, tuple[DeviceId, ...]]:
        return {}

    def at(self, device: int, position: int) -> str:
        """An instruction for people: device, position, text, node."""
        return describe_at(self.plan, self.traces[device].device, position)

    def slot(self, device: int, slot: Slot) -> str:
        """A slot for people: ``%3 (activation 17 of F PP=0)``."""
        return describe_slot(self.plan, self.plan.devices[device], slot)


def describe_at(plan: Plan, device: DeviceId, position: int) -> str:
    """An instruction for people: device, position, text, node."""
    instruction = plan.devices[device].instructions[position]
    return f"device {device} #{position} {describe(plan.dag, instruction)}"


def describe(dag: Dag, instruction: Instruction) -> str:
    """An instruction and its node for people: ``compute %2 = ab12cd(%0) [F PP=0 MB=1]``."""
    label = node_label(dag, instruction.node)
    return f"{instruction.describe()} [{label}]" if label else instruction.describe()


def node_label(dag: Dag, node: NodeId) -> str:
    """The node's label, or an empty string for none."""
    found = dag.nodes.get(node)
    return found.label if found is not None else ""


def describe_slot(plan: Plan, device: DevicePlan, slot: Slot) -> str:
    """A slot for people."""
    if not 0 <= slot < len(device.slots):
        return f"%{slot}"
    info = device.slots[slot]
    return f"%{slot} ({describe_value(plan.dag, info.value)})"


def describe_value(dag: Dag, value: ValueId) -> str:
    """A value for people: role, name, number, producing node."""
    found = dag.values.get(value)
    if found is None:
        return f"unknown value {value}"
    words = f"{found.role.value} {found.name}".strip() + f" v{value}"
    producer = dag.producers.get(value)
    return words if producer is None else f"{words} of {node_label(dag, producer)}"


def directives_about(dag: Dag, nodes: Iterable[NodeId]) -> list[str]:
    """Text of the order directives that constrain any of *nodes* or their data neighbours, in
    directive order.
    """
    mine: set[NodeId] = set()
    for node in nodes:
        if node not in dag.nodes:
            continue
        mine.add(node)
        mine.update(dag.predecessors[node])
        mine.update(dag.successors[node])
    numbers = {e.directive for e in dag.order if e.before in mine and e.after in mine}
    return [
        f"directive {number}: {dag.directives[number]}"
        for number in sorted(numbers)
        if 0 <= number < len(dag.directives)
    ]


def table(header: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "    ") -> str:
    """A plain monospace table."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        indent + "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )

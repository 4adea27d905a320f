"""Whether a plan is one at all: its counts are possible, its parts exist, its instructions' fields fit
together.

What everything that reads plans takes for granted. It does not say that the plan is right, which is
what :func:`piper.verify` proves. Work is linear in the size of the plan.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from piper.ids import DeviceId, EventId, NodeId, Slot
from piper.ir.body import TensorSpec
from piper.ir.check_body import spec_problems
from piper.ir.check_form import binding_problems, dag_problems
from piper.ir.dag import STATE
from piper.limits import MAX_DEVICES, MAX_NUMBER
from piper.ops.base import CommunicatorId, Instruction, Message
from piper.ops.compute import Call, Compute
from piper.ops.load_input import LoadInput
from piper.ops.wait import Wait
from piper.plan.model import DevicePlan, Plan, SlotInfo

_NO_FLAWS = Instruction.flaws


def plan_problems(plan: Plan, allowed: Collection[str] = ()) -> Iterator[str]:
    """What is wrong, each with its place. *allowed* are patterns of operators of other libraries
    that bodies may call (see :func:`piper.ir.operators.refusal`).
    """
    for check in (
        _counts(plan),
        dag_problems(plan.dag, allowed, num_devices=plan.num_devices),
        binding_problems(plan.dag, plan.bindings),
        _lists(plan),
    ):
        found = False
        for text in check:
            found = True
            yield text
        if found:  # each relies on the one before
            return


def program_problems(plan: Plan) -> Iterator[str]:
    """Which numbers in the programs of a plan that has no other problems point at nothing. The
    verifier, which proves more, looks for them by itself.
    """
    named = {info.name: info.members for info in plan.communicators}
    known = {*plan.dag.nodes, NodeId(-1)}
    leaves = {leaf.index for leaf in plan.dag.batch}
    fine: set[Message] = set()
    for device in plan.devices:
        for i, info in enumerate(device.slots):
            for text in _slot_problems(plan, info, fine):
                yield f"device {device.device} slot %{i}: {text}"
        yield from _Program(plan, device, known, leaves, named).problems()


@dataclass(slots=True)
class _Program:
    """The check of one device's instructions: *nodes*, *leaves* and *communicators* are those that
    there are.
    """

    plan: Plan
    device: DevicePlan
    nodes: Collection[NodeId]
    leaves: Collection[int]
    communicators: Mapping[CommunicatorId, tuple[DeviceId, ...]]

    def problems(self) -> Iterator[str]:
        """In issue order."""
        here, slots = self.device, frozenset(map(Slot, range(len(self.device.slots))))
        recorded: set[EventId] = set()
        filled = {Slot(i) for i, info in enumerate(here.slots) if info.role in STATE}
        for i, instruction in enumerate(here.instructions):
            reads, writes, frees = instruction.reads(), instruction.writes(), instruction.frees()
            texts = self._references(instruction)
            if not (filled.issuperset(reads) and filled.issuperset(frees)):
                texts.append(_empty((*reads, *frees), filled))
            if not slots.issuperset(writes):
                texts.append(f"one of slots {writes!r:.80} does not exist; there are {len(slots)}")
            filled.update(writes)
            if frees:
                filled.difference_update(frees)
            if isinstance(instruction, Wait) and instruction.event not in recorded:
                texts.append(f"event e{instruction.event!r:.40} is not recorded before")
            if instruction.record is not None:
                recorded.add(instruction.record)
            for text in texts:
                yield f"device {here.device} #{i} {instruction.op}: {text}"

    def _references(self, instruction: Instruction) -> list[str]:
        texts = []
        if instruction.node not in self.nodes:
            texts.append(f"node {instruction.node!r:.40} is not in the DAG")
        if isinstance(instruction, Compute):
            texts += _compute_problems(self.plan, instruction)
        elif isinstance(instruction, LoadInput) and instruction.leaf not in self.leaves:
            texts.append(f"batch leaf {instruction.leaf!r:.40} does not exist")
        for name, _ in instruction.updates():
            if name not in self.plan.dag.parameters:
                texts.append(f"there is no parameter {name!r:.80}")
        meeting = instruction.rendezvous()
        if meeting is not None and self.communicators.get(meeting.communicator) != meeting.members:
            texts.append(
                f"communicator {meeting.communicator!r:.80} is not listed with these members"
            )
        return texts


def _compute_problems(plan: Plan, instruction: Compute) -> Iterator[str]:
    node = plan.dag.nodes.get(instruction.node)
    if node is None or not isinstance(node.work, Call):
        yield f"node {instruction.node!r:.40} calls no body"
    elif node.work.body != instruction.body:
        yield f"body {instruction.body!r:.40} is not that of its node"
    elif (len(instruction.inputs), len(instruction.outputs)) != (
        len(node.inputs),
        len(node.outputs),
    ):
        yield f"its node has {len(node.inputs)} inputs and {len(node.outputs)} outputs"


def _slot_problems(plan: Plan, info: SlotInfo, fine: set[Message]) -> Iterator[str]:
    value = plan.dag.values.get(info.value)
    if value is None:
        yield f"there is no value {info.value!r:.40}"
    elif (value.role, value.name) != (info.role, info.name):
        yield f"it says {info.role} {info.name!r:.80}, its value is {value.role} {value.name!r:.80}"
    if info.experts is not None and not info.message.shape:
        yield "a number has no parts of experts"
    if info.message not in fine:
        texts = list(spec_problems(TensorSpec(info.message.shape, info.message.dtype), ()))
        yield from texts
        if not texts:
            fine.add(info.message)


def _empty(used: Sequence[Slot], filled: set[Slot]) -> str:
    slot = next(slot for slot in used if slot not in filled)
    return f"slot %{slot!r:.40} holds nothing yet"


def _counts(plan: Plan) -> Iterator[str]:
    for name, most in (
        ("num_devices", MAX_DEVICES),
        ("microbatch_size", MAX_NUMBER),
        ("num_microbatches", MAX_NUMBER),
        ("num_replicas", MAX_DEVICES),
    ):
        if not 1 <= (count := getattr(plan, name)) <= most:
            yield f"{name}: expected a number from 1 to {most}, found {count!r:.40}"
    if not math.isfinite(plan.seed_value):
        yield f"seed_value: expected a finite number, found {plan.seed_value}"
    for name, size in plan.bindings.items():
        if not (name.isascii() and name.isidentifier()):
            yield f"bindings: {name!r:.40} is not the name of a symbol"
        if not 0 <= size <= MAX_NUMBER:
            yield f"bindings: expected a size for {name}, found {size!r:.40}"
    numbers = [device.device for device in plan.devices]
    if numbers != list(range(len(numbers))) or len(numbers) != plan.num_devices:
        yield f"expected device plans 0 to {plan.num_devices - 1} in order, found {str(numbers)[:80]}"


def _lists(plan: Plan) -> Iterator[str]:
    """Communicators, roles, programs."""
    for info in plan.communicators:
        members = info.members
        if members and not 0 <= min(members) <= max(members) < plan.num_devices:
            outside = [m for m in members if not 0 <= m < plan.num_devices]
            yield f"communicator {info.name!r:.80} has members {outside!r:.80} outside 0…{plan.num_devices - 1}"
    named = [device for role in plan.roles for device in role]
    if named and (len(named) != plan.num_devices or set(named) != set(range(plan.num_devices))):
        yield f"roles: expected each of {plan.num_devices} devices once, found {str(named)[:80]}"
    if not all(plan.roles):
        yield "roles: a role has no devices"
    for device in plan.devices:
        yield from _program(device)


def _program(device: DevicePlan) -> Iterator[str]:
    size = len(device.slots)
    asked = {
        cls: cls.flaws is not _NO_FLAWS for cls in {type(each) for each in device.instructions}
    }
    if any(asked.values()):
        for i, instruction in enumerate(device.instructions):
            if asked[type(instruction)]:
                for text in instruction.flaws():
                    yield f"device {device.device} #{i} {instruction.op}: {text}"
    for i, info in enumerate(device.slots):
        for name in ("shard", "experts"):
            part = getattr(info, name)
            if part is not None and not 0 <= part[0] < part[1]:
                yield f"device {device.device} slot %{i} of {size}: {name} {part!r:.80} is no part of so many"

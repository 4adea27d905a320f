"""Whether a plan is one at all: its counts are possible, its parts exist, its instructions' fields fit
together.

What everything that reads plans takes for granted. It does not say that the plan is right, which is
what :func:`piper.verify` proves. Work is linear in the size of the plan.
"""

import math
from collections.abc import Collection, Iterator

from piper.ids import EventId, NodeId, Slot
from piper.ir.body import TensorSpec
from piper.ir.check_body import spec_problems
from piper.ir.check_form import binding_problems, dag_problems
from piper.ir.dag import STATE
from piper.limits import MAX_DEVICES, MAX_NUMBER
from piper.ops.base import Instruction
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
    for device in plan.devices:
        for i, info in enumerate(device.slots):
            for text in _slot_problems(plan, info):
                yield f"device {device.device} slot %{i}: {text}"
        recorded: set[EventId] = set()
        filled = {Slot(i) for i, info in enumerate(device.slots) if info.role in STATE}
        for i, instruction in enumerate(device.instructions):
            texts = [*_slots_used(instruction, filled, len(device.slots))]
            if instruction.node not in known:
                texts.append(f"node {instruction.node!r:.40} is not in the DAG")
            if isinstance(instruction, Compute):
                texts += _compute_problems(plan, instruction)
            elif isinstance(instruction, LoadInput) and instruction.leaf not in leaves:
                texts.append(f"batch leaf {instruction.leaf!r:.40} does not exist")
            texts += (
                f"there is no parameter {name!r:.80}"
                for name, _ in instruction.updates()
                if name not in plan.dag.parameters
            )
            meeting = instruction.rendezvous()
            if meeting is not None and named.get(meeting.communicator) != meeting.members:
                texts.append(
                    f"communicator {meeting.communicator!r:.80} is not listed with these members"
                )
            if isinstance(instruction, Wait) and instruction.event not in recorded:
                texts.append(f"event e{instruction.event!r:.40} is not recorded before")
            if instruction.record is not None:
                recorded.add(instruction.record)
            for text in texts:
                yield f"device {device.device} #{i} {instruction.op}: {text}"


def _compute_problems(plan: Plan, instruction: Compute) -> Iterator[str]:
    node = plan.dag.nodes.get(instruction.node)
    if node is None or not isinstance(node.work, Call):
        yield f"node {instruction.node!r:.40} calls no body"
    elif node.work.body != instruction.body:
        yield f"body {instruction.body!r:.40} is not that of its node"


def _slot_problems(plan: Plan, info: SlotInfo) -> Iterator[str]:
    value = plan.dag.values.get(info.value)
    if value is None:
        yield f"there is no value {info.value!r:.40}"
    elif (value.role, value.name) != (info.role, info.name):
        yield f"it says {info.role} {info.name!r:.80}, its value is {value.role} {value.name!r:.80}"
    if info.experts is not None and not info.message.shape:
        yield "a number has no parts of experts"
    yield from spec_problems(TensorSpec(info.message.shape, info.message.dtype), ())


def _slots_used(instruction: Instruction, filled: set[Slot], size: int) -> Iterator[str]:
    """*filled* are the slots that hold a value before the instruction, and then after it."""
    for slot in (*instruction.reads(), *instruction.frees()):
        if slot not in filled:
            yield f"slot %{slot!r:.40} of {size} holds nothing yet"
    for slot in instruction.writes():
        if not 0 <= slot < size:
            yield f"slot %{slot!r:.40} does not exist; the device has {size} slots"
    filled.update(instruction.writes())
    filled.difference_update(instruction.frees())


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

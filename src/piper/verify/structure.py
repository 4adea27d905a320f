"""Every number in a plan points at something that exists: devices, slots, streams, communicators,
nodes, values.

Other checks rely on it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, islice

from piper.ids import Slot, Stream
from piper.ir.dag import STATE, LossKind, Role, Value
from piper.ir.symbols import evaluate
from piper.ops.base import CommunicatorId, Rendezvous
from piper.plan.check import plan_problems
from piper.plan.model import CommunicatorInfo, DevicePlan, Plan
from piper.plan.roles import Roles, find_roles
from piper.verify.aliases import find_aliases, find_views
from piper.verify.trace import Messages, Problem, Subject, Trace, node_label

CHECK = "structure"

_MOST = 20  # problems that are looked for in what does not even fit together


def check_structure(plan: Plan, allowed: Collection[str] = ()) -> tuple[Subject, list[Problem]]:
    """Unfold *plan*. The subject may be used only if there is no problem. *allowed* are patterns of
    operators of other libraries that bodies may call.
    """
    messages = Messages(plan.dag, plan.bindings)
    form = islice(plan_problems(plan, allowed), _MOST)
    problems = [Problem(CHECK, text) for text in form]
    if problems:
        return Subject(plan, (), messages), problems
    problems = [Problem(CHECK, text) for text in _header(plan)]
    if problems:
        return Subject(plan, (), messages), problems
    communicators = {info.name: info for info in plan.communicators}
    roles = find_roles(plan.dag, plan.num_devices) if plan.roles else None
    if roles is not None and (problems := [Problem(CHECK, text) for text in _roles(plan, roles)]):
        return Subject(plan, (), messages), problems
    problems += (Problem(CHECK, text) for text in _communicators(plan))
    traces = []
    views = find_views(plan.dag.bodies)
    for device in plan.devices:
        problems += (Problem(CHECK, text) for text in _slots(plan, device, messages))
        trace = Trace(
            device.device,
            device.instructions,
            [info.value for info in device.slots],
            frozenset(Slot(i) for i, s in enumerate(device.slots) if s.role in STATE),
        )
        _unfold(trace)
        problems += (Problem(CHECK, text) for text in _instructions(plan, trace, communicators))
        find_aliases(trace, views)
        traces.append(trace)
    return Subject(plan, tuple(traces), messages, roles), problems


def _header(plan: Plan) -> Iterator[str]:
    dag = plan.dag
    if plan.num_microbatches != dag.num_microbatches:
        yield (
            f"the plan runs {plan.num_microbatches} microbatches per replica, "
            f"its DAG has {dag.num_microbatches}"
        )
    if plan.num_replicas != dag.num_replicas:
        yield f"the plan has {plan.num_replicas} replicas, its DAG {dag.num_replicas}"
    pieces = plan.num_microbatches * plan.num_replicas
    expected = 1.0 if dag.loss_kind is LossKind.WEIGHTED else 1.0 / pieces
    if plan.seed_value != expected:
        yield (
            f"the gradient of the step's loss with respect to one of {pieces} microbatch losses "
            f"({dag.loss_kind.value}) is {expected}, the plan says {plan.seed_value}"
        )
    symbol = dag.batch_symbol
    if symbol is not None and plan.bindings.get(symbol) != plan.microbatch_size:
        yield (
            f"symbol {symbol} is bound to {plan.bindings.get(symbol)}, "
            f"a microbatch has {plan.microbatch_size} rows"
        )
        return
    for guard in dag.guards:
        if not evaluate(guard, plan.bindings):
            yield f"the capture holds only under {guard}, which {dict(plan.bindings)} does not meet"


def _roles(plan: Plan, roles: Roles) -> Iterator[str]:
    """The roles are those that the DAG's symmetries give, and only their first devices have a
    program.
    """
    if plan.roles != roles.roles:
        differing = [role for role in plan.roles if role not in roles.roles]
        yield (
            f"the plan is folded into {len(plan.roles)} roles, the symmetries of its DAG give {len(roles.roles)}; "
            f"not among them: {[list(role[:6]) for role in differing[:3]]}"
        )
        return
    first = {role[0] for role in plan.roles}
    for mine in plan.devices:
        if mine.device not in first and (mine.instructions or mine.slots):
            yield f"device {mine.device} has a program, though device {roles.first(mine.device)} stands for it"


def _communicators(plan: Plan) -> Iterator[str]:
    names: set[CommunicatorId] = set()
    for info in plan.communicators:
        if info.name in names:
            yield f"communicator {info.name!r} is listed twice"
        names.add(info.name)
        members = info.members
        if len(set(members)) != len(members) or len(members) < 2:
            yield f"communicator {info.name!r} needs two or more different members, has {members}"
        if outside := [m for m in members if not 0 <= m < plan.num_devices]:
            yield f"communicator {info.name!r} has members {outside} outside 0…{plan.num_devices - 1}"


def _slots(plan: Plan, device: DevicePlan, messages: Messages) -> Iterator[str]:
    values = plan.dag.values
    used: dict[int, int] = {}
    for i, info in enumerate(device.slots):
        here = f"device {device.device} slot %{i}"
        value = values.get(info.value)
        if value is None:
            yield f"{here} holds value {info.value}, which the DAG does not have"
            continue
        if value.role is not info.role or value.name != info.name:
            yield (
                f"{here} says {info.role.value} {info.name!r}, "
                f"value {info.value} of the DAG is {value.role.value} {value.name!r}"
            )
        if info.message != (bound := messages.of(value.spec)):
            yield f"{here} says {info.message}, value {info.value} of the DAG has {bound}"
        if (other := used.setdefault(info.value, i)) != i:
            yield f"{here} and slot %{other} both hold value {info.value}"
        if value.role is Role.PARAMETER and value.name not in plan.dag.parameters:
            yield f"{here} holds parameter {value.name!r}, which the DAG does not list"
        if info.shard != (expected := _shard(plan, device, value)):
            yield f"{here} holds slice {info.shard}, expected {expected} (index, count)"
        part = None
        if value.role in (Role.PARAMETER, Role.SHARD):
            part = plan.dag.expert_part(value.name, device.device)
        if info.experts != part:
            yield f"{here} holds part {info.experts} of the experts, expected {part} (index, count)"
        if value.role is Role.BUFFER and value.name not in plan.dag.buffers:
            yield f"{here} holds buffer {value.name!r}, which the DAG does not list"


def _shard(plan: Plan, device: DevicePlan, value: Value) -> tuple[int, int] | None:
    """Which slice of a sharded parameter this device holds."""
    if value.role is not Role.SHARD:
        return None
    for group in plan.dag.shards.get(value.name, ()):
        if device.device in group:
            return group.index(device.device), len(group)
    return None


def _unfold(trace: Trace) -> None:
    """Fill the trace's lists."""
    instructions = trace.instructions
    numbers: dict[Stream, int] = {}
    trace.streams.extend([numbers.setdefault(x.stream, len(numbers)) for x in instructions])
    trace.stream_names.extend(numbers)
    trace.reads.extend([x.reads() for x in instructions])
    trace.writes.extend([x.writes() for x in instructions])
    trace.frees.extend([x.frees() for x in instructions])
    trace.meetings.extend([x.rendezvous() for x in instructions])
    recorders, waits = trace.recorders, trace.waits
    for i, instruction in enumerate(instructions):
        if (event := instruction.awaits()) is not None:
            waits.append(recorders.get(event, -1))
            continue
        waits.append(-1)
        if instruction.record is not None:
            recorders.setdefault(instruction.record, i)


def _instructions(
    plan: Plan, trace: Trace, communicators: Mapping[CommunicatorId, CommunicatorInfo]
) -> Iterator[str]:
    """What is out of range or malformed in single instructions."""
    bad: dict[int, list[str]] = {}
    for i, text in chain(_slot_use(trace), _references(plan, trace)):
        bad.setdefault(i, []).append(text)
    for i, meeting in enumerate(trace.meetings):
        if meeting is not None and (texts := _meeting(trace.device, meeting, communicators)):
            bad.setdefault(i, []).extend(texts)
    for i in sorted(bad):
        # Not the instruction's own text: its fields may not fit together.
        instruction = trace.instructions[i]
        here = f"device {trace.device} #{i} {instruction.op}"
        if label := node_label(plan.dag, instruction.node):
            here += f" [{label}]"
        yield from (f"{here}: {text}" for text in bad[i])


def _slot_use(trace: Trace) -> Iterator[tuple[int, str]]:
    """Slots that do not exist or that one instruction changes twice."""
    size = len(trace.values)
    columns = (("read", trace.reads), ("written", trace.writes), ("freed", trace.frees))
    for done, column in columns:
        if set(map(type, chain.from_iterable(column))) - {int}:
            yield from _no_numbers(column)
            continue
        used: set[Slot] = set().union(*column)
        if used and (min(used) < 0 or max(used) >= size):
            for i, slots in enumerate(column):
                for slot in slots:
                    if not 0 <= slot < size:
                        yield i, f"slot %{slot} does not exist; the device has {size} slots"
        if done == "read":
            continue
        for i, slots in enumerate(column):
            if len(slots) > 1 and len(set(slots)) != len(slots):
                yield i, f"a slot is {done} twice by one instruction"


def _no_numbers(column: Sequence[tuple[Slot, ...]]) -> Iterator[tuple[int, str]]:
    """Slots of a plan that was made in Python that are no integers: such a one may equal one."""
    for i, slots in enumerate(column):
        yield from (
            (i, f"slot {slot!r:.40} is no whole number") for slot in slots if type(slot) is not int
        )


def _references(plan: Plan, trace: Trace) -> Iterator[tuple[int, str]]:
    """Nodes that do not exist, streams without a name, fields that do not fit together."""
    nodes = plan.dag.nodes
    for i, instruction in enumerate(trace.instructions):
        if instruction.node not in nodes and instruction.node != -1:
            yield i, f"node {instruction.node} is not in the DAG"
        if not instruction.stream:
            yield i, "the stream has no name"


def _meeting(
    device: int,
    meeting: Rendezvous,
    communicators: Mapping[CommunicatorId, CommunicatorInfo],
) -> Sequence[str]:
    info = communicators.get(meeting.communicator)
    if info is None:
        return [f"communicator {meeting.communicator!r} is not listed in the plan"]
    if info.members != meeting.members:
        found = f"the instruction says {meeting.members}"
        return [f"communicator {info.name!r} has members {info.members}, {found}"]
    if device not in info.members:
        return [f"device {device} is not a member of communicator {info.name!r} {info.members}"]
    end = {"send": 0, "receive": 1}.get(meeting.role)
    if end is None:
        return []
    if len(info.members) != 2:
        return [f"a message needs a communicator of two, {info.name!r} has {len(info.members)}"]
    if info.members[end] != device:
        return [
            f"communicator {info.name!r} goes {info.members}: device {device} cannot {meeting.role}"
        ]
    return []

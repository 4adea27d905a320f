"""Random damage to plans: what a wrong planner, or a wrong edit of a plan file, would produce."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from msgspec.structs import fields as struct_fields
from msgspec.structs import replace as replace_struct

from piper.ids import EventId, NodeId, Slot, Stream
from piper.ops.accumulate import Accumulate
from piper.ops.all_reduce import AllReduceBucket
from piper.ops.base import Instruction, Message, ReduceOp
from piper.ops.free import Free
from piper.ops.grad_norm import Norm
from piper.ops.update import OptimizerStep
from piper.ops.wait import Wait
from piper.plan.model import Plan

Program = list[Instruction]

SLOT_FIELDS = frozenset({"slot", "buffer", "value", "scale", "grad_norm", "part", "result"})
SLOTS_FIELDS = frozenset(
    {
        "inputs",
        "outputs",
        "slots",
        "totals",
        "left",
        "right",
        "gradients",
        "parameters",
        "parts",
        "kept",
        "moved",
    }
)


@dataclass(frozen=True)
class Mutation:
    """A damaged plan, and what was done to it."""

    kind: str
    text: str
    plan: Plan


class Mutator:
    """Makes mutations of one plan, reproducibly."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan = plan
        self.random = random.Random(seed)

    def mutate(self) -> Mutation:
        """One random mutation that changes the plan."""
        while True:
            name = self.random.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
            mutation = KINDS[name][1](self)
            if mutation is None:
                continue
            text, plan = mutation
            if plan.devices != self.plan.devices or plan != self.plan:
                return Mutation(name, text, plan)

    # Pieces.

    def device(self) -> int:
        return self.random.randrange(self.plan.num_devices)

    def position(self, device: int, kind: type[Instruction] | None = None) -> int | None:
        program = self.plan.devices[device].instructions
        found = [i for i, x in enumerate(program) if kind is None or isinstance(x, kind)]
        return self.random.choice(found) if found else None

    def where(self, test: Callable[[Instruction], bool]) -> tuple[int, int] | None:
        """A random instruction, of any device, for which *test* holds."""
        found = [
            (d.device, i)
            for d in self.plan.devices
            for i, x in enumerate(d.instructions)
            if test(x)
        ]
        return self.random.choice(found) if found else None

    def at(self, place: tuple[int, int]) -> Instruction:
        return self.plan.devices[place[0]].instructions[place[1]]

    def text(self, place: tuple[int, int]) -> str:
        return f"device {place[0]} #{place[1]} {self.at(place).describe()}"

    def with_program(self, device: int, change: Callable[[Program], Sequence[Instruction]]) -> Plan:
        devices = list(self.plan.devices)
        program = tuple(change(list(devices[device].instructions)))
        devices[device] = replace_struct(devices[device], instructions=program)
        return replace(self.plan, devices=tuple(devices))

    def with_field(self, place: tuple[int, int], **fields: object) -> tuple[str, Plan]:
        def change(program: Program) -> Program:
            program[place[1]] = replace_struct(program[place[1]], **fields)
            return program

        return f"{self.text(place)}: {fields}", self.with_program(place[0], change)


Result = tuple[str, Plan] | None


def _drop(m: Mutator) -> Result:
    place = m.where(lambda _: True)
    text = m.text(place)
    return text, m.with_program(place[0], lambda p: p[: place[1]] + p[place[1] + 1 :])


def _drop_wait(m: Mutator) -> Result:
    place = m.where(lambda x: isinstance(x, Wait))
    if place is None:
        return None
    return m.text(place), m.with_program(place[0], lambda p: p[: place[1]] + p[place[1] + 1 :])


def _duplicate(m: Mutator) -> Result:
    place = m.where(lambda _: True)
    to = m.random.choice([place[1], m.position(place[0])])
    return (
        f"{m.text(place)} at {to}",
        m.with_program(place[0], lambda p: [*p[:to], p[place[1]], *p[to:]]),
    )


def _swap(m: Mutator, one: int, two: int, device: int) -> Result:
    def change(program: Program) -> Program:
        program[one], program[two] = program[two], program[one]
        return program

    return f"{m.text((device, one))} ⇄ {m.text((device, two))}", m.with_program(device, change)


def _swap_neighbours(m: Mutator) -> Result:
    device = m.device()
    one = m.random.randrange(len(m.plan.devices[device].instructions) - 1)
    return _swap(m, one, one + 1, device)


def _swap_distant(m: Mutator) -> Result:
    device = m.device()
    return _swap(m, m.position(device), m.position(device), device)


def _swap_same_kind(m: Mutator) -> Result:
    place = m.where(lambda _: True)
    other = m.position(place[0], type(m.at(place)))
    return _swap(m, place[1], other, place[0])


def _move(m: Mutator) -> Result:
    place = m.where(lambda _: True)
    to = m.position(place[0])

    def change(program: Program) -> Program:
        program.insert(to, program.pop(place[1]))
        return program

    return f"{m.text(place)} to {to}", m.with_program(place[0], change)


def _move_near(m: Mutator) -> Result:
    place = m.where(lambda _: True)
    size = len(m.plan.devices[place[0]].instructions)
    to = min(max(place[1] + m.random.choice([-4, -3, -2, 2, 3, 4]), 0), size - 1)

    def change(program: Program) -> Program:
        program.insert(to, program.pop(place[1]))
        return program

    return f"{m.text(place)} to {to}", m.with_program(place[0], change)


def _other_slot(m: Mutator) -> Result:
    def has_slots(x: Instruction) -> bool:
        return any(
            f.name in SLOT_FIELDS | SLOTS_FIELDS and getattr(x, f.name) not in ((), None)
            for f in struct_fields(type(x))
        )

    place = m.where(has_slots)
    instruction = m.at(place)
    size = len(m.plan.devices[place[0]].slots)
    names = [
        f.name
        for f in struct_fields(type(instruction))
        if f.name in SLOT_FIELDS | SLOTS_FIELDS and getattr(instruction, f.name) not in ((), None)
    ]
    name = m.random.choice(names)
    slot = Slot(m.random.randrange(size))
    if name in SLOT_FIELDS:
        return m.with_field(place, **{name: slot})
    slots = list(getattr(instruction, name))
    slots[m.random.randrange(len(slots))] = slot
    return m.with_field(place, **{name: tuple(slots)})


def _permute_slots(m: Mutator) -> Result:
    place = m.where(lambda x: any(len(getattr(x, n, ())) > 1 for n in SLOTS_FIELDS))
    if place is None:
        return None
    names = [n for n in sorted(SLOTS_FIELDS) if len(getattr(m.at(place), n, ())) > 1]
    name = m.random.choice(names)
    slots = list(getattr(m.at(place), name))
    m.random.shuffle(slots)
    return m.with_field(place, **{name: tuple(slots)})


def _free_less(m: Mutator) -> Result:
    place = m.where(lambda x: isinstance(x, Free))
    if place is None:
        return None
    return m.with_field(place, slots=m.at(place).frees()[:-1])


def _free_more(m: Mutator) -> Result:
    place = m.where(lambda x: isinstance(x, Free))
    if place is None:
        return None
    size = len(m.plan.devices[place[0]].slots)
    slot = Slot(m.random.randrange(size))
    return m.with_field(place, slots=(*m.at(place).frees(), slot))


def _other_event(m: Mutator) -> Result:
    place = m.where(lambda x: isinstance(x, Wait))
    if place is None:
        return None
    events = [x.record for x in m.plan.devices[place[0]].instructions if x.record is not None]
    return m.with_field(place, event=m.random.choice(events))


def _other_record(m: Mutator) -> Result:
    place = m.where(lambda x: x.record is not None)
    if place is None:
        return None
    events = [x.record for x in m.plan.devices[place[0]].instructions if x.record is not None]
    return m.with_field(place, record=m.random.choice([None, *events]))


def _move_record(m: Mutator) -> Result:
    """An event is recorded by a neighbour instead."""
    place = m.where(lambda x: x.record is not None)
    if place is None:
        return None
    device, i = place
    program = m.plan.devices[device].instructions
    j = i + m.random.choice([-2, -1, 1, 2])
    if not 0 <= j < len(program) or isinstance(program[j], Wait) or program[j].record is not None:
        return None

    def change(p: Program) -> Program:
        p[j] = replace_struct(p[j], record=p[i].record)
        p[i] = replace_struct(p[i], record=None)
        return p

    return f"{m.text(place)}: recorded by #{j}", m.with_program(device, change)


def _other_stream(m: Mutator) -> Result:
    place = m.where(lambda _: True)
    streams = sorted({x.stream for x in m.plan.devices[place[0]].instructions})
    return m.with_field(place, stream=m.random.choice([*streams, Stream("new")]))


def _other_communicator(m: Mutator) -> Result:
    place = m.where(lambda x: hasattr(x, "communicator"))
    if place is None:
        return None
    return m.with_field(place, communicator=m.random.choice(m.plan.communicators).name)


def _other_peer(m: Mutator) -> Result:
    """A whole communicator, with its members, for another."""
    place = m.where(lambda x: hasattr(x, "communicator"))
    if place is None:
        return None
    info = m.random.choice(m.plan.communicators)
    instruction = m.at(place)
    if hasattr(instruction, "members"):
        return m.with_field(place, communicator=info.name, members=info.members)
    sender, receiver = info.members[:2]
    return m.with_field(place, communicator=info.name, sender=sender, receiver=receiver)


def _other_microbatch(m: Mutator) -> Result:
    place = m.where(lambda x: hasattr(x, "microbatch"))
    count = m.plan.num_microbatches * m.plan.num_replicas
    return m.with_field(place, microbatch=m.random.randrange(-1, count + 1))


def _other_body(m: Mutator) -> Result:
    place = m.where(lambda x: hasattr(x, "body"))
    return m.with_field(place, body=m.random.choice(sorted(m.plan.dag.bodies)))


def _other_leaf(m: Mutator) -> Result:
    place = m.where(lambda x: hasattr(x, "leaf"))
    return m.with_field(place, leaf=m.random.randrange(len(m.plan.dag.batch)))


def _other_node(m: Mutator) -> Result:
    place = m.where(lambda x: x.node != -1)
    return m.with_field(place, node=NodeId(m.random.choice([-1, *m.plan.dag.nodes])))


def _other_names(m: Mutator) -> Result:
    place = m.where(lambda x: hasattr(x, "names"))
    names = [m.random.choice(sorted(m.plan.dag.parameters)) for _ in m.at(place).names]
    return m.with_field(place, names=tuple(names))


def _other_report(m: Mutator) -> Result:
    place = m.where(lambda x: hasattr(x, "name"))
    return m.with_field(place, name=m.random.choice(["loss", "weight", "grad_norm", "b"]))


def _no_scale(m: Mutator) -> Result:
    place = m.where(lambda x: getattr(x, "scale", None) is not None)
    return None if place is None else m.with_field(place, scale=None)


def _average(m: Mutator) -> Result:
    place = m.where(lambda x: hasattr(x, "average"))
    if place is None:
        return None
    return m.with_field(place, average=not m.at(place).average)


def _other_norm(m: Mutator) -> Result:
    """Another norm, another bound, another way to combine, or a report of something else."""
    place = m.where(lambda x: hasattr(x, "norm") or hasattr(x, "max_norm") or hasattr(x, "reduce"))
    if place is None:
        return None
    match m.at(place):
        case OptimizerStep():
            return m.with_field(place, max_norm=m.random.choice([None, 0.5, 2.0]))
        case AllReduceBucket():
            return m.with_field(place, reduce=m.random.choice(list(ReduceOp)))
        case _:
            return m.with_field(place, norm=m.random.choice(list(Norm)))


def _other_message(m: Mutator) -> Result:
    place = m.where(lambda x: hasattr(x, "message"))
    if place is None:
        return None
    return m.with_field(place, message=Message((2, 3), "float64"))


def _other_end(m: Mutator) -> Result:
    """Both ends of one message carry another value of their device: consistent, but wrong."""
    place = m.where(lambda x: hasattr(x, "slot") and hasattr(x, "sender"))
    if place is None:
        return None
    slot = Slot(m.random.randrange(len(m.plan.devices[place[0]].slots)))
    return m.with_field(place, slot=slot)


def _transfer(m: Mutator) -> Result:
    """A message vanishes or comes twice on both sides."""
    place = m.where(lambda x: hasattr(x, "sender"))
    if place is None:
        return None
    node, twice = m.at(place).node, m.random.random() < 0.5
    devices = []
    for device in m.plan.devices:
        program: Program = []
        for x in device.instructions:
            mine = hasattr(x, "sender") and x.node == node
            program += [x] * ((2 if twice else 0) if mine else 1)
        devices.append(replace_struct(device, instructions=tuple(program)))
    return f"{m.text(place)}: {'twice' if twice else 'gone'}", replace(
        m.plan, devices=tuple(devices)
    )


def _swap_transfers(m: Mutator) -> Result:
    """Two messages of one communicator in the other order, on both sides: may be harmless."""
    place = m.where(lambda x: hasattr(x, "sender"))
    if place is None:
        return None
    communicator = m.at(place).communicator
    nodes = sorted(
        {
            x.node
            for d in m.plan.devices
            for x in d.instructions
            if getattr(x, "communicator", None) == communicator
        }
    )
    if len(nodes) < 2:
        return None
    one, two = m.random.sample(nodes, 2)
    devices = []
    for device in m.plan.devices:
        program = list(device.instructions)
        at = [i for i, x in enumerate(program) if hasattr(x, "sender") and x.node in (one, two)]
        if len(at) == 2:
            program[at[0]], program[at[1]] = program[at[1]], program[at[0]]
        devices.append(replace_struct(device, instructions=tuple(program)))
    return f"{communicator}: messages {one} ⇄ {two}", replace(m.plan, devices=tuple(devices))


def _collective(m: Mutator) -> Result:
    """A collective vanishes or comes twice on all its members."""
    place = m.where(lambda x: hasattr(x, "members"))
    if place is None:
        return None
    one, times = m.at(place), m.random.choice([0, 2])
    devices = []
    for device in m.plan.devices:
        program: Program = []
        for x in device.instructions:
            mine = x.node == one.node and getattr(x, "members", None) == one.members
            program += [x] * (times if mine else 1)
        devices.append(replace_struct(device, instructions=tuple(program)))
    text = f"{m.text(place)}: {'twice' if times else 'gone'}"
    return text, replace(m.plan, devices=tuple(devices))


def _swap_collectives(m: Mutator) -> Result:
    """Two collectives of one group in the other order, on all its members: may be harmless."""
    place = m.where(lambda x: hasattr(x, "members"))
    if place is None:
        return None
    one = m.at(place)
    others = [
        x
        for x in m.plan.devices[place[0]].instructions
        if getattr(x, "members", None) == one.members and x.node != one.node
    ]
    if not others:
        return None
    other = m.random.choice(others)
    devices = []
    for device in m.plan.devices:
        program = list(device.instructions)
        at = [
            i
            for i, x in enumerate(program)
            if getattr(x, "members", None) == one.members and x.node in (one.node, other.node)
        ]
        if len(at) == 2:
            program[at[0]], program[at[1]] = program[at[1]], program[at[0]]
        devices.append(replace_struct(device, instructions=tuple(program)))
    return f"{m.text(place)} ⇄ {other.describe()}", replace(m.plan, devices=tuple(devices))


def _add_in_place(m: Mutator) -> Result:
    """A contribution is added to in place that was not, its slot emptied by that; or the other way
    round.
    """
    place = m.where(lambda x: isinstance(x, Accumulate) and x.totals != x.left)
    if place is None:
        return None
    device, i = place
    add = m.at(place)
    first = [a for t, a in zip(add.totals, add.left, strict=True) if t != a]
    slot = m.random.choice(first)
    moves = slot not in add.moved

    def change(program: Program) -> Program:
        kept = tuple(s for s in add.moved if s != slot)
        moved = (*kept, slot) if moves else kept
        program[i] = replace_struct(add, moved=moved)
        frees = [j for j, x in enumerate(program) if isinstance(x, Free) and slot in x.slots]
        for j in frees if moves else ():
            left = tuple(s for s in program[j].slots if s != slot)
            program[j] = replace_struct(program[j], slots=left)
        if not moves:
            program.insert(i + 1, Free(node=NodeId(-1), stream=add.stream, slots=(slot,)))
        return program

    return f"{m.text(place)}: {'moves' if moves else 'keeps'} {slot}", m.with_program(
        device, change
    )


def _other_slice(m: Mutator) -> Result:
    """A device holds another slice of a parameter."""
    found = [
        (device.device, i)
        for device in m.plan.devices
        for i, info in enumerate(device.slots)
        if info.shard is not None
    ]
    if not found:
        return None
    number, slot = m.random.choice(found)
    devices = list(m.plan.devices)
    slots = list(devices[number].slots)
    _, count = slots[slot].shard
    shard = m.random.choice([None, *((i, count) for i in range(count)), (0, count + 1)])
    slots[slot] = replace_struct(slots[slot], shard=shard)
    devices[number] = replace_struct(devices[number], slots=tuple(slots))
    return f"device {number} slot {slot} is slice {shard}", replace(m.plan, devices=tuple(devices))


def _other_device(m: Mutator) -> Result:
    """One device's instruction runs on another as well."""
    place = m.where(lambda _: True)
    to = m.device()
    at = m.position(to)
    return f"{m.text(place)} on device {to}", m.with_program(
        to, lambda p: [*p[:at], m.at(place), *p[at:]]
    )


def _swap_programs(m: Mutator) -> Result:
    if m.plan.num_devices < 2:
        return None
    one, two = m.random.sample(range(m.plan.num_devices), 2)
    devices = list(m.plan.devices)
    first, second = devices[one], devices[two]
    devices[one] = replace_struct(first, instructions=second.instructions, slots=second.slots)
    devices[two] = replace_struct(second, instructions=first.instructions, slots=first.slots)
    return f"programs {one} ⇄ {two}", replace(m.plan, devices=tuple(devices))


def _slot_table(m: Mutator) -> Result:
    device = m.device()
    slots = list(m.plan.devices[device].slots)
    one, two = m.random.randrange(len(slots)), m.random.randrange(len(slots))
    if m.random.random() < 0.5:
        slots[one] = replace_struct(slots[one], value=slots[two].value)
        text = f"device {device} slot {one} holds the value of {two}"
    else:
        slots[one], slots[two] = slots[two], slots[one]
        text = f"device {device} slots {one} ⇄ {two}"
    devices = list(m.plan.devices)
    devices[device] = replace_struct(devices[device], slots=tuple(slots))
    return text, replace(m.plan, devices=tuple(devices))


def _header(m: Mutator) -> Result:
    seed = m.random.choice([1.0, 0.5, m.plan.seed_value * 2])
    return f"seed {seed}", replace(m.plan, seed_value=seed)


def _add_wait(m: Mutator) -> Result:
    """One wait more: needless, or a deadlock."""
    device = m.device()
    program = m.plan.devices[device].instructions
    events = [x.record for x in program if x.record is not None]
    if not events:
        return None
    streams = sorted({x.stream for x in program})
    wait = Wait(
        node=NodeId(-1), stream=m.random.choice(streams), event=EventId(m.random.choice(events))
    )
    at = m.position(device)
    return f"device {device} {wait.describe()} of {wait.stream} at {at}", m.with_program(
        device, lambda p: [*p[:at], wait, *p[at:]]
    )


KINDS: dict[str, tuple[int, Callable[[Mutator], Result]]] = {
    "drop": (6, _drop),
    "drop wait": (6, _drop_wait),
    "duplicate": (4, _duplicate),
    "swap neighbours": (6, _swap_neighbours),
    "swap distant": (5, _swap_distant),
    "swap same kind": (5, _swap_same_kind),
    "move": (5, _move),
    "move near": (6, _move_near),
    "slot": (8, _other_slot),
    "permute slots": (4, _permute_slots),
    "free less": (2, _free_less),
    "free more": (3, _free_more),
    "event": (5, _other_event),
    "record": (3, _other_record),
    "move record": (4, _move_record),
    "stream": (5, _other_stream),
    "communicator": (3, _other_communicator),
    "peer": (3, _other_peer),
    "microbatch": (4, _other_microbatch),
    "body": (3, _other_body),
    "leaf": (2, _other_leaf),
    "node": (2, _other_node),
    "names": (2, _other_names),
    "report": (2, _other_report),
    "no scale": (1, _no_scale),
    "average": (1, _average),
    "norm": (2, _other_norm),
    "message": (2, _other_message),
    "message's value": (3, _other_end),
    "transfer": (3, _transfer),
    "swap transfers": (4, _swap_transfers),
    "collective": (3, _collective),
    "swap collectives": (4, _swap_collectives),
    "add in place": (4, _add_in_place),
    "slice": (2, _other_slice),
    "other device": (2, _other_device),
    "swap programs": (1, _swap_programs),
    "slot table": (3, _slot_table),
    "seed": (1, _header),
    "add wait": (5, _add_wait),
}

"""Each device does what the DAG says: every node once on each of its devices, with the values that
the node names.

This is translation validation: for each instruction the check works out, from the DAG alone, what
it must look like.
"""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from piper.ids import DeviceId, NodeId, Slot, ValueId
from piper.ir.dag import STATE, Chunk, Comm, DeviceGroup, LossKind, Node, Role
from piper.ops.accumulate import Accumulate, Sum
from piper.ops.base import Instruction, LocalWork, Site
from piper.ops.compute import Call, Compute
from piper.ops.free import Free
from piper.ops.load_input import LoadInput
from piper.ops.report import Report
from piper.ops.update import OptimizerStep, Update
from piper.ops.wait import Wait
from piper.ops.write_buffer import StoreBuffer, WriteBuffer
from piper.verify.trace import Problem, Subject, Trace, describe_value, node_label

CHECK = "fidelity"


def check_fidelity(subject: Subject) -> Iterator[Problem]:
    """Problems, device by device."""
    expected = _Expected(subject)
    for trace in subject.traces:
        if trace.device not in subject.present:
            continue
        for text in _Device(subject, trace, expected).run():
            yield Problem(CHECK, text)


class _Expected:
    """What the DAG asks for, by device."""

    def __init__(self, subject: Subject) -> None:
        dag = subject.dag
        self._here: dict[DeviceGroup, DeviceGroup] = {}
        self._subject = subject
        self.nodes: list[list[NodeId]] = [[] for _ in subject.traces]
        self.summands: list[list[ValueId]] = [[] for _ in subject.traces]
        self.reports: list[list[ValueId]] = [[] for _ in subject.traces]
        self.numbers: dict[NodeId, int] = {}
        self.aliases: dict[ValueId, ValueId] = {}
        self.sum_of: dict[ValueId, ValueId] = {}
        self.states = {
            (v.role, v.name): v.id
            for v in dag.values.values()
            if v.role in STATE and v.id not in dag.producers
        }
        for node in dag.nodes.values():
            if isinstance(node, Chunk) and isinstance(node.work, Sum):
                self._sum(node)
                continue
            for device in self._present(node.participants):
                self.nodes[device].append(node.id)
            if isinstance(node, Chunk):
                self.numbers[node.id] = dag.microbatch(node.tags)
                if isinstance(node.work, Update):
                    self.aliases.update(self._updated(node, node.work))
        self.leaves = {leaf.name: leaf for leaf in dag.batch}
        self.reported: dict[ValueId, tuple[str, int]] = {
            value: ("loss", m) for m, value in enumerate(dag.losses)
        }
        if dag.loss_kind is LossKind.WEIGHTED:
            self.reported.update({v: ("weight", m) for m, v in enumerate(dag.weights)})
        if dag.grad_norm is not None:
            self.reported[dag.grad_norm[0]] = ("grad_norm", 0)
        self._homes: dict[ValueId, tuple[DeviceId, ...]] = {}
        for value in self.reported:
            for device in self.reporters(value):
                self.reports[device].append(value)

    def _present(self, devices: DeviceGroup) -> DeviceGroup:
        """Those of *devices* that have a program; remembered, since large groups occur often."""
        if (known := self._here.get(devices)) is None:
            present = self._subject.present
            known = self._here[devices] = tuple(d for d in devices if d in present)
        return known

    def _sum(self, node: Chunk) -> None:
        """A sum of one value is another name of it; one of several is done by ``Accumulate`` as
        they come.
        """
        each = len(node.inputs) // len(node.outputs)
        if each == 1:
            self.aliases.update(zip(node.outputs, node.inputs, strict=True))
        else:
            self.sum_of.update({v: node.outputs[i // each] for i, v in enumerate(node.inputs)})
            for device in self._present(node.participants):
                self.summands[device].extend(node.inputs)

    def _updated(self, node: Chunk, work: Update) -> Iterator[tuple[ValueId, ValueId]]:
        """An updated slice is what the parameter's slice holds from then on."""
        for value, name in zip(node.outputs, work.parameters, strict=False):
            yield value, self.states[Role.SHARD, name]

    def reporters(self, value: ValueId) -> tuple[DeviceId, ...]:
        """The devices that report *value*: all that have it, but one for what belongs to the whole
        step.
        """
        norm = self._subject.dag.grad_norm
        return (norm[1],) if norm is not None and norm[0] == value else self.homes(value)

    def stored(self, node: Node) -> tuple[ValueId, ...]:
        """The state that a communication, or a chunk that is one instruction, overwrites."""
        return tuple(self.states[Role(role), name] for role, name in node.work.overwrites())

    def inputs(self, node: Node, device: DeviceId) -> tuple[ValueId, ...]:
        """The values that *node* reads on *device*: of a derived node, those that live there."""
        if not node.derived:
            return node.inputs
        aliases = self.aliases
        return tuple(aliases.get(v, v) for v in node.inputs if device in self.homes(v))

    def homes(self, value: ValueId) -> tuple[DeviceId, ...]:
        """The devices on which *value* comes into being; for one that no node makes, those that
        have a slot for it.
        """
        if (known := self._homes.get(value)) is not None:
            return known
        dag = self._subject.dag
        producer = dag.producers.get(value)
        if producer is None:
            homes = tuple(t.device for t in self._subject.traces if value in t.values)
        else:
            homes = self._present(delivered_to(dag.nodes[producer]))
        self._homes[value] = homes
        return homes


def delivered_to(node: Node) -> tuple[DeviceId, ...]:
    """The devices on which a node's outputs exist."""
    if isinstance(node, Chunk):
        return node.participants
    return tuple(
        device
        for group in node.groups
        for position, device in enumerate(group)
        if node.work.delivers(position)
    )


class _Device:
    """The check of one device's program."""

    def __init__(self, subject: Subject, trace: Trace, expected: _Expected) -> None:
        self.plan = subject.plan
        self.dag = subject.dag
        self.subject = subject
        self.trace = trace
        self.device = trace.device
        self.slots = subject.plan.devices[trace.device].slots
        self.values = [expected.aliases.get(v, v) for v in trace.values]
        self.expected = expected
        self.seen: set[NodeId] = set()
        self.added: set[ValueId] = set()
        self.loaded: dict[Slot, int] = {}
        self.reports: set[ValueId] = set()

    def run(self) -> Iterator[str]:
        checks = _CHECKS
        for i, instruction in enumerate(self.trace.instructions):
            check = checks.get(type(instruction))
            if check is not None:
                texts = check(self, instruction)
            elif self.trace.meetings[i] is not None or self.is_copy(instruction):
                texts = self.communicate(i, instruction)
            elif self.is_local(instruction):
                texts = self.local(i, instruction)
            else:
                texts = (f"the verifier does not know instruction {instruction.op!r}",)
            for text in texts:
                yield f"{self.subject.at(self.device, i)}: {text}"
        yield from self.missing()

    # One method per kind. Each returns what is wrong; the fast path returns an empty tuple.

    def compute(self, instruction: Instruction) -> Sequence[str]:
        assert isinstance(instruction, Compute)
        node = self.dag.nodes.get(instruction.node)
        if not isinstance(node, Chunk) or not isinstance(work := node.work, Call):
            return (f"node {instruction.node} is not a chunk that calls a body",)
        bad = self.execute(node, instruction)
        get = self.values.__getitem__
        if tuple(map(get, instruction.inputs)) != node.inputs:
            bad += self.differ("reads", instruction.inputs, node.inputs)
        if tuple(map(get, instruction.outputs)) != node.outputs:
            bad += self.differ("writes", instruction.outputs, node.outputs)
        if instruction.body != work.body:
            bad.append(f"expected body {work.body}, found {instruction.body}")
        if instruction.rng != work.rng:
            bad.append(f"expected random streams {work.rng}, found {instruction.rng}")
        if self.device not in node.participants:
            return bad
        number = self.global_microbatch(node)
        if instruction.microbatch != number:
            bad.append(f"expected global microbatch {number}, found {instruction.microbatch}")
        for slot in instruction.inputs:
            loaded = self.loaded.get(slot)
            if loaded is None:
                continue
            value = self.dag.values[self.values[slot]]
            wanted = self.position(node) * self.plan.num_microbatches + value.microbatch
            if loaded != wanted:
                bad.append(
                    f"{self.name(slot)} was loaded with the rows of global "
                    f"microbatch {loaded}, expected {wanted}"
                )
        return bad

    def accumulate(self, instruction: Instruction) -> Sequence[str]:
        assert isinstance(instruction, Accumulate)
        bad: list[str] = []
        values, added, sum_of = self.values, self.added, self.expected.sum_of
        for total, left, right in zip(
            instruction.totals, instruction.left, instruction.right, strict=True
        ):
            for slot in (right,) if left == total else (left, right):
                value = values[slot]
                wanted = sum_of.get(value)
                if wanted is None or value in added:
                    bad.append(f"adds {self.name(slot)}, which is no summand or was added before")
                elif wanted != values[total]:
                    bad.append(
                        f"adds {self.name(slot)} to {self.name(total)}, "
                        f"expected {describe_value(self.dag, wanted)}"
                    )
                added.add(value)
        if instruction.node not in self.dag.nodes:
            bad.append("the node whose contributions it adds is not named")
        return bad

    def update(self, instruction: Instruction) -> Sequence[str]:
        assert isinstance(instruction, OptimizerStep)
        node = self.dag.nodes.get(instruction.node)
        if not isinstance(node, Chunk) or not isinstance(work := node.work, Update):
            return (f"node {instruction.node} is not an update",)
        bad = self.execute(node, instruction)
        if instruction.names != work.parameters:
            bad.append(f"expected parameters {work.parameters}, found {instruction.names}")
        if (instruction.scale is not None) != work.scaled:
            bad.append("expected a scale" if work.scaled else "expected no scale")
        if instruction.max_norm != work.max_norm:
            bad.append(f"expected max_norm {work.max_norm}, found {instruction.max_norm}")
        if instruction.only_finite != work.only_finite:
            bad.append(f"expected only_finite {work.only_finite}, found {instruction.only_finite}")
        if (instruction.grad_norm is not None) != work.normed:
            bad.append("expected a norm" if work.normed else "expected no norm")
        read = [
            value
            for value in self.expected.inputs(node, self.device)
            if self.dag.values[value].role is not Role.SHARD
        ]
        bad += self.differ("reads", instruction.reads(), read)
        role = Role.SHARD if work.sharded else Role.PARAMETER
        for name, slot in zip(instruction.names, instruction.parameters, strict=True):
            info = self.slots[slot]
            if info.role is not role or info.name != name:
                bad.append(f"expected the slot of {role.value} {name!r}, found {self.name(slot)}")
        return bad

    def store(self, instruction: Instruction) -> Sequence[str]:
        assert isinstance(instruction, WriteBuffer)
        node = self.dag.nodes.get(instruction.node)
        if not isinstance(node, Chunk) or not isinstance(work := node.work, StoreBuffer):
            return (f"node {instruction.node} does not store a buffer",)
        bad = self.execute(node, instruction)
        bad += self.differ("stores", (instruction.value,), self.expected.inputs(node, self.device))
        if instruction.replicas != work.replicas:
            bad.append(f"expected the sum of {work.replicas} values, found {instruction.replicas}")
        info = self.slots[instruction.buffer]
        if instruction.name != work.name or info.role is not Role.BUFFER or info.name != work.name:
            bad.append(
                f"expected to store buffer {work.name!r} in its slot, found {instruction.name!r} "
                f"and {self.name(instruction.buffer)}"
            )
        return bad

    def communicate(self, i: int, instruction: Instruction) -> Sequence[str]:
        node = self.dag.nodes.get(instruction.node)
        if not isinstance(node, Comm):
            return (f"node {instruction.node} is not a communication",)
        device = self.device
        group = next((g for g in node.groups if device in g), None)
        if group is None:
            return (f"device {device} takes no part in node {node.label}: groups {node.groups}",)
        bad = self.execute(node, instruction)
        work, position = node.work, group.index(device)
        reads, writes = self.trace.reads[i], self.trace.writes[i]
        inputs = self.expected.inputs(node, device) if work.consumes(position) else ()
        stored = self.expected.stored(node)
        outputs = (*(node.outputs if work.delivers(position) else ()), *stored)
        get = self.values.__getitem__
        if tuple(map(get, reads)) != inputs:
            bad += self.differ("reads", reads, inputs)
        if tuple(map(get, writes)) != outputs:
            bad += self.differ("writes", writes, outputs)
        site = Site(
            node.id,
            work.stream(node.stream, group),
            instruction.record,
            work.communicator(node.stream, group),
            group,
            position,
            reads,
            writes,
            self.subject.messages.of_values((*node.outputs, *stored)),
        )
        if not bad and (expected := work.lower(site)) != instruction:
            bad.append(f"expected {_fields(expected, instruction)}")
        return bad

    def is_copy(self, instruction: Instruction) -> bool:
        """Whether the node of *instruction* is a communication within the device."""
        return isinstance(self.dag.nodes.get(instruction.node), Comm)

    def is_local(self, instruction: Instruction) -> bool:
        """Whether the node of *instruction* is a chunk that is one instruction."""
        node = self.dag.nodes.get(instruction.node)
        return isinstance(node, Chunk) and isinstance(node.work, LocalWork)

    def local(self, i: int, instruction: Instruction) -> Sequence[str]:
        node = self.dag.nodes[instruction.node]
        assert isinstance(node, Chunk)
        bad = self.execute(node, instruction)
        if self.device not in node.participants:
            return bad
        reads, writes = self.trace.reads[i], self.trace.writes[i]
        outputs = (*node.outputs, *self.expected.stored(node))
        bad += self.differ("reads", reads, self.expected.inputs(node, self.device))
        bad += self.differ("writes", writes, outputs)
        if bad:
            return bad
        site = Site(
            node.id,
            node.stream,
            instruction.record,
            "",
            node.participants,
            self.position(node),
            reads,
            writes,
            self.subject.messages.of_values(node.outputs),
        )
        expected = _recording(node.work.lower(site), instruction)
        return [f"expected {_fields(expected, instruction)}"] if expected != instruction else ()

    def load(self, instruction: Instruction) -> Sequence[str]:
        assert isinstance(instruction, LoadInput)
        value = self.dag.values[self.values[instruction.slot]]
        leaf = self.expected.leaves.get(value.name)
        if value.role is not Role.INPUT or leaf is None:
            return (f"{self.name(instruction.slot)} is not a batch input",)
        bad = []
        if instruction.leaf != leaf.index:
            bad.append(f"expected batch leaf {leaf.index} ({leaf.name}), found {instruction.leaf}")
        if instruction.message != (message := self.slots[instruction.slot].message):
            bad.append(f"expected {message}, found {instruction.message}")
        if instruction.slot in self.loaded:
            bad.append("the slot is loaded twice")
        self.loaded[instruction.slot] = instruction.microbatch
        return bad

    def report(self, instruction: Instruction) -> Sequence[str]:
        assert isinstance(instruction, Report)
        value = self.values[instruction.slot]
        wanted = self.expected.reported.get(value)
        if wanted is None:
            return (f"{self.name(instruction.slot)} is neither a loss nor a weight nor the norm",)
        name, number = wanted
        node = self.dag.nodes[self.dag.producers[value]]
        assert isinstance(node, Chunk)
        bad = []
        if self.device not in self.expected.reporters(value):
            bad.append(f"devices {self.expected.reporters(value)} report it")
        elif name != "grad_norm":
            number += self.position(node) * self.plan.num_microbatches
        if (instruction.name, instruction.microbatch) != (name, number):
            bad.append(f"expected to report {name} of global microbatch {number}")
        if value in self.reports:
            bad.append("it is reported twice")
        self.reports.add(value)
        return bad

    def nothing(self, _instruction: Instruction) -> Sequence[str]:
        """Waits and frees come from no node; races and lifetimes are checked elsewhere."""
        return ()

    # What must have happened by the end.

    def missing(self) -> Iterator[str]:
        here, expected = f"device {self.device}", self.expected
        for node in expected.nodes[self.device]:
            if node not in self.seen:
                yield f"{here}: node {node} [{node_label(self.dag, node)}] is never executed"
        for value in expected.summands[self.device]:
            if value not in self.added:
                yield (
                    f"{here}: {describe_value(self.dag, value)} is never added to "
                    f"{describe_value(self.dag, expected.sum_of[value])}"
                )
        for value in expected.reports[self.device]:
            if value not in self.reports:
                name, m = expected.reported[value]
                of = "" if name == "grad_norm" else f" of microbatch {m}"
                yield f"{here}: the {name}{of} is never reported"

    # Helpers.

    def execute(self, node: Node, instruction: Instruction) -> list[str]:
        """Note that *node* is executed here; say if it should not be, or was before, or on another
        stream.
        """
        bad = []
        if node.id in self.seen:
            bad.append("the node is executed a second time on this device")
        self.seen.add(node.id)
        if not isinstance(node, Chunk):
            return bad  # that the device takes part in a communication is known by then
        if self.device not in node.participants:
            bad.append(f"the node belongs on devices {node.participants}")
        if instruction.stream != node.stream:
            bad.append(f"expected stream {node.stream!r}, found {instruction.stream!r}")
        return bad

    def name(self, slot: Slot) -> str:
        """A slot of this device for people."""
        return self.subject.slot(self.device, slot)

    def position(self, node: Chunk) -> int:
        """Which replica this device is for *node*."""
        return node.participants.index(self.device)

    def global_microbatch(self, node: Chunk) -> int:
        """The global number of the microbatch that *node* works on here."""
        return self.position(node) * self.plan.num_microbatches + self.expected.numbers[node.id]

    def differ(self, verb: str, slots: Sequence[Slot], wanted: Sequence[ValueId]) -> list[str]:
        """Which values were expected, and which found."""
        if len(slots) != len(wanted):
            return [f"{verb} {len(slots)} values, expected {len(wanted)}: {list(wanted)}"]
        return [
            f"{verb} {self.name(slot)}, expected {describe_value(self.dag, value)}"
            for slot, value in zip(slots, wanted, strict=True)
            if self.values[slot] != value
        ]


def _recording(expected: Instruction, found: Instruction) -> Instruction:
    """*expected* with the event of *found*, which events are checked for by themselves."""
    return replace(expected, record=found.record)


def _fields(expected: Instruction, found: Instruction) -> str:
    """The fields in which two instructions differ."""
    if type(expected) is not type(found):
        return f"{expected.op}, found {found.op}"
    return "; ".join(
        f"{name} {getattr(expected, name)!r}, found {getattr(found, name)!r}"
        for name in expected.__struct_fields__
        if getattr(expected, name) != getattr(found, name)
    )


_CHECKS = {
    Compute: _Device.compute,
    Accumulate: _Device.accumulate,
    OptimizerStep: _Device.update,
    LoadInput: _Device.load,
    Report: _Device.report,
    WriteBuffer: _Device.store,
    Wait: _Device.nothing,
    Free: _Device.nothing,
}

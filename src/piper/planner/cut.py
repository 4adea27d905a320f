"""Cut the ordered DAG into one program per device."""

from collections.abc import Container, Mapping, Sequence

from piper.ids import COMPUTE, DeviceId, NodeId, Slot, ValueId
from piper.ir.dag import STATE, Chunk, Comm, Dag, LossKind, Role
from piper.ops.accumulate import Accumulate
from piper.ops.base import CommunicatorId, Message, Site
from piper.ops.compute import Call, Compute
from piper.ops.load_input import LoadInput
from piper.ops.report import Report
from piper.ops.update import OptimizerStep, Update
from piper.ops.write_buffer import StoreBuffer, WriteBuffer
from piper.plan.model import CommunicatorInfo, DevicePlan
from piper.planner.program import Program
from piper.planner.receives import ReceiveAhead


class Cutter:
    """Walks the total order once and appends each node to the programs of its devices."""

    def __init__(
        self,
        dag: Dag,
        order: Sequence[NodeId],
        bindings: Mapping[str, int],
        num_devices: int,
        receive_bytes: int,
    ) -> None:
        self.dag, self.order = dag, order
        self.messages = {
            v.id: Message(v.spec.sizes(bindings), v.spec.dtype) for v in dag.values.values()
        }
        self.sums_of: dict[ValueId, tuple[NodeId, int]] = {}
        for chunk in dag.chunks():
            if chunk.work.kind == "sum":
                share = len(chunk.inputs) // len(chunk.outputs)
                for i, value in enumerate(chunk.inputs):
                    self.sums_of[value] = (chunk.id, i // share)
        self.reports = _reports(dag)
        self.state_values = {(v.role, v.name): v.id for v in dag.values.values() if v.role in STATE}
        self.leaves = {leaf.name: leaf.index for leaf in dag.batch}
        self.communicators: dict[CommunicatorId, CommunicatorInfo] = {}
        uses = _uses(dag, self.reports, num_devices)
        self.programs = [Program(DeviceId(d), uses[d]) for d in range(num_devices)]
        self.partial: list[dict[ValueId, Slot]] = [{} for _ in range(num_devices)]
        self.pending: dict[DeviceId, Chunk] = {}
        self.receives = [ReceiveAhead(receive_bytes) for _ in range(num_devices)]
        self._collect_receives()

    def cut(self) -> tuple[tuple[DevicePlan, ...], tuple[CommunicatorInfo, ...]]:
        """The device plans and the communicators that they use."""
        for device, program in enumerate(self.programs):
            self.receives[device].advance(program)
        for node in self.order:
            match self.dag.nodes[node]:
                case Chunk() as chunk:
                    self._chunk(chunk)
                case Comm() as comm:
                    self._comm(comm)
        plans = tuple(program.finish() for program in self.programs)
        return plans, tuple(self.communicators[name] for name in sorted(self.communicators))

    # --- chunks -----------------------------------------------------------------------------------

    def _chunk(self, chunk: Chunk) -> None:
        for position, device in enumerate(chunk.participants):
            program = self.programs[device]
            match chunk.work:
                case Call():
                    self._call(chunk, chunk.work, position, device)
                    self.receives[device].advance(program)
                case Update():
                    self._update(chunk, chunk.work, program)
                case StoreBuffer():
                    self._store(chunk, chunk.work, program)
                case _:
                    self._sum(chunk, device)

    def _call(self, chunk: Chunk, work: Call, position: int, device: DeviceId) -> None:
        program = self.programs[device]
        self._flush(device)
        dag = self.dag
        base = position * dag.num_microbatches
        for value in dict.fromkeys(chunk.inputs):
            if not program.has(value):
                self._source(value, base, program)
        inputs = tuple(program.slot(v) for v in chunk.inputs)
        outputs = tuple(program.allocate(dag.values[v], self.messages[v]) for v in chunk.outputs)
        microbatch = base + dag.microbatch(chunk.tags)
        program.emit(
            Compute(
                node=chunk.id,
                stream=chunk.stream,
                body=work.body,
                inputs=inputs,
                outputs=outputs,
                microbatch=microbatch,
                rng=work.rng,
            ),
            consume=inputs,
        )
        program.drop_unread(outputs)
        self._report(chunk, base, program)
        if any(v in self.sums_of for v in chunk.outputs):
            self.pending[device] = chunk

    def _source(self, value: ValueId, base: int, program: Program) -> None:
        info = self.dag.values[value]
        slot = program.allocate(info, self.messages[value])
        if info.role is Role.INPUT:
            load = LoadInput(
                node=NodeId(-1),
                stream=COMPUTE,
                slot=slot,
                leaf=self.leaves[info.name],
                microbatch=base + info.microbatch,
                message=self.messages[value],
            )
            program.emit(load)

    def _report(self, chunk: Chunk, base: int, program: Program) -> None:
        for value in chunk.outputs:
            if value in self.reports:
                name, microbatch = self.reports[value]
                slot = program.slot(value)
                report = Report(
                    node=chunk.id,
                    stream=COMPUTE,
                    name=name,
                    slot=slot,
                    microbatch=base + microbatch,
                )
                program.emit(report, consume=(slot,))

    def _flush(self, device: DeviceId) -> None:
        """Add the last chunk's contributions to the partial sums. Done only when the device goes on computing, so that
        what the chunk sends is under way first.
        """
        if (chunk := self.pending.pop(device, None)) is not None:
            self._accumulate(chunk, device)

    def _accumulate(self, chunk: Chunk, device: DeviceId) -> None:
        program, partial = self.programs[device], self.partial[device]
        totals: list[Slot] = []
        left: list[Slot] = []
        right: list[Slot] = []
        used: list[Slot] = []
        for value in chunk.outputs:
            if value not in self.sums_of:
                continue
            node, index = self.sums_of[value]
            total = self.dag.nodes[node].outputs[index]
            slot = program.slot(value)
            before = partial.get(total)
            if before is None:
                partial[total] = slot
                continue
            if not program.has(total):
                program.allocate(self.dag.values[total], self.messages[total])
                used.append(before)
            totals.append(program.slot(total))
            left.append(before)
            right.append(slot)
            used.append(slot)
            partial[total] = program.slot(total)
        if totals:
            program.emit(
                Accumulate(
                    node=chunk.id,
                    stream=COMPUTE,
                    totals=tuple(totals),
                    left=tuple(left),
                    right=tuple(right),
                ),
                consume=used,
            )

    def _sum(self, chunk: Chunk, device: DeviceId) -> None:
        """The sum itself is done by now; a sum of one contribution is that contribution."""
        self._flush(device)
        program = self.programs[device]
        share = len(chunk.inputs) // len(chunk.outputs)
        if share > 1:
            return
        for value, contribution in zip(chunk.outputs, chunk.inputs, strict=True):
            program.alias(value, program.slot(contribution))

    def _update(self, chunk: Chunk, work: Update, program: Program) -> None:
        slots = tuple(program.slot(v) for v in chunk.inputs if program.has(v))
        count = len(work.parameters)
        program.emit(
            OptimizerStep(
                node=chunk.id,
                stream=COMPUTE,
                names=work.parameters,
                parameters=tuple(
                    self._state(Role.PARAMETER, name, program) for name in work.parameters
                ),
                gradients=slots[:count],
                scale=slots[count] if work.scaled else None,
            ),
            consume=slots,
        )

    def _state(self, role: Role, name: str, program: Program) -> Slot:
        """The slot of a parameter or buffer; one that no chunk of this device reads gets its slot here."""
        value = self.state_values[role, name]
        if not program.has(value):
            program.allocate(self.dag.values[value], self.messages[value])
        return program.slot(value)

    def _store(self, chunk: Chunk, work: StoreBuffer, program: Program) -> None:
        (value,) = chunk.inputs
        slot = program.slot(value)
        program.emit(
            WriteBuffer(
                node=chunk.id,
                stream=COMPUTE,
                name=work.name,
                buffer=self._state(Role.BUFFER, work.name, program),
                value=slot,
            ),
            consume=(slot,),
        )

    # --- communication ----------------------------------------------------------------------------

    def _collect_receives(self) -> None:
        for node in self.order:
            comm = self.dag.nodes[node]
            if not isinstance(comm, Comm):
                continue
            for group in comm.groups:
                for position, device in enumerate(group):
                    if not comm.work.consumes(position):
                        message = self.messages[comm.outputs[0]]
                        self.receives[device].expect(comm, group, position, message, self._site)

    def _comm(self, comm: Comm) -> None:
        for group in comm.groups:
            for position, device in enumerate(group):
                program = self.programs[device]
                if comm.work.consumes(position):
                    site = self._site(comm, group, position, program)
                    program.emit(comm.work.lower(site), consume=site.inputs)
                    program.drop_unread(site.outputs, site.stream)
                else:
                    self.receives[device].require(comm.id, program)

    def _site(
        self, comm: Comm, group: tuple[DeviceId, ...], position: int, program: Program
    ) -> Site:
        consumes, delivers = comm.work.consumes(position), comm.work.delivers(position)
        inputs = tuple(program.slot(v) for v in comm.inputs if consumes and program.has(v))
        outputs = tuple(
            program.allocate(self.dag.values[v], self.messages[v]) for v in comm.outputs if delivers
        )
        name = comm.work.communicator(comm.stream, group)
        self.communicators.setdefault(name, CommunicatorInfo(name, group))
        return Site(
            node=comm.id,
            stream=comm.work.stream(comm.stream, group),
            record=None,
            communicator=name,
            group=group,
            position=position,
            inputs=inputs,
            outputs=outputs,
            messages=tuple(self.messages[v] for v in comm.outputs),
        )


def _uses(dag: Dag, reports: Container[ValueId], num_devices: int) -> list[dict[ValueId, int]]:
    """How often each value is read on each device."""
    uses: list[dict[ValueId, int]] = [{} for _ in range(num_devices)]
    for node in dag.nodes.values():
        if isinstance(node, Chunk):
            for device in node.participants:
                _count(uses[device], node.inputs)
                _count(uses[device], [v for v in node.outputs if v in reports])
            continue
        for group in node.groups:
            for position, device in enumerate(group):
                if node.work.consumes(position):
                    _count(uses[device], node.inputs)
    return uses


def _count(uses: dict[ValueId, int], values: Sequence[ValueId]) -> None:
    for value in values:
        uses[value] = uses.get(value, 0) + 1


def _reports(dag: Dag) -> dict[ValueId, tuple[str, int]]:
    """What to report about which value: the name and the microbatch (within a replica)."""
    reports = {v: ("loss", m) for m, v in enumerate(dag.losses)}
    if dag.loss_kind is LossKind.WEIGHTED:
        reports.update({v: ("weight", m) for m, v in enumerate(dag.weights)})
    return reports

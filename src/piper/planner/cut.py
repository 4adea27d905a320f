"""Cut the ordered DAG into one program per device."""

from collections.abc import Container, Mapping, Sequence

from piper.ids import COMPUTE, DeviceId, NodeId, Slot, ValueId
from piper.ir.dag import STATE, Chunk, Comm, Dag, LossKind, Role
from piper.ops.base import CommunicatorId, LocalWork, Message, Site, Work
from piper.ops.compute import Call, Compute
from piper.ops.load_input import LoadInput
from piper.ops.report import Report
from piper.ops.update import OptimizerStep, Update
from piper.ops.write_buffer import StoreBuffer, WriteBuffer
from piper.plan.model import CommunicatorInfo, DevicePlan
from piper.planner.early import Early
from piper.planner.program import Program
from piper.planner.sums import PartialSums, sums_of


class Cutter:
    """Walks the total order once and appends each node to the programs of its devices.

    ``receive_bytes`` and ``gather_bytes`` bound, per device, what is received and gathered before it is needed.
    """

    def __init__(
        self,
        dag: Dag,
        order: Sequence[NodeId],
        bindings: Mapping[str, int],
        num_devices: int,
        *,
        receive_bytes: int,
        gather_bytes: int,
    ) -> None:
        self.dag, self.order = dag, order
        self.messages = {
            v.id: Message(v.spec.sizes(bindings), v.spec.dtype) for v in dag.values.values()
        }
        self.reports = _reports(dag)
        self.state_values = {
            (v.role, v.name): v.id
            for v in dag.values.values()
            if v.role in STATE and v.id not in dag.producers
        }
        self.leaves = {leaf.name: leaf.index for leaf in dag.batch}
        self.communicators: dict[CommunicatorId, CommunicatorInfo] = {}
        uses = _uses(dag, self.reports, num_devices)
        self.programs = [Program(DeviceId(d), uses[d]) for d in range(num_devices)]
        totals = sums_of(dag)
        self.sums = [PartialSums(p, totals, dag.values, self.messages) for p in self.programs]
        self.receives = [Early(receive_bytes) for _ in range(num_devices)]
        self.gathers = [Early(gather_bytes) for _ in range(num_devices)]
        self.gathered: set[tuple[DeviceId, NodeId]] = set()  # needed by some chunk so far
        self._expect()

    def cut(self) -> tuple[tuple[DevicePlan, ...], tuple[CommunicatorInfo, ...]]:
        """The device plans and the communicators that they use."""
        for device in range(len(self.programs)):
            self._advance(DeviceId(device))
        for node in self.order:
            match self.dag.nodes[node]:
                case Chunk() as chunk:
                    self._chunk(chunk)
                case Comm() as comm if not comm.work.early:
                    self._comm(comm)
        plans = tuple(program.finish() for program in self.programs)
        return plans, tuple(self.communicators[name] for name in sorted(self.communicators))

    # --- chunks -----------------------------------------------------------------------------------

    def _chunk(self, chunk: Chunk) -> None:
        for position, device in enumerate(chunk.participants):
            program = self.programs[device]
            match chunk.work:
                case Call():
                    self.sums[device].before_compute()
                    self._call(chunk, chunk.work, position, device)
                    self.sums[device].computed(chunk.id, chunk.outputs)
                    self._advance(device)
                case Update():
                    self._update(chunk, chunk.work, device)
                case StoreBuffer():
                    self._store(chunk, chunk.work, program)
                case LocalWork():
                    self._local(chunk, chunk.work, position, program)
                case _:
                    self.sums[device].finish(chunk)

    def _call(self, chunk: Chunk, work: Call, position: int, device: DeviceId) -> None:
        program, dag = self.programs[device], self.dag
        base = position * dag.num_microbatches
        inputs = tuple(self._input(v, base, device) for v in chunk.inputs)
        outputs = tuple(program.allocate(dag.values[v], self.messages[v]) for v in chunk.outputs)
        program.emit(
            Compute(
                node=chunk.id,
                stream=chunk.stream,
                body=work.body,
                inputs=inputs,
                outputs=outputs,
                microbatch=base + dag.microbatch(chunk.tags),
                rng=work.rng,
            ),
            consume=inputs,
        )
        program.drop_unread(outputs)
        self._report(chunk, base, program)

    def _input(self, value: ValueId, base: int, device: DeviceId) -> Slot:
        """The slot of what a chunk reads, brought here if it is not here yet."""
        program, info = self.programs[device], self.dag.values[value]
        if info.role is Role.GATHERED:
            self._need_gathered(self.dag.producers[value], device)
        if info.role in STATE:
            return self._state(value, device)
        if info.role is Role.INPUT and not program.has(value):
            slot = program.allocate(info, self.messages[value])
            load = LoadInput(
                node=NodeId(-1),
                stream=COMPUTE,
                slot=slot,
                leaf=self.leaves[info.name],
                microbatch=base + info.microbatch,
                message=self.messages[value],
            )
            program.emit(load)
        return program.slot(value)

    def _need_gathered(self, gather: NodeId, device: DeviceId) -> None:
        """Start *gather* unless it has started; give up what nothing here reads of it once it is there (a backward reads
        no biases, but they are gathered with the rest of their bucket).
        """
        program = self.programs[device]
        self.gathers[device].require(gather, program)
        if (device, gather) not in self.gathered:
            self.gathered.add((device, gather))
            program.drop_unread([program.slot(v) for v in self.dag.nodes[gather].outputs])

    def _state(self, value: ValueId, device: DeviceId) -> Slot:
        """The slot of a state value."""
        program, info = self.programs[device], self.dag.values[value]
        if not program.has(value):
            shard = self._shard(info.name, device) if info.role is Role.SHARD else None
            experts = None
            if info.role in (Role.PARAMETER, Role.SHARD):
                experts = self.dag.expert_part(info.name, device)
            program.allocate(info, self.messages[value], shard, experts)
        return program.slot(value)

    def _shard(self, name: str, device: DeviceId) -> tuple[int, int]:
        (group,) = (g for g in self.dag.shards[name] if device in g)
        return group.index(device), len(group)

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

    def _update(self, chunk: Chunk, work: Update, device: DeviceId) -> None:
        program = self.programs[device]
        role = Role.SHARD if work.sharded else Role.PARAMETER
        states = [self.state_values[role, name] for name in work.parameters]
        parameters = tuple(self._state(value, device) for value in states)
        read = tuple(
            program.slot(v)
            for v in chunk.inputs
            if program.has(v) and self.dag.values[v].role is not Role.SHARD
        )
        count = len(work.parameters)
        scalars = iter(read[count:])
        program.emit(
            OptimizerStep(
                node=chunk.id,
                stream=COMPUTE,
                names=work.parameters,
                parameters=parameters,
                gradients=read[:count],
                scale=next(scalars) if work.scaled else None,
                grad_norm=next(scalars) if work.max_norm is not None else None,
                max_norm=work.max_norm,
            ),
            consume=read,
        )
        for value, slot in zip(chunk.outputs, parameters, strict=False):
            program.rename(value, slot)

    def _store(self, chunk: Chunk, work: StoreBuffer, program: Program) -> None:
        (value,) = chunk.inputs
        slot = program.slot(value)
        buffer = self._state(self.state_values[Role.BUFFER, work.name], program.device)
        program.emit(
            WriteBuffer(
                node=chunk.id,
                stream=COMPUTE,
                name=work.name,
                buffer=buffer,
                value=slot,
                replicas=work.replicas,
            ),
            consume=(slot,),
        )

    def _local(self, chunk: Chunk, work: LocalWork, position: int, program: Program) -> None:
        inputs = self._present(chunk.inputs, program)
        made = [program.allocate(self.dag.values[v], self.messages[v]) for v in chunk.outputs]
        site = Site(
            node=chunk.id,
            stream=chunk.stream,
            record=None,
            communicator="",
            group=chunk.participants,
            position=position,
            inputs=inputs,
            outputs=(*made, *self._stored(work, program.device)),
            messages=tuple(self.messages[v] for v in chunk.outputs),
        )
        program.emit(work.lower(site), consume=inputs)
        program.drop_unread(made)
        for value, slot in zip(chunk.outputs, made, strict=True):
            if (value, program.device) == self.dag.grad_norm:
                report = Report(
                    node=chunk.id, stream=COMPUTE, name="grad_norm", slot=slot, microbatch=0
                )
                program.emit(report, consume=(slot,))

    def _stored(self, work: Work, device: DeviceId) -> tuple[Slot, ...]:
        """The slots of the state that a node overwrites."""
        names = work.overwrites()
        return tuple(self._state(self.state_values[Role(r), n], device) for r, n in names)

    def _present(self, values: Sequence[ValueId], program: Program) -> tuple[Slot, ...]:
        """The slots of those values that are on the device; state is."""
        producers = self.dag.producers
        return tuple(
            self._state(v, program.device) if v not in producers else program.slot(v)
            for v in values
            if v not in producers or program.has(v)
        )

    # --- communication ----------------------------------------------------------------------------

    def _expect(self) -> None:
        """Announce all receives and gathers, in order of need."""
        for number in self.order:
            node = self.dag.nodes[number]
            if isinstance(node, Comm):
                self._expect_receives(node)
                continue
            for value in node.inputs:
                if self.dag.values[value].role is Role.GATHERED:
                    self._expect_gather(self.dag.producers[value])

    def _expect_receives(self, comm: Comm) -> None:
        for group in comm.groups:
            for position, device in enumerate(group):
                if not comm.work.consumes(position):
                    nbytes = sum(self.messages[v].nbytes for v in comm.outputs)
                    self.receives[device].expect(comm, group, position, nbytes, self._site)

    def _expect_gather(self, number: NodeId) -> None:
        comm = self.dag.nodes[number]
        assert isinstance(comm, Comm)
        nbytes = sum(self.messages[v].nbytes for v in comm.outputs)
        for group in comm.groups:
            for position, device in enumerate(group):
                self.gathers[device].expect(comm, group, position, nbytes, self._site)

    def _advance(self, device: DeviceId) -> None:
        program = self.programs[device]
        self.gathers[device].advance(program)
        self.receives[device].advance(program)

    def _comm(self, comm: Comm) -> None:
        for group in comm.groups:
            for position, device in enumerate(group):
                program = self.programs[device]
                if comm.work.consumes(position):
                    site = self._site(comm, group, position, program)
                    program.emit(comm.work.lower(site), consume=site.inputs)
                    program.drop_unread(site.outputs, site.stream)
                    self.sums[device].reduced(comm.id, comm.outputs)
                else:
                    self.receives[device].require(comm.id, program)

    def _site(
        self, comm: Comm, group: tuple[DeviceId, ...], position: int, program: Program
    ) -> Site:
        device = group[position]
        stored = [self.state_values[Role(r), name] for r, name in comm.work.overwrites()]
        consumed = comm.inputs if comm.work.consumes(position) else ()
        made = comm.outputs if comm.work.delivers(position) else ()
        name = comm.work.communicator(comm.stream, group)
        self.communicators.setdefault(name, CommunicatorInfo(name, group))
        return Site(
            node=comm.id,
            stream=comm.work.stream(comm.stream, group),
            record=None,
            communicator=name,
            group=group,
            position=position,
            inputs=self._present(consumed, program),
            outputs=(
                *(program.allocate(self.dag.values[v], self.messages[v]) for v in made),
                *self._stored(comm.work, device),
            ),
            messages=tuple(self.messages[v] for v in (*comm.outputs, *stored)),
        )


def _count(uses: dict[ValueId, int], values: Sequence[ValueId]) -> None:
    for value in values:
        uses[value] = uses.get(value, 0) + 1


def _reports(dag: Dag) -> dict[ValueId, tuple[str, int]]:
    """What to report about which value: the name and the microbatch (within a replica)."""
    reports = {v: ("loss", m) for m, v in enumerate(dag.losses)}
    if dag.loss_kind is LossKind.WEIGHTED:
        reports.update({v: ("weight", m) for m, v in enumerate(dag.weights)})
    return reports


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
    if dag.grad_norm is not None:
        norm, device = dag.grad_norm
        _count(uses[device], [norm])
    return uses

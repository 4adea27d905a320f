"""Cut the ordered DAG into one program per device."""

from bisect import bisect_right
from collections.abc import Container, Mapping, Sequence

from piper.ids import COMPUTE, DeviceId, NodeId, Slot, ValueId
from piper.ir.dag import STATE, Chunk, Comm, Dag, LossKind, Role
from piper.ir.edit import ordered_by_user
from piper.ops.base import CommunicatorId, LocalWork, Message, Site, Work
from piper.ops.compute import Call, Compute
from piper.ops.load_input import LoadInput
from piper.ops.offload import Fetch
from piper.ops.report import Report
from piper.ops.update import OptimizerStep, Update
from piper.ops.write_buffer import StoreBuffer, WriteBuffer
from piper.plan.model import CommunicatorInfo, DevicePlan
from piper.planner.budget import RECEIVE_BYTES, Bounds
from piper.planner.early import Early
from piper.planner.flights import Flights
from piper.planner.program import Program
from piper.planner.represented import Represented
from piper.planner.sums import Ownership, PartialSums, sums_of

FETCH_LEAD = 4.0
"""A fetch starts that many times its estimated duration before it is needed: estimates are rough,
and several may be under way.
"""


class Cutter:
    """Walks the total order once and appends each node to the programs of its devices.

    ``bounds`` are on what is received, gathered and fetched before it is needed, and on what other
    collectives are given that are in flight, per device (``None``: as much as one chunk needs at
    most, for receives :data:`~piper.planner.budget.RECEIVE_BYTES`, for other collectives see
    :class:`~piper.planner.flights.Flights`). ``seconds`` are estimated durations. Only
    *represented* devices get a program (``None``: all); no device's program depends on another's.
    """

    def __init__(
        self,
        dag: Dag,
        order: Sequence[NodeId],
        bindings: Mapping[str, int],
        num_devices: int,
        seconds: Mapping[NodeId, float],
        bounds: Bounds,
        represented: frozenset[DeviceId] | None = None,
    ) -> None:
        self.dag, self.order = dag, order
        self.represented = Represented(represented)
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
        uses = _uses(dag, self.reports, num_devices, self.represented)
        self.programs = [Program(DeviceId(d), uses[d]) for d in range(num_devices)]
        totals = sums_of(dag)
        owned = Ownership(dag)
        self.sums = [
            PartialSums(p, totals, dag.values, self.messages, owned) for p in self.programs
        ]
        bounds = bounds.filled(Bounds(receive=RECEIVE_BYTES))
        self.receives = [Early(bounds.receive) for _ in range(num_devices)]
        self.gathers = [Early(bounds.gather) for _ in range(num_devices)]
        self.fetches = [Early(bounds.fetch) for _ in range(num_devices)]
        self.flights = [Flights(bounds.reduce) for _ in range(num_devices)]
        self.computed = [0] * num_devices  # chunks that were issued
        self.fetched = _fetched_early(dag)
        self.gathered: set[tuple[DeviceId, NodeId]] = set()  # needed by some chunk so far
        self._expect(seconds)

    def cut(self) -> tuple[tuple[DevicePlan, ...], tuple[CommunicatorInfo, ...]]:
        """The device plans and the communicators that they use."""
        everyone = tuple(program.device for program in self.programs)
        for _, device in self.represented.members(everyone):
            self._advance(device)
        for node in self.order:
            match self.dag.nodes[node]:
                case Chunk() as chunk:
                    self._chunk(chunk)
                case Comm() as comm if not self._is_early(comm):
                    self._comm(comm)
        plans = tuple(program.finish() for program in self.programs)
        return plans, tuple(self.communicators[name] for name in sorted(self.communicators))

    @property
    def bounds(self) -> Bounds:
        """What the bounds come to, on the device where that is the most."""
        kinds = (self.receives, self.gathers, self.fetches, self.flights)
        return Bounds(*(max(of_device.limit for of_device in kind) for kind in kinds))

    # --- chunks -----------------------------------------------------------------------------------

    def _chunk(self, chunk: Chunk) -> None:
        for position, device in self.represented.members(chunk.participants):
            program = self.programs[device]
            match chunk.work:
                case Call():
                    self.sums[device].before_compute()
                    self._call(chunk, chunk.work, position, device)
                    self.sums[device].computed(chunk.id, chunk.outputs)
                    self.computed[device] += 1
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
        # Before the chunk: a CPU's host is busy until it is done.
        self._advance_copies(device)
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
        if value in self.fetched:
            self.fetches[device].require(self.fetched[value], program)
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
        """Start *gather* unless it has started; give up what nothing here reads of it once it is
        there (a backward reads no biases, but they are gathered with the rest of their bucket).
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
        values = self.dag.values
        given = [v for v in chunk.inputs if values[v].role is not Role.SHARD]
        read = self._present(given, program)
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
                grad_norm=next(scalars) if work.normed else None,
                max_norm=work.max_norm,
                only_finite=work.only_finite,
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

    def _is_early(self, comm: Comm) -> bool:
        """Whether it is started before it is needed, and not where the total order puts it."""
        if isinstance(comm.work, Fetch):
            return comm.outputs[0] in self.fetched
        return comm.work.early

    def _expect(self, seconds: Mapping[NodeId, float]) -> None:
        """Announce all receives, gathers and fetches, in order of need."""
        ends: list[list[float]] = [[0.0] for _ in self.programs]  # of each device's chunks so far
        for number in self.order:
            node = self.dag.nodes[number]
            if isinstance(node, Comm):
                self._expect_receives(node)
                self._expect_collective(node)
                continue
            for value in node.inputs:
                if self.dag.values[value].role is Role.GATHERED:
                    self._expect_gather(self.dag.producers[value], number)
                elif value in self.fetched:
                    self._expect_fetch(self.fetched[value], number, ends, seconds)
            if isinstance(node.work, Call):
                for device in node.participants:
                    ends[device].append(ends[device][-1] + seconds[number])

    def _expect_fetch(
        self,
        fetch: NodeId,
        chunk: NodeId,
        ends: Sequence[Sequence[float]],
        seconds: Mapping[NodeId, float],
    ) -> None:
        """Announce a fetch for *chunk*, whose predecessors on each device have the *ends*."""
        comm = self.dag.nodes[fetch]
        assert isinstance(comm, Comm)
        nbytes = sum(self.messages[v].nbytes for v in comm.outputs)
        for device in (d for (d,) in comm.groups if self.represented.members((d,))):
            latest = ends[device][-1] - FETCH_LEAD * seconds[fetch]
            # At least one chunk ahead: between two chunks nothing can be hidden.
            since = min(bisect_right(ends[device], latest) - 1, len(ends[device]) - 2)
            self.fetches[device].expect(
                comm,
                (device,),
                0,
                nbytes,
                self._site,
                chunk=chunk,
                needs=comm.inputs,
                since=max(since, 0),
            )

    def _expect_receives(self, comm: Comm) -> None:
        for group, members in self.represented.groups(comm.groups):
            for position, device in members:
                if not comm.work.consumes(position):
                    nbytes = sum(self.messages[v].nbytes for v in comm.outputs)
                    self.receives[device].expect(comm, group, position, nbytes, self._site)

    def _expect_collective(self, comm: Comm) -> None:
        if self._is_early(comm):
            return
        for group, members in self.represented.groups(comm.groups):
            for position, device in members:
                if self._collects(comm, group, position):
                    self.flights[device].expect(self._given(comm))

    def _expect_gather(self, gather: NodeId, chunk: NodeId) -> None:
        comm = self.dag.nodes[gather]
        assert isinstance(comm, Comm)
        nbytes = sum(self.messages[v].nbytes for v in comm.outputs)
        for group, members in self.represented.groups(comm.groups):
            for position, device in members:
                self.gathers[device].expect(comm, group, position, nbytes, self._site, chunk=chunk)

    def _advance(self, device: DeviceId) -> None:
        self._advance_copies(device)
        self.receives[device].advance(self.programs[device])

    def _advance_copies(self, device: DeviceId) -> None:
        """Start gathers and fetches, as far as their bounds allow."""
        program, chunks = self.programs[device], self.computed[device]
        self.gathers[device].advance(program)
        self.fetches[device].advance(program, chunks)

    def _comm(self, comm: Comm) -> None:
        for group, members in self.represented.groups(comm.groups):
            for position, device in members:
                program = self.programs[device]
                if not comm.work.consumes(position):
                    self.receives[device].require(comm.id, program)
                    continue
                collective, nbytes = self._collects(comm, group, position), self._given(comm)
                if collective:
                    landed = self.flights[device].make_room(nbytes, program)
                    self.sums[device].landed(landed)
                site = self._site(comm, group, position, program)
                late = comm.work.releases_late
                program.emit(comm.work.lower(site), consume=() if late else site.inputs)
                if late:
                    program.release_late(site.inputs)
                program.drop_unread(site.outputs, site.stream)
                if collective:
                    self.flights[device].started(comm.id, site.outputs, nbytes)
                self.sums[device].reduced(comm.id, comm.outputs)

    def _collects(self, comm: Comm, group: tuple[DeviceId, ...], position: int) -> bool:
        """Whether it is a collective for the member at *position*: gives and takes."""
        consumes, delivers = comm.work.consumes(position), comm.work.delivers(position)
        return consumes and delivers and len(group) > 1

    def _given(self, comm: Comm) -> int:
        return sum(self.messages[v].nbytes for v in comm.inputs)

    def _site(
        self, comm: Comm, group: tuple[DeviceId, ...], position: int, program: Program
    ) -> Site:
        device = group[position]
        stored = [self.state_values[Role(r), name] for r, name in comm.work.overwrites()]
        consumed = comm.inputs if comm.work.consumes(position) else ()
        made = comm.outputs if comm.work.delivers(position) else ()
        if name := comm.work.communicator(comm.stream, group):
            self.communicators.setdefault(name, CommunicatorInfo(name, group))
        if isinstance(comm.work, Fetch):
            # What was put aside is there, or the fetch could not start: the device need not hold it
            # twice.
            program.free_now(self.dag.nodes[self.dag.producers[comm.inputs[0]]].inputs)
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


def _fetched_early(dag: Dag) -> dict[ValueId, NodeId]:
    """The fetch that makes each fetched value; but those that the user orders start where the order
    says.
    """
    ordered = ordered_by_user(dag)
    return {
        value: comm.id
        for comm in dag.comms()
        if isinstance(comm.work, Fetch) and comm.id not in ordered
        for value in comm.outputs
    }


def _count(uses: dict[ValueId, int], values: Sequence[ValueId]) -> None:
    for value in values:
        uses[value] = uses.get(value, 0) + 1


def _reports(dag: Dag) -> dict[ValueId, tuple[str, int]]:
    """What to report about which value: the name and the microbatch (within a replica)."""
    reports = {v: ("loss", m) for m, v in enumerate(dag.losses)}
    if dag.loss_kind is LossKind.WEIGHTED:
        reports.update({v: ("weight", m) for m, v in enumerate(dag.weights)})
    return reports


def _uses(
    dag: Dag, reports: Container[ValueId], num_devices: int, represented: Represented
) -> list[dict[ValueId, int]]:
    """How often each value is read on each device."""
    uses: list[dict[ValueId, int]] = [{} for _ in range(num_devices)]
    for node in dag.nodes.values():
        if isinstance(node, Chunk):
            for _, device in represented.members(node.participants):
                _count(uses[device], node.inputs)
                _count(uses[device], [v for v in node.outputs if v in reports])
            continue
        for _, members in represented.groups(node.groups):
            for position, device in members:
                if node.work.consumes(position):
                    _count(uses[device], node.inputs)
    if dag.grad_norm is not None:
        norm, device = dag.grad_norm
        _count(uses[device], [norm])
    return uses

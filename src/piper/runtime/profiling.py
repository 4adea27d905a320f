"""Measure how long the parts of a plan take on this machine: the contents of a
:class:`~piper.plan.profile.Profile`.

Each device's program is run by itself, with imagined peers: chunks then find caches and memory in
the state in which they find them in training, which calling each again and again would not show (it
is up to a third quicker). Of several runs the quickest one counts, as a whole: other work on the
machine only ever adds, and the quickest of each instruction by itself would make up a run that
never was.
"""

import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from piper.devices.alone import AloneCommunicator, Imagining, example
from piper.devices.cpu import CpuDevice
from piper.devices.links import LinkTimes
from piper.devices.tensors import torch_dtype
from piper.ids import DeviceId
from piper.ir.body import TensorSpec
from piper.ir.dag import BatchLeaf, Role
from piper.ops.base import Communicator, CommunicatorId, Handle, Instruction
from piper.ops.compute import Compute
from piper.plan.added import wholly_added
from piper.plan.costs import ADDED
from piper.plan.model import Plan
from piper.plan.profile import VERSION, Exchange, Profile, Rate, chunk_key
from piper.plan.topology import Contention
from piper.plan.work import touched_bytes
from piper.runtime.batch import Batch, flatten
from piper.runtime.context import Context
from piper.runtime.interpreter import Program
from piper.runtime.optimizer import OptimizerSpec
from piper.runtime.record import Launch, Recorder
from piper.runtime.slices import Slice
from piper.runtime.state import ModelState

LAUNCH = 1e-6
"""Seconds that the interpreter spends per instruction (see ``benchmarks/interpreter.py``)."""

_WARM_UP = 1


@dataclass(frozen=True, slots=True)
class Network:
    """What was measured of communication: one message, collectives by kind and number of members,
    and how they and computation slow each other down (``None``: not at all).
    """

    messages: LinkTimes
    collectives: Mapping[str, Mapping[int, LinkTimes]] = field(default_factory=dict)
    contention: Contention | None = None


def measure_profile(
    plan: Plan,
    optimizer: OptimizerSpec,
    network: Network,
    *,
    repeats: int = 5,
    batch: Batch | None = None,
    on_device: Callable[[DeviceId], None] = lambda _: None,
) -> Profile:
    """The profile of *plan* on a CPU of this machine, with torch's present number of threads.
    *on_device* is called before each device's program is run; devices whose chunks are known by
    then are left out. *batch* is a global batch; by default small random numbers, and zeros where
    they may be indices.
    """
    found = Measured()
    for mine in plan.devices:
        bodies = {i.body for i in mine.instructions if isinstance(i, Compute)}
        if all(chunk_key(body, plan.bindings) in found.chunks for body in bodies):
            continue
        on_device(mine.device)
        replay = Replay(plan, mine.device, optimizer, batch)
        for _ in range(repeats):
            found.add(replay)
    return found.profile(network)


@dataclass(frozen=True, slots=True)
class Taken:
    """Seconds of each instruction of one step, by position: of local work, or of what is done
    before communication is issued; and of what is done with what communication brought. 0 for what
    takes none.
    """

    work: tuple[float, ...]
    unpacking: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return sum(self.work) + sum(self.unpacking)


class _Stopwatch(Recorder):
    """Times each instruction, without what *imagining* takes."""

    def __init__(self, device: CpuDevice, count: int, imagining: Imagining) -> None:
        super().__init__(device, count, lambda instruction: instruction.op)
        self._count, self._imagining = count, imagining
        self.clear()

    def clear(self) -> None:
        """Begin a step."""
        self._work, self._unpacking = [0.0] * self._count, [0.0] * self._count

    def taken(self) -> Taken:
        """What the step, which is complete, took."""
        return Taken(tuple(self._work), tuple(self._unpacking))

    def around(self, position: int, instruction: Instruction, launch: Launch) -> Launch:
        """*launch*, timed as the instruction at *position*."""
        del instruction

        def run() -> Handle | None:
            began = self._now()
            handle = launch()
            self._work[position] = self._now() - began
            return None if handle is None else _Timed(handle, position, self)

        return run

    def wait(self, handle: Handle, position: int) -> None:
        """Wait for *handle*, which is of the instruction at *position*."""
        began = self._now()
        handle.wait()
        self._unpacking[position] = self._now() - began

    def _now(self) -> float:
        return time.perf_counter() - self._imagining.seconds


@dataclass(frozen=True, slots=True)
class _Timed:
    """A handle whose wait is timed."""

    handle: Handle
    position: int
    stopwatch: _Stopwatch

    def wait(self) -> None:
        """See :class:`~piper.ops.base.Handle`."""
        self.stopwatch.wait(self.handle, self.position)

    def done(self) -> bool:
        """See :class:`~piper.ops.base.Handle`."""
        return self.handle.done()


class Replay:
    """One device's program on this thread, with imagined peers and a model of random weights."""

    def __init__(
        self, plan: Plan, device: DeviceId, optimizer: OptimizerSpec, batch: Batch | None = None
    ) -> None:
        self.plan, self.mine = plan, plan.devices[device]
        cpu, imagining = CpuDevice(), Imagining()
        self._context = Context(plan, cpu.torch_device)
        made = {leaf.name: _leaf(leaf, plan.dag.batch_size) for leaf in plan.dag.batch}
        self._context.leaves = {**made} if batch is None else flatten(batch)
        self._stopwatch = _Stopwatch(cpu, len(self.mine.instructions), imagining)
        self._program = Program(
            plan=plan,
            mine=self.mine,
            device=cpu,
            state=self._state(optimizer, cpu.torch_device),
            context=self._context,
            communicators=self._communicators(imagining),
            constants={},
            recorder=self._stopwatch,
        )
        for _ in range(_WARM_UP):
            self.run()

    def run(self) -> Taken:
        """One step."""
        self._stopwatch.clear()
        self._program.run()
        self._context.take()
        return self._stopwatch.taken()

    def other_work(self) -> Iterator[tuple[int, Instruction]]:
        """What takes time beside chunks, with its position: not what chunks do on the way, nor
        copies to and from the host, which only begin.
        """
        instructions = self.mine.instructions
        done = wholly_added(instructions)
        for position, instruction in enumerate(instructions):
            host_copy = instruction.asynchronous and instruction.rendezvous() is None
            idle = not touched_bytes(self.mine, instruction)
            if not (idle or host_copy or position in done or isinstance(instruction, Compute)):
                yield position, instruction

    def _state(self, optimizer: OptimizerSpec, device: torch.device) -> ModelState:
        dag, slots = self.plan.dag, self.mine.slots
        names = sorted({i.name for i in slots if i.role in (Role.PARAMETER, Role.SHARD)})
        buffers = {i.name for i in slots if i.role is Role.BUFFER}
        parts = {i.name: i.experts for i in slots if i.experts is not None}
        slices = {
            i.name: Slice(*i.shard, experts=i.experts or (0, 1))
            for i in slots
            if i.shard is not None
        }
        for name in filter(dag.has_master, names):
            slices.setdefault(name, Slice(experts=parts.get(name, (0, 1))))
        return ModelState(
            {n: _random(dag.parameters[n].spec, self.plan.bindings) for n in names},
            {n: _random(dag.buffers[n].spec, self.plan.bindings) for n in sorted(buffers)},
            dag.parameters,
            # Groups name parameters of the whole model; how long an update takes does not depend on
            # them.
            replace(optimizer, param_groups=None, observe=None) if names else None,
            device,
            slices,
            {i.name for i in slots if i.role is Role.PARAMETER},
            dag.precision,
            parts,
        )

    def _communicators(self, imagining: Imagining) -> dict[CommunicatorId, Communicator]:
        device = self.mine.device
        return {
            info.name: AloneCommunicator(info.members.index(device), len(info.members), imagining)
            for info in self.plan.communicators
            if device in info.members
        }


class Measured:
    """The quickest run of each program so far. Chunks take their mean in the program in which that
    is least; all else the mean over all programs.
    """

    def __init__(self) -> None:
        self._quickest: dict[int, tuple[Replay, Taken, float]] = {}
        self.chunks: dict[str, float] = {}

    def add(self, replay: Replay) -> None:
        """Run *replay* once more."""
        taken = replay.run()
        self.keep(replay, taken, taken.seconds)

    def keep(self, replay: Replay, taken: Taken, seconds: float) -> None:
        """Note a run of *replay*; *seconds* says how quick it was, for instance together with a run
        of another device at the same time.
        """
        best = self._quickest.get(id(replay))
        if best is None or seconds < best[2]:
            self._quickest[id(replay)] = (replay, taken, seconds)
            self.chunks = self._chunks()

    def _chunks(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for replay, taken, _ in self._quickest.values():
            mine: dict[str, list[float]] = {}
            for instruction, seconds in zip(replay.mine.instructions, taken.work, strict=True):
                if isinstance(instruction, Compute):
                    key = chunk_key(instruction.body, replay.plan.bindings)
                    mine.setdefault(key, []).append(seconds)
            for key, times in mine.items():
                mean = sum(times) / len(times)
                found[key] = min(mean, found.get(key, mean))
        return dict(sorted(found.items()))

    def _rates(self, part: Callable[[Taken], tuple[float, ...]]) -> dict[str, Rate]:
        """Seconds per byte of everything but chunks, over all programs: what an instruction has to
        do depends on the chunks around it, too.
        """
        seconds: dict[str, float] = {}
        nbytes: dict[str, int] = {}
        for replay, taken, _ in self._quickest.values():
            spent = part(taken)
            for position, instruction in replay.other_work():
                op = instruction.op
                size = touched_bytes(replay.mine, instruction)
                seconds[op] = seconds.get(op, 0.0) + spent[position]
                nbytes[op] = nbytes.get(op, 0) + size
        return {op: Rate(0.0, seconds[op] / nbytes[op]) for op in sorted(seconds)}

    def profile(self, network: Network) -> Profile:
        """A profile of this machine."""
        messages = _exchange(network.messages)
        where = f"{platform.node()}, {platform.processor() or platform.machine()}"
        unpacking = self._rates(lambda taken: taken.unpacking)
        return Profile(
            version=VERSION,
            machine=f"{where}, {torch.get_num_threads()} threads, torch {torch.__version__}",
            chunks=self.chunks,
            # What none of the programs contains is taken to be a copy, as a message is.
            # A chunk's own additions are part of its time.
            rates={
                "*": messages.issue,
                ADDED: Rate(0.0, 0.0),
                **self._rates(lambda taken: taken.work),
            },
            unpacking={op: rate for op, rate in unpacking.items() if rate.per_byte},
            launch=LAUNCH,
            messages=messages,
            collectives={
                kind: {members: _exchange(times) for members, times in sorted(found.items())}
                for kind, found in sorted(network.collectives.items())
            },
            contention=network.contention,
        )


def _exchange(times: LinkTimes) -> Exchange:
    return Exchange(_line(times.issue), _line(times.travel))


def _line(seconds: Mapping[int, float]) -> Rate:
    """The straight line through the times of a small and a large message; it does not fall."""
    small, large = min(seconds), max(seconds)
    per_byte = max(0.0, seconds[large] - seconds[small]) / (large - small)
    return Rate(max(0.0, seconds[small] - small * per_byte), per_byte)


def _leaf(leaf: BatchLeaf, rows: int) -> torch.Tensor:
    """A batch leaf for all rows."""
    shape = [
        rows if number == leaf.batch_dim else int(str(size))
        for number, size in enumerate(leaf.spec.shape)
    ]
    return example(shape, torch_dtype(leaf.spec.dtype))


def _random(spec: TensorSpec, bindings: Mapping[str, int]) -> torch.Tensor:
    return example(spec.sizes(bindings), torch_dtype(spec.dtype))

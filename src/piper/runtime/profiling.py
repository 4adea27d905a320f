"""Measure how long the parts of a plan take on this machine: the contents of a :class:`~piper.plan.profile.Profile`.

Each device's program is run by itself, with imagined peers: chunks then find caches and memory in the state in which they find them in training,
which calling each again and again would not show (it is up to a third quicker). Of several runs the quickest counts: other work on the
machine only ever adds.
"""

import platform
from collections.abc import Callable, Mapping

import torch

from piper.devices.alone import AloneCommunicator
from piper.devices.cpu import CpuDevice
from piper.devices.links import LARGE, SMALL, LinkTimes
from piper.devices.tensors import torch_dtype
from piper.ids import DeviceId
from piper.ir.body import TensorSpec
from piper.ir.dag import BatchLeaf, Role
from piper.ops.base import Communicator, CommunicatorId
from piper.ops.compute import Compute
from piper.plan.model import Plan
from piper.plan.profile import VERSION, Profile, Rate, chunk_key
from piper.plan.work import touched_bytes
from piper.runtime.context import Context
from piper.runtime.interpreter import Program
from piper.runtime.optimizer import OptimizerSpec
from piper.runtime.slices import Slice
from piper.runtime.state import ModelState

LAUNCH = 1e-6
"""Seconds that the interpreter spends per instruction (see ``benchmarks/interpreter.py``)."""

_WARM_UP = 1


def measure_profile(
    plan: Plan,
    optimizer: OptimizerSpec,
    links: LinkTimes,
    *,
    repeats: int = 5,
    on_device: Callable[[DeviceId], None] = lambda _: None,
) -> Profile:
    """The profile of *plan* on a CPU of this machine, with torch's present number of threads. *on_device* is called before each device's
    program is run; devices whose chunks are known by then are left out.
    """
    found = Measured()
    for mine in plan.devices:
        bodies = {i.body for i in mine.instructions if isinstance(i, Compute)}
        if all(chunk_key(body, plan.bindings) in found.chunks for body in bodies):
            continue
        on_device(mine.device)
        replay = Replay(plan, mine.device, optimizer)
        for _ in range(repeats):
            found.add(replay)
    return found.profile(links)


class Replay:
    """One device's program on this thread, with imagined peers and a model of random weights."""

    def __init__(self, plan: Plan, device: DeviceId, optimizer: OptimizerSpec) -> None:
        self.plan, self.mine = plan, plan.devices[device]
        cpu = CpuDevice()
        context = Context(plan, cpu.torch_device)
        context.leaves = {leaf.name: _leaf(leaf, plan.dag.batch_size) for leaf in plan.dag.batch}
        self._context = context
        self._program = Program(
            plan=plan,
            mine=self.mine,
            device=cpu,
            state=self._state(optimizer, cpu.torch_device),
            context=context,
            communicators=self._communicators(),
            constants={},
            recorded=True,
        )
        for _ in range(_WARM_UP):
            self.run()

    def run(self) -> tuple[float, ...]:
        """Seconds of each instruction of one step; 0 for what is not local work."""
        recorder = self._program.recorder
        assert recorder is not None
        recorder.start()
        self._program.run()
        self._context.take()
        spans = recorder.spans()
        return tuple(
            0.0 if instruction.asynchronous else end - begin
            for instruction, begin, end in zip(
                self.mine.instructions, spans.begin, spans.end, strict=True
            )
        )

    def _state(self, optimizer: OptimizerSpec, device: torch.device) -> ModelState:
        dag, slots = self.plan.dag, self.mine.slots
        names = {i.name for i in slots if i.role in (Role.PARAMETER, Role.SHARD)}
        buffers = {i.name for i in slots if i.role is Role.BUFFER}
        parts = {i.name: i.experts for i in slots if i.experts is not None}
        return ModelState(
            {n: _random(dag.parameters[n].spec, self.plan.bindings) for n in sorted(names)},
            {n: _random(dag.buffers[n].spec, self.plan.bindings) for n in sorted(buffers)},
            dag.parameters,
            # Groups name parameters of the whole model; how long an update takes does not depend on them.
            OptimizerSpec(build=optimizer.build) if names else None,
            device,
            {
                i.name: Slice(*i.shard, experts=i.experts or (0, 1))
                for i in slots
                if i.shard is not None
            },
            {i.name for i in slots if i.role is Role.PARAMETER},
            experts=parts,
        )

    def _communicators(self) -> dict[CommunicatorId, Communicator]:
        device = self.mine.device
        return {
            info.name: AloneCommunicator(info.members.index(device), len(info.members))
            for info in self.plan.communicators
            if device in info.members
        }


class Measured:
    """The least of what was measured so far: per chunk, and per kind of other local work, the mean over one step."""

    def __init__(self) -> None:
        self.chunks: dict[str, float] = {}
        self._per_byte: dict[str, float] = {}

    def add(self, replay: Replay) -> None:
        """Run *replay* once more."""
        chunks: dict[str, list[float]] = {}
        seconds: dict[str, float] = {}
        nbytes: dict[str, int] = {}
        for instruction, taken in zip(replay.mine.instructions, replay.run(), strict=True):
            if isinstance(instruction, Compute):
                key = chunk_key(instruction.body, replay.plan.bindings)
                chunks.setdefault(key, []).append(taken)
            elif taken:
                size = touched_bytes(replay.mine, instruction)
                seconds[instruction.op] = seconds.get(instruction.op, 0.0) + taken
                nbytes[instruction.op] = nbytes.get(instruction.op, 0) + size
        for key, times in chunks.items():
            mean = sum(times) / len(times)
            self.chunks[key] = min(mean, self.chunks.get(key, mean))
        for op, total in seconds.items():
            rate = total / max(nbytes[op], 1)
            self._per_byte[op] = min(rate, self._per_byte.get(op, rate))

    def profile(self, links: LinkTimes) -> Profile:
        """A profile of this machine."""
        rates = {op: Rate(0.0, rate) for op, rate in sorted(self._per_byte.items())}
        sending = _line(links.issue[SMALL], links.issue[LARGE])
        where = f"{platform.node()}, {platform.processor() or platform.machine()}"
        return Profile(
            version=VERSION,
            machine=f"{where}, {torch.get_num_threads()} threads, torch {torch.__version__}",
            chunks=dict(sorted(self.chunks.items())),
            # To issue a collective is to copy its bucket, much as to send is to copy the message.
            rates={"*": sending, **rates},
            launch=LAUNCH,
            latency=links.latency,
            bandwidth=links.bandwidth,
        )


def _line(short: float, long: float) -> Rate:
    """The straight line through the times of a small and a large message; it does not fall."""
    per_byte = max(0.0, long - short) / (LARGE - SMALL)
    return Rate(max(0.0, short - SMALL * per_byte), per_byte)


def _leaf(leaf: BatchLeaf, rows: int) -> torch.Tensor:
    """A batch leaf for all rows."""
    shape = [
        rows if number == leaf.batch_dim else int(str(size))
        for number, size in enumerate(leaf.spec.shape)
    ]
    return _example(shape, torch_dtype(leaf.spec.dtype))


def _random(spec: TensorSpec, bindings: Mapping[str, int]) -> torch.Tensor:
    return _example(spec.sizes(bindings), torch_dtype(spec.dtype))


def _example(shape: tuple[int, ...] | list[int], dtype: torch.dtype) -> torch.Tensor:
    """Small random numbers; zeros for integers, which may be indices."""
    if dtype.is_floating_point or dtype.is_complex:
        return 0.02 * torch.randn(shape, dtype=dtype)
    return torch.zeros(shape, dtype=dtype)

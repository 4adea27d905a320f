"""The interpreter: binds one device's plan to closures and steps through them."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias, cast

import msgspec
import torch

from piper.devices.base import TorchDevice
from piper.devices.tensors import torch_dtype
from piper.errors import AbortedError, CommunicationError, CompileError, RunError
from piper.ids import BodyId, Slot, Stream
from piper.ir.dag import STATE, Role
from piper.ops.base import (
    AddingFunction,
    ChunkFunction,
    Communicator,
    CommunicatorId,
    Device,
    Instruction,
    RandomKey,
    State,
    StepContext,
    Tensor,
)
from piper.ops.compute import Call
from piper.plan.added import added_within
from piper.plan.model import DevicePlan, Plan, SlotInfo, freed_behind
from piper.runtime.code import AddingCode, ChunkCode, adding_function, chunk_function
from piper.runtime.compiled import Compilation, compiled_function
from piper.runtime.context import Context
from piper.runtime.record import Recorder
from piper.runtime.state import ModelState
from piper.runtime.warm_up import warm_up

Closure: TypeAlias = Callable[[], None]


class Binding:
    """What instructions see of the device while they are bound. Implements
    :class:`~piper.ops.base.Runtime`.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        device: TorchDevice,
        state: ModelState,
        context: Context,
        communicators: Mapping[CommunicatorId, Communicator],
        slots: Sequence[torch.Tensor | None],
        compilation: Compilation = Compilation.OFF,
    ) -> None:
        self.slots: list[Tensor | None] = [*slots]
        # The ops layer is free of torch: its tensors are opaque, ours are torch's.
        self.device: Device = device
        self.state: State = cast("State", state)
        self.context: StepContext = cast("StepContext", context)
        self._plan = plan
        self._torch_device = device.torch_device
        self._communicators = communicators
        self._compilation = compilation
        self._functions: dict[BodyId, ChunkFunction] = {}

    def function(self, body: BodyId) -> ChunkFunction:
        """The code of a body, sizes bound."""
        function = self._functions.get(body)
        if function is None:
            function = self._functions[body] = cast("ChunkFunction", self.code(body))
        return function

    def code(self, body: BodyId) -> ChunkCode:
        """The code of a body, as torch's functions see it."""
        dag, bindings, device = self._plan.dag, self._plan.bindings, self._torch_device
        if self._compilation is Compilation.OFF:
            return chunk_function(dag.bodies[body], bindings, device)
        nodes = dag.nodes.values()
        chunk = next(n for n in nodes if isinstance(n.work, Call) and n.work.body == body)
        fallback = self._compilation is Compilation.FALLBACK
        return compiled_function(dag.bodies[body], bindings, device, chunk.label, fallback=fallback)

    def adding_function(self, body: BodyId, added: tuple[int, ...]) -> AddingFunction:
        """The same, adding the outputs at the positions *added* to totals."""
        if self._compilation is not Compilation.OFF:
            return cast("AddingFunction", _adding_afterwards(self.code(body), added))
        dag, bindings, device = self._plan.dag, self._plan.bindings, self._torch_device
        return cast("AddingFunction", adding_function(dag.bodies[body], bindings, device, added))

    def communicator(self, name: CommunicatorId) -> Communicator:
        """A communicator of which this device is a member."""
        return self._communicators[name]


def _adding_afterwards(code: ChunkCode, added: tuple[int, ...]) -> AddingCode:
    """*code*, which makes all outputs at once, and then the additions."""

    def run(
        inputs: list[torch.Tensor], key: RandomKey | None, totals: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        outputs = code(inputs, key)
        for position, total in zip(added, totals, strict=True):
            total.add_(outputs[position])
        return [output for i, output in enumerate(outputs) if i not in added]

    return run


@dataclass(frozen=True, slots=True)
class Step:
    """One closure, and the instruction that it belongs to (for errors)."""

    run: Closure
    instruction: Instruction


class Program:
    """One device's plan, bound: :meth:`run` executes one training step.

    *constants* are buffers that this plan alone has. *compilation* says whether chunks are
    compiled; they are when the program is made, which may raise :class:`CompileError`. *recorded*:
    the closures note when they run, for :attr:`recorder`; *ranges*: they are ranges of torch's
    profiler too. *recorder* takes the place of a new one.

    Raises :class:`RunError` for whatever an instruction raised, naming device, node, microbatch and
    instruction, with the original as its cause; :class:`CompileError` keeps its class, and
    :class:`CommunicationError` and :class:`AbortedError`, since they are mostly the consequence of
    another device's failure.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        mine: DevicePlan,
        device: TorchDevice,
        state: ModelState,
        context: Context,
        communicators: Mapping[CommunicatorId, Communicator],
        constants: Mapping[str, torch.Tensor],
        compilation: Compilation = Compilation.OFF,
        recorded: bool = False,
        ranges: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        self._plan = plan
        self._mine = mine
        self._device = device
        self._context = context
        slots = [_initial(info, plan, state, constants, device) for info in mine.slots]
        self._scaled = [
            (tensor, _UNSCALED[info.role](plan))
            for info, tensor in zip(mine.slots, slots, strict=True)
            if tensor is not None and info.role in _UNSCALED
        ]
        self._loss_scale = 1.0
        binding = Binding(
            plan=plan,
            device=device,
            state=state,
            context=context,
            communicators=communicators,
            slots=slots,
            compilation=compilation,
        )
        self._slots = binding.slots
        self._transient = [n for n, i in enumerate(mine.slots) if i.role not in STATE]
        if compilation is not Compilation.OFF:
            warm_up(mine, slots, binding.code, device.torch_device)
        self.recorder = recorder
        if recorded and recorder is None:
            count = len(mine.instructions)
            self.recorder = Recorder(device, count, self._range_name, ranges=ranges)
        self._steps = list(_bind(mine.instructions, binding, self.recorder))
        self._closures = [step.run for step in self._steps]

    def run(self) -> None:
        """Execute the step; afterwards everything is complete and all slots but the state's are
        empty.
        """
        position = -1
        try:
            with torch.no_grad():
                self._scale_seeds()
                for position, closure in enumerate(self._closures):  # noqa: B007 (read on failure)
                    closure()
                position = len(self._closures)
                self._device.synchronize()
        except Exception as error:
            failure = self._failure(position, error)
            self._abandon()
            raise failure from error
        self._check_empty()

    def _scale_seeds(self) -> None:
        """Let the step's gradients be as many times as large as the context says."""
        if self._context.loss_scale == self._loss_scale:
            return
        self._loss_scale = self._context.loss_scale
        for tensor, unscaled in self._scaled:
            tensor.fill_(unscaled * self._loss_scale)

    def _range_name(self, instruction: Instruction) -> str:
        node = self._plan.dag.nodes.get(instruction.node)
        return instruction.op if node is None else f"{instruction.op} {node.label}"

    def _abandon(self) -> None:
        self._device.abandon()
        for slot in self._transient:
            self._slots[slot] = None

    def _check_empty(self) -> None:
        slots = self._slots
        full = [slot for slot in self._transient if slots[slot] is not None]
        assert not full, (
            f"device {self._mine.device}: slots {full[:10]} are not empty after the step: the verifier should have "
            f"refused this plan"
        )

    def _failure(self, position: int, error: Exception) -> RunError:
        where = f"device {self._mine.device}, at the end of the step"
        if position < len(self._steps):
            where = self._where(self._steps[position].instruction)
        # Without the interpreter's own frame, which says nothing.
        frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
        text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
        return failure_class(error)(f"{where}: {type(error).__name__}: {error}\n{text}")

    def _where(self, instruction: Instruction) -> str:
        device, dag = self._mine.device, self._plan.dag
        node = dag.nodes.get(instruction.node)
        parts = [f"device {device}"]
        if node is not None:
            parts.append(f"node {node.label}")
        microbatch = msgspec.structs.asdict(instruction).get("microbatch")
        if microbatch is None and node is not None and dag.is_split(node.tags):
            microbatch = dag.microbatch(node.tags)
        if microbatch is not None:
            parts.append(f"microbatch {microbatch}")
        return f"{', '.join(parts)}, instruction `{instruction.describe()}`"


def failure_class(error: BaseException) -> type[RunError]:
    """The class in which a worker's failure is reported."""
    for kind in (AbortedError, CommunicationError, CompileError):
        if isinstance(error, kind):
            return kind
    return RunError


_UNSCALED: Mapping[Role, Callable[[Plan], float]] = {
    Role.SEED: lambda plan: plan.seed_value,
    Role.SCALE: lambda _plan: 1.0,
}
"""State that is multiplied by the scale of the step's loss, and what it is without."""


def _initial(
    info: SlotInfo,
    plan: Plan,
    state: ModelState,
    constants: Mapping[str, torch.Tensor],
    device: TorchDevice,
) -> torch.Tensor | None:
    if info.role not in STATE:
        return None
    if info.name in constants and info.role is Role.BUFFER:
        return constants[info.name].to(device.torch_device)
    if info.role is Role.SHARD:
        return state.shard(info.name)
    if info.role is Role.KEPT:
        return state.kept(info.name, info.message.shape, torch_dtype(info.message.dtype))
    if info.role not in _UNSCALED:
        return state.tensor(info.name)
    return torch.full(
        info.message.shape,
        _UNSCALED[info.role](plan),
        dtype=torch_dtype(info.message.dtype),
        device=device.torch_device,
    )


def _nothing() -> None:
    """Only the event is of interest."""


def _bind(
    instructions: Sequence[Instruction], binding: Binding, recorder: Recorder | None = None
) -> list[Step]:
    """The closures of *instructions*, with the waits that order work within one stream."""
    device = binding.device
    flying: dict[Stream, set[Slot]] = {}
    added = added_within(instructions)
    steps: list[Step] = []
    for number, instruction in enumerate(instructions):
        stream = instruction.stream
        written = flying.setdefault(stream, set())
        touched = chain(instruction.reads(), instruction.writes(), instruction.frees())
        if written and not written.isdisjoint(touched):
            written.clear()
            if (settle := device.after_stream(stream)) is not None:
                steps.append(Step(settle, instruction))
        # Where the device gives memory up itself, nothing is emptied before its stream is done.
        kept = device.releaser(stream) is not None
        dying = frozenset[Slot]() if kept else freed_behind(instructions, number)
        launch = instruction.bind_last(binding, dying, added.get(number, {}))
        if launch is None:
            if instruction.record is None:
                continue
            launch = _nothing
        elif recorder is not None and (instruction.reads() or instruction.writes()):
            launch = recorder.around(number, instruction, launch)
        if instruction.asynchronous:
            written.update(instruction.writes())
        closure = device.on_stream(
            stream, launch, instruction.record, asynchronous=instruction.asynchronous
        )
        steps.append(Step(closure, instruction))
    return steps

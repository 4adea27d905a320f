"""What runs on each device: its plans, its state, and whole runs of steps."""

import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from piper.boundary import shown
from piper.devices.base import TorchDevice
from piper.errors import RunError
from piper.ids import DeviceId
from piper.ir.dag import ElementTypes, Parameter
from piper.ops.base import Communicator, CommunicatorId
from piper.plan.model import DevicePlan, Plan
from piper.runtime.batch import (
    Batch,
    Data,
    Signature,
    digest,
    flatten,
    signature_of,
)
from piper.runtime.checkpoint.reader import Checkpoint
from piper.runtime.checkpoint.writer import Refusal, WrittenFile, write_file
from piper.runtime.compiled import Compilation
from piper.runtime.context import Context
from piper.runtime.interpreter import Program
from piper.runtime.optimizer import OptimizerSpec
from piper.runtime.record import Clock, Spans, read_clock
from piper.runtime.slices import Form, Slice
from piper.runtime.snapshot import StateSnapshot
from piper.runtime.state import ModelState, Weights

CommunicatorFactory: TypeAlias = Callable[[CommunicatorId, tuple[DeviceId, ...]], Communicator]
"""Makes this device's end; every member makes its own at the same point of the same sequence of
calls.
"""

CONTROL: CommunicatorId = "control"
"""The communicator over all devices on which they agree whether to run a step."""


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """What one device reports of one step: scalars by name and global microbatch, and the time it
    took in seconds.
    """

    step: int
    values: dict[str, dict[int, float]]
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """Steps whose instructions were recorded, in order, with what each reported."""

    steps: tuple[WorkerStep, ...]
    spans: tuple[Spans, ...]


@dataclass(frozen=True, slots=True)
class WorkerRun:
    """The completed steps; ``stopped_at`` as in a backend's result, ``signature`` only from a
    device that saw the batch.
    """

    steps: tuple[WorkerStep, ...]
    stopped_at: int | None = None
    signature: Signature | None = None


@dataclass(slots=True)
class Loaded:
    """A plan on this worker; ``program`` exists once there is state."""

    plan: Plan
    mine: DevicePlan
    signature: Signature
    constants: Mapping[str, torch.Tensor]
    context: Context
    loads: bool
    compilation: Compilation
    program: Program | None = None


@dataclass(frozen=True, slots=True)
class _MadeFor:
    """What the state is made for, however it is held."""

    parameters: Mapping[str, Parameter]
    buffers: Container[str]
    precision: ElementTypes | None
    optimizer: OptimizerSpec | None


class Worker:
    """One device. All workers receive the same calls in the same order."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: Callable[[], TorchDevice],
        communicators: CommunicatorFactory,
    ) -> None:
        self._rank = rank
        self._everyone = tuple(DeviceId(r) for r in range(world_size))
        self._make_device = device
        self._make_communicator = communicators
        self._communicators: dict[CommunicatorId, Communicator] = {}
        self._plans: dict[str, Loaded] = {}
        self._state: ModelState | None = None
        self._made_for: _MadeFor | None = None

    def load(
        self,
        key: str,
        plan: Plan,
        mine: DevicePlan,
        signature: Signature,
        constants: Mapping[str, torch.Tensor],
        compilation: Compilation = Compilation.OFF,
    ) -> None:
        """Make *mine*, the part of *plan* for this device, ready to run; *constants* are buffers
        that only this plan has, *compilation* says whether its chunks are compiled.

        Of *plan* are read: the bindings and numbers, the communicators, and the DAG's nodes,
        bodies, state, batch and splits.
        """
        for info in plan.communicators:
            if self._rank in info.members:
                self._join(info.name, info.members)
        if len(self._everyone) > 1:
            self._join(CONTROL, self._everyone)
        device = self._make_device()
        context = Context(plan, device.torch_device)
        loads = any(i.loads() is not None for i in mine.instructions)
        loaded = Loaded(plan, mine, signature, constants, context, loads, compilation)
        self._plans[key] = loaded
        if self._state is not None:
            loaded.program = self._program(loaded, device, self._state)

    def unload(self, key: str) -> None:
        """Forget plan *key*."""
        del self._plans[key]

    def initialise(
        self,
        key: str,
        weights: Weights,
        forms: Mapping[str, Form],
        optimizer: OptimizerSpec | None,
    ) -> None:
        """Hold the parameters and buffers of plan *key* in the given forms, and an optimizer for
        them.
        """
        dag = self._plans[key].plan.dag
        self._made_for = _MadeFor(dag.parameters, dag.buffers, dag.precision, optimizer)
        tensors = weights(list(forms)) if callable(weights) else weights
        self._state = self._new_state(tensors, forms)
        for loaded in self._plans.values():
            loaded.program = self._program(loaded, self._make_device(), self._state)

    def hold(self, forms: Mapping[str, Form], snapshot: StateSnapshot) -> None:
        """Hold parameters and buffers in other *forms* from now on, with the values and the
        optimizer state of *snapshot*, which has all of them. Kept gradients stay.
        """
        assert self._state is not None
        kept = self._state
        for loaded in self._plans.values():
            loaded.program = None  # they refer to the tensors that were held
        self._state = self._new_state({**snapshot.parameters, **snapshot.buffers}, forms)
        self._state.restore(snapshot)
        self._state.keep_as(kept)

    def _new_state(
        self, tensors: Mapping[str, torch.Tensor], forms: Mapping[str, Form]
    ) -> ModelState:
        made_for = self._made_for
        assert made_for is not None
        return ModelState(
            {name: tensors[name] for name in forms if name in made_for.parameters},
            {name: tensors[name] for name in forms if name in made_for.buffers},
            made_for.parameters,
            made_for.optimizer,
            self._make_device().torch_device,
            {
                name: Slice(*form.shard, experts=form.experts or (0, 1))
                for name, form in forms.items()
                if form.shard is not None
            },
            {name for name, form in forms.items() if form.whole},
            made_for.precision,
            {n: form.experts for n, form in forms.items() if form.experts is not None},
        )

    def _ready(self, loaded: Loaded) -> Program:
        """The program of a plan, made anew if what is held has changed."""
        assert self._state is not None, "run before initialise"
        if loaded.program is None:
            loaded.program = self._program(loaded, self._make_device(), self._state)
        return loaded.program

    def run(
        self,
        key: str,
        data: Data | None,
        *,
        first_step: int,
        num_steps: int,
        seed: int,
        agree: bool,
        loss_scale: float = 1.0,
        lr_factors: Sequence[float] | None = None,
    ) -> WorkerRun:
        """Run steps of plan *key*. *data* is only needed where inputs are loaded. Every backward
        starts from *loss_scale* times its usual gradient; *lr_factors*, one per step, multiply the
        learning rates.

        With *agree* the devices check before each step that every one of them has a batch of the
        plan's signature.
        """
        loaded = self._plans[key]
        program = self._ready(loaded)
        done: list[WorkerStep] = []
        for step in range(first_step, first_step + num_steps):
            began = time.perf_counter()
            found = self._load_batch(loaded, data, step)
            if agree and self._someone_stops(loaded, found, step):
                loaded.context.leaves = {}
                return WorkerRun(tuple(done), step, found)
            assert agree or found is None, "the driver checked the batch"
            factor = 1.0 if lr_factors is None else lr_factors[step - first_step]
            done.append(self._step(loaded, program, step, seed, loss_scale, factor, began))
        return WorkerRun(tuple(done))

    def profile(
        self,
        key: str,
        data: Data | None,
        *,
        first_step: int,
        num_steps: int,
        seed: int,
        loss_scale: float = 1.0,
        lr_factors: Sequence[float] | None = None,
        ranges: bool,
    ) -> WorkerProfile:
        """Like :meth:`run`, on batches that the driver checked, with every instruction recorded."""
        loaded = self._plans[key]
        assert self._state is not None
        program = self._program(
            loaded, self._make_device(), self._state, recorded=True, ranges=ranges
        )
        assert program.recorder is not None
        done: list[WorkerStep] = []
        spans: list[Spans] = []
        for step in range(first_step, first_step + num_steps):
            began = time.perf_counter()
            found = self._load_batch(loaded, data, step)
            assert found is None, "the driver checked the batch"
            program.recorder.start()
            factor = 1.0 if lr_factors is None else lr_factors[step - first_step]
            done.append(self._step(loaded, program, step, seed, loss_scale, factor, began))
            spans.append(program.recorder.spans())
        return WorkerProfile(tuple(done), tuple(spans))

    def clock(self) -> Clock:
        """This process's clock."""
        return read_clock()

    def _step(
        self,
        loaded: Loaded,
        program: Program,
        step: int,
        seed: int,
        loss_scale: float,
        lr_factor: float,
        began: float,
    ) -> WorkerStep:
        """One step, whose batch is in the context."""
        assert self._state is not None
        self._state.begin_step(lr_factor)
        loaded.context.step, loaded.context.seed = step, seed
        loaded.context.loss_scale = loss_scale
        program.run()
        loaded.context.leaves = {}
        seconds = time.perf_counter() - began
        return WorkerStep(step, loaded.context.take(), seconds)

    def snapshot(
        self, names: Sequence[str], *, optimizer: bool, everything: bool = False
    ) -> StateSnapshot:
        """Copies of the named tensors, which this device holds."""
        assert self._state is not None
        return self._state.snapshot(names, optimizer=optimizer, everything=everything)

    def restore(self, snapshot: StateSnapshot) -> None:
        """Overwrite the state."""
        assert self._state is not None
        self._state.restore(snapshot)

    def write_file(self, folder: Path, names: Sequence[str]) -> WrittenFile | Refusal:
        """Write the named tensors, which this device holds, with the optimizer's state for them,
        into its file of a checkpoint.
        """
        assert self._state is not None
        return write_file(folder, self._rank, self._state, names)

    def check_files(self, checkpoint: Checkpoint, files: Sequence[int]) -> Refusal | None:
        """Whether the numbered files are what was written, and of this device's class of
        optimizer.
        """
        assert self._state is not None
        saved, mine = checkpoint.index.optimizer, self._state.optimizer_kind
        if saved is not None and mine is not None and saved.kind != mine:
            return Refusal(
                f"{checkpoint.path}: expected the state of {mine}, which this trainer has, found that of {saved.kind}; compile with that "
                "optimizer, or take only the weights (init=piper.Checkpoint.open(path).weights)"
            )
        damage = checkpoint.damage(files)
        return None if damage is None else Refusal(damage)

    def read_files(self, checkpoint: Checkpoint) -> None:
        """Overwrite the state with the checkpoint's."""
        assert self._state is not None
        with ExitStack() as stack:
            self._state.restore(checkpoint.snapshot(stack))

    def _join(self, name: CommunicatorId, members: tuple[DeviceId, ...]) -> None:
        if name not in self._communicators:
            self._communicators[name] = self._make_communicator(name, members)

    def _program(
        self,
        loaded: Loaded,
        device: TorchDevice,
        state: ModelState,
        *,
        recorded: bool = False,
        ranges: bool = False,
    ) -> Program:
        return Program(
            plan=loaded.plan,
            mine=loaded.mine,
            device=device,
            state=state,
            context=loaded.context,
            communicators=self._communicators,
            constants=loaded.constants,
            compilation=loaded.compilation,
            recorded=recorded,
            ranges=ranges,
        )

    def _load_batch(self, loaded: Loaded, data: Data | None, step: int) -> Signature | None:
        """Put the batch of *step* into the context; its signature if that is not the plan's."""
        if not loaded.loads:
            return None
        assert data is not None, "this device loads inputs and was given no data"
        try:
            batch: Batch = data(step)
            leaves = flatten(batch)
            found = signature_of(leaves)
        except Exception as error:
            raise RunError(
                f"device {self._rank}: the batch of step {step} could not be loaded: {type(error).__name__}: {error}\n{shown(error)}"
            ) from error
        loaded.context.leaves = leaves
        return None if found == loaded.signature else found

    def _someone_stops(self, loaded: Loaded, found: Signature | None, step: int) -> bool:
        """Whether any device *found* a signature that is not the plan's.

        Raises :class:`RunError` when the devices that load inputs were given different batches:
        inputs of one would meet targets of another.
        """
        if len(self._everyone) == 1:
            return found is not None
        mine = digest(loaded.context.leaves) if loaded.loads else 0
        sums = torch.tensor([found is not None, loaded.loads, mine], dtype=torch.int64)
        self._communicators[CONTROL].all_reduce(sums).wait()
        stopping, loading, total = sums.tolist()
        if stopping:
            return True
        if loaded.loads and mine * loading != total:
            raise RunError(
                f"device {self._rank}: data({step}) returned other tensors here than on another device. Every device that loads "
                "inputs calls it, so it must depend on the step alone: not on an iterator, a global random state or the time. "
                "For an iterable, pass the iterable itself"
            )
        return False

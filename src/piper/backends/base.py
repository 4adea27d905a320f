"""What the API needs from a backend.

A backend owns one worker per device. The driver loads plans, gives the workers their state and runs
steps; whatever a step needs was shipped before it. One driver thread uses a backend at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

import torch

from piper.errors import (
    ConfigError,
)
from piper.plan.model import Plan
from piper.registry import Registry
from piper.runtime.batch import Batch, Data, Signature
from piper.runtime.checkpoint.reader import Checkpoint
from piper.runtime.checkpoint.writer import WrittenFile
from piper.runtime.compiled import Compilation
from piper.runtime.optimizer import OptimizerSpec
from piper.runtime.record import Spans
from piper.runtime.snapshot import StateSnapshot
from piper.runtime.state import Weights

PlanKey: TypeAlias = str
"""The driver's name for a loaded plan."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the workers reported of one step.

    ``values[name][microbatch]`` is a reported scalar: ``loss`` and, for a weighted loss,
    ``weight``, by global microbatch number. ``seconds`` is the time of the slowest worker.
    """

    step: int
    values: dict[str, dict[int, float]]
    seconds: float


@dataclass(frozen=True, slots=True)
class RunResult:
    """The completed steps, in order.

    ``stopped_at`` is the step whose batch did not have the plan's signature, with the ``signature``
    that was found; no device has begun that step. Both are ``None`` when all steps were run.
    """

    steps: tuple[StepResult, ...]
    stopped_at: int | None = None
    signature: Signature | None = None


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Recorded steps, in order.

    ``spans[step][device]`` says when each instruction ran, on the clock of device 0.
    ``clock_error`` (seconds) bounds how far another device's times may be off: 0 where all workers
    share one clock.
    """

    steps: tuple[StepResult, ...]
    spans: tuple[tuple[Spans, ...], ...]
    clock_error: float


@runtime_checkable
class Backend(Protocol):
    """Runs plans on devices. Use: ``start``, ``load``, ``initialise``, then anything, at last
    ``close``.

    Every method raises the root cause of what failed on a worker: a :class:`~piper.errors.RunError`
    that names device, node, microbatch and instruction, with the original traceback in its text.
    After that the backend is closed: no worker is left, every later call raises
    :class:`~piper.errors.RunError` that says why.
    """

    def start(self, num_devices: int) -> None:
        """Start one worker per device.

        Raises :class:`~piper.errors.ConfigError` before any worker is started when there are too
        few devices.
        """

    def load(
        self,
        key: PlanKey,
        plan: Plan,
        signature: Signature,
        constants: Mapping[str, torch.Tensor] | None = None,
        compilation: Compilation = Compilation.OFF,
    ) -> None:
        """Ship *plan*, for global batches of *signature*, to all workers under *key* and make it
        ready to run.

        *constants* are the values of buffers that this plan alone has (tensors that capture found);
        they belong to the plan, not to the state. A plan loaded after ``initialise`` may use
        parameters and buffers elsewhere, or sliced in another way, than the first: the state moves
        before its steps. *compilation* says whether chunks are
        compiled: here, or by ``initialise`` for plans loaded before it. A failure is a
        :class:`~piper.errors.CompileError`.
        """

    def unload(self, key: PlanKey) -> None:
        """Forget the loaded plan *key* on all workers; the state stays."""

    def initialise(
        self, key: PlanKey, weights: Weights, optimizer: OptimizerSpec | None = None
    ) -> None:
        """Give every device the parameters and buffers that the loaded plan *key* uses there, and
        an optimizer for them.

        What the plan uses nowhere is held by device 0, so that the snapshot is complete. *weights*
        is a mapping of tensors by name, or a function from names to such a mapping that the workers
        call.
        """

    def run(
        self,
        key: PlanKey,
        data: Data | Sequence[Batch],
        *,
        first_step: int,
        num_steps: int | None = None,
        seed: int = 0,
        loss_scale: float = 1.0,
        lr_factors: Sequence[float] | None = None,
    ) -> RunResult:
        """Run steps ``first_step`` to ``first_step + num_steps - 1`` of plan *key*, one call per
        worker.

        *data* is a list of global batches, one per step (*num_steps* may be left out), or a
        function of the step that is called by the workers that load inputs. A step whose batch has
        another signature than the plan ends the run before that step, on all devices alike.
        *loss_scale* is what a plan whose loss is scaled scales it by, in all of these steps;
        *lr_factors*, one per step (default: all 1), multiply the optimizer's learning rates.
        """

    def profile(
        self,
        key: PlanKey,
        batches: Sequence[Batch],
        *,
        first_step: int,
        seed: int = 0,
        loss_scale: float = 1.0,
        lr_factors: Sequence[float] | None = None,
        ranges: bool = False,
    ) -> RecordedRun:
        """Like :meth:`run` on *batches*, which have the plan's signature, with every instruction's
        start and end recorded; *ranges*: they are ranges of torch's profiler too.
        """

    def snapshot(self, *, optimizer: bool = True) -> StateSnapshot:
        """Parameters, buffers and optimizer state by name, on the CPU, each tensor a copy."""

    def copies(self) -> list[StateSnapshot]:
        """Everything that each device holds, by device: several devices may hold one name."""

    def restore(self, snapshot: StateSnapshot) -> None:
        """Overwrite the devices' state with *snapshot*, whatever layout it was taken from.

        Raises :class:`~piper.errors.StateError` for missing, unexpected or misshapen entries,
        before anything is changed.
        """

    def write_files(self, folder: Path) -> tuple[WrittenFile, ...]:
        """Let each device write its file of a checkpoint into *folder*, which all share: what it
        owns of the state.

        Raises :class:`~piper.errors.CheckpointError` when one cannot, after which the backend is as
        before.
        """

    def read_files(self, checkpoint: Checkpoint) -> None:
        """Overwrite the devices' state with *checkpoint*, whatever layout it was written under; its
        names and shapes were checked.

        Raises :class:`~piper.errors.CheckpointError`, before anything is changed, for damaged files
        and another class of optimizer.
        """

    def close(self) -> None:
        """Stop all workers and give back everything. May be called twice."""


BackendFactory: TypeAlias = Callable[..., Backend]

BACKENDS: Registry[BackendFactory] = Registry("backend", ConfigError)
"""By name; a factory takes the backend's options as keywords."""

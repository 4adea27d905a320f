"""Trainer: runs a compiled strategy."""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from piper.api.checkpoint import check_fits, save_checkpoint
from piper.api.interrupts import late_interrupts
from piper.api.kinds import KEPT
from piper.api.left_out import warn_of_left_out
from piper.api.loss_scaler import LossScaler, is_skipped
from piper.api.programs import Program, Programs
from piper.api.rates import Rates
from piper.api.rows import Rows
from piper.api.user_names import snapshot_from, user_state
from piper.backends.base import Backend, StepResult
from piper.boundary import public
from piper.brief import brief, count
from piper.capture.forms import Paired
from piper.errors import BatchError, ConfigError, Interrupted, StateError
from piper.ids import DeviceId
from piper.ir.dag import Dag, GradientUse, LossKind, Role
from piper.plan.account import account
from piper.plan.model import Plan
from piper.runtime.batch import Batch, Data
from piper.runtime.checkpoint.reader import Checkpoint
from piper.runtime.compiled import Compilation
from piper.runtime.elementwise import check_optimizer
from piper.runtime.global_random import same_random_numbers
from piper.runtime.optimizer import OptimizerSpec
from piper.runtime.snapshot import StateSnapshot
from piper.runtime.state import Weights
from piper.simulate.measured import measured_timeline
from piper.simulate.timeline import Timeline

BATCHES_PER_CALL = 16
"""Batches of an iterable that are shipped to the workers at once."""

SECONDS_PER_CALL = 1.0
"""About how long one call to the workers lasts in ``fit``: progress is seen this often."""

_PART_OF_INPUTS = object()
"""In place of the targets, where the first argument is the whole batch."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What one step (or one evaluation) computed.

    ``loss`` is that of the global batch; ``seconds`` the time of the slowest worker; ``tokens`` the
    number of elements of the targets' first tensor if those are integers, else the rows of the
    batch. ``grad_norm`` is the norm of all gradients before they were clipped, where
    ``max_grad_norm`` was given, or the loss is scaled, and parameters were updated. Where it is,
    ``loss_scale`` is what it was scaled by in this step, and ``skipped`` says that some gradient
    was not finite, so that nothing was updated.
    """

    step: int
    loss: float
    seconds: float
    tokens: int
    grad_norm: float | None = None
    loss_scale: float | None = None
    skipped: bool = False

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the step."""
        return self.tokens / self.seconds if self.seconds else math.inf


def _brief_trainer(it: "Trainer") -> str:
    return f"{'closed' if it._closed else 'open'}, {count(it._step, 'step')} done, {it._train.plan!r} on {type(it._backend).__name__}"  # noqa: SLF001


@brief(_brief_trainer)
@public
class Trainer:
    """Made by :func:`piper.compile`; a context manager. The user's model is not trained in place:
    see :meth:`copy_to`.

    Ctrl-C in one of its methods ends the call between two steps, with
    :class:`~piper.errors.Interrupted`: the trainer stays usable. A second Ctrl-C aborts the step that
    is under way, and closes the trainer. One that nothing refers to any more closes itself.

    ``loss_scaler`` has the scale of the loss, if that is scaled; its state is not part of
    :meth:`state_dict`, but of a checkpoint.
    """

    def __init__(
        self,
        programs: Programs,
        program: Program,
        backend: Backend,
        weights: Weights,
        optimizer: OptimizerSpec | None,
        seed: int,
        compilation: Compilation = Compilation.OFF,
        lr_schedule: Callable[[int], float] | None = None,
    ) -> None:
        warn_of_left_out(program.plan.dag, programs.strategy)
        self._programs, self._backend, self._seed = programs, backend, seed
        self._state_of = program.plan.dag  # what the workers' state was made for
        self._rates = Rates(lr_schedule)
        self._groups: list[tuple[str, ...]] = []
        self._rated = False  # whether every group of the optimizer has a learning rate
        self._has_optimizer = optimizer is not None
        self._optimizer = optimizer
        self._cut: set[str] = set()  # parameters that the optimizer was seen to update in parts
        self._compilation = compilation
        self._train = program
        self._trained = _trained(program)
        self._loaded: dict[str, None] = {}  # keys, in the order of their last use
        self._step = 0
        # Parameters with gradients of steps that updated nothing, and the devices that keep some.
        self._kept: set[tuple[str, DeviceId]] = set()
        self._kept_steps = 0
        self._closed: str | None = None  # why it is
        policy = None if programs.precision is None else programs.precision.loss_scale
        self.loss_scaler = None if policy is None else LossScaler(policy)
        if not isinstance(seed, int):
            raise ConfigError(f"seed is an integer, found {seed!r}")
        if optimizer is not None:
            dag = program.plan.dag
            self._cut = _cut(dag)
            with same_random_numbers():
                plan, updates = program.plan, _most_updates(program.plan)
                found = check_optimizer(
                    optimizer, dag.parameters, self._cut, plan.num_devices, updates
                )
            self._groups = found.group_names
            self._rated = all("lr" in group for group in found.groups)
            if not self._rates.fixed:
                self._require_rates("lr_schedule=")
        # Where nobody refers to a trainer any more, its workers shall not hold their places.
        weakref.finalize(self, backend.close).atexit = False
        with self._closing_on_error(), same_random_numbers():
            backend.start(program.plan.num_devices)
            self._load(program)
            backend.initialise(program.key, weights, optimizer)

    @property
    def dag(self) -> Dag:
        """The training DAG that the workers execute."""
        return self._train.plan.dag

    @property
    def program(self) -> Program:
        """The plan that ran last, with the batch signature that it is for."""
        return self._train

    @property
    def lr_factor(self) -> float:
        """Multiplies the learning rates, besides ``lr_schedule``, from the next step on; at first
        1. For rates that depend on how training goes (when the loss of an evaluation has stopped
        falling: ``trainer.lr_factor *= 0.1``). A checkpoint has it.

        In :meth:`fit` it may be set by the data or by *on_steps*; it holds for the steps of the
        next call to the workers. Setting raises :class:`ConfigError` for anything but a finite
        number of at least 0, and :class:`StateError` without an optimizer.
        """
        return self._rates.factor

    @lr_factor.setter
    def lr_factor(self, value: float) -> None:
        self._require_optimizer()
        self._require_rates("lr_factor")
        self._rates.factor = value

    @property
    def steps_done(self) -> int:
        """Optimizer steps so far, those that were skipped included: data and schedules go on."""
        return self._step

    def step(
        self, inputs: object, targets: object = _PART_OF_INPUTS, *, update: bool = True
    ) -> TrainResult:
        """One training step on the global batch ``(inputs, targets)``; equal to single-process
        training on it.

        Called with one argument, that is the batch: a pair, or one mapping of all arguments of the
        model, see :func:`piper.compile`.

        With ``update=False`` nothing is updated and no optimizer step counted: the gradients are
        kept, and the next step that updates adds them to its own, as several calls of ``backward``
        do. Each step's gradients are those of its own loss, a mean or a sum over weights; adding
        changes none of them. What is clipped is the sum. The random numbers of each call are its
        own. Kept gradients are not part of any saved state: :meth:`load_state_dict` and
        :meth:`close` drop them. Each device keeps what it has summed itself: what is reduced once
        per step is so in the step that updates only (as under DDP's ``no_sync``). With ZeRO-1 whole
        gradients are kept for that; ZeRO-2 and 3, which never hold a whole gradient, reduce-scatter
        in every step and keep slices.

        A batch of new shapes or constants is captured and planned first. Raises :class:`BatchError`
        or :class:`SplitError` for a batch that does not fit the strategy, or under which a device
        that keeps a gradient of some parameter computes none, :class:`RunError` for a failure on a
        device.
        """
        results: list[TrainResult] = []
        with self._interruptible(results):
            if update:
                self._require_optimizer()
                self._run(self._batch(inputs, targets), results)
            else:
                self._keep(self._batch(inputs, targets), results)
        return results[0]

    def fit(
        self,
        data: Callable[[int], object] | Iterable[object],
        steps: int,
        on_steps: Callable[[Sequence[TrainResult]], None] | None = None,
    ) -> list[TrainResult]:
        """*steps* training steps.

        *data* is ``data(step) -> (inputs, targets)``, picklable, called by the workers that read
        inputs (*step* counts all steps of this trainer); or an iterable of global batches such as a
        DataLoader. Either may give one mapping per batch, as Hugging Face's collators do. Many
        steps are one call to the workers; *on_steps* receives the results about once a second.

        After a Ctrl-C the steps under way are completed, then :class:`~piper.errors.Interrupted` is
        raised, whose ``results`` are those of all steps that were done: :meth:`save`, or another
        ``fit``, goes on from there.
        """
        if not isinstance(steps, int) or steps < 0:
            raise BatchError(f"steps is an integer of at least 0, found {steps!r}")
        self._require_optimizer()
        if not callable(data) and not isinstance(data, Iterable):
            raise BatchError(
                f"data is a function data(step) -> (inputs, targets), or an iterable of such pairs, found {type(data).__name__}"
            )
        pair = self._programs.pair
        results: list[TrainResult] = []
        if callable(data):
            calls = self._pulled(Paired(data, self._programs.own_loss), steps, results)
        else:
            calls = self._pushed((pair(batch) for batch in data), steps, results)
        reported = 0
        with self._interruptible(results):
            try:
                for _ in calls:
                    new, reported = results[reported:], len(results)
                    if on_steps is not None:
                        on_steps(new)
            except KeyboardInterrupt:
                if on_steps is not None and results[reported:] and self._closed is None:
                    on_steps(results[reported:])
                raise
        return results

    def profile(
        self,
        inputs: object,
        targets: object = _PART_OF_INPUTS,
        *,
        steps: int = 5,
        ranges: bool = False,
    ) -> Timeline:
        """*steps* training steps on the global batch ``(inputs, targets)``, which train like any
        other (a scaled loss keeps its scale meanwhile); when every instruction of the quickest one
        ran, on which device. Memory is what the plan says. *ranges*: chunks and messages are ranges
        of :mod:`torch.profiler`, named by their nodes.

        Raises what :meth:`step` raises.
        """
        if steps < 1:
            raise BatchError(f"steps is at least 1, found {steps}")
        batch = self._batch(inputs, targets)
        if self._kept_steps:
            raise StateError("gradients are kept from step(update=False); update before profiling")
        program = self._programs.training(batch)
        factors = self._rates.of(self._step, steps)
        with self._interruptible(), late_interrupts():
            self._train = program
            self._load(program)
            with self._closing_on_error():
                found = self._backend.profile(
                    program.key,
                    [batch] * steps,
                    first_step=self._step,
                    seed=_seed_of_call(self._seed, 0),
                    loss_scale=self._scale(),
                    lr_factors=factors,
                    ranges=ranges,
                )
            for result in found.steps:
                self._advance(result, tokens=0)
        quickest = min(range(steps), key=lambda i: found.steps[i].seconds)
        return measured_timeline(
            program.plan,
            found.spans[quickest],
            account(program.plan),
            host_blocks=True,
            clock_error=found.clock_error,
        )

    def evaluate(self, inputs: object, targets: object = _PART_OF_INPUTS) -> TrainResult:
        """The loss of the batch in evaluation mode; any batch size. Nothing changes: parameters,
        optimizer state, kept gradients, and buffers too, whatever the model's ``forward`` writes
        into them in evaluation mode. Such a write is seen by the microbatch that makes it and by
        none after it.

        The rows are cut into equal microbatches, at most as large as in training; a last wave that
        is not full is filled up with rows whose losses do not count.
        """
        batch = self._batch(inputs, targets)
        rows, train = Rows(self.dag.batch), self._train.plan
        count = rows.count(batch)
        size = next(s for s in range(min(train.microbatch_size, count), 0, -1) if count % s == 0)
        microbatches = count // size
        wave = train.num_replicas * train.num_microbatches
        losses: dict[int, float] = {}
        weights: dict[int, float] = {}
        seconds = 0.0
        for first in range(0, microbatches, wave):
            real = min(wave, microbatches - first)
            index = torch.arange(first * size, (first + wave) * size, device="cpu").clamp(
                max=count - 1
            )
            part = rows.take(batch, index)
            with self._interruptible():
                program = self._programs.evaluation(part)
                with late_interrupts():
                    (result,) = self._call(program, [part], self._step)
            for m in range(real):
                losses[first + m] = result.values["loss"][m]
                weights[first + m] = result.values.get("weight", {}).get(m, 1.0)
            seconds += result.seconds
        loss = _combine(self.dag.loss_kind, losses, weights)
        return TrainResult(self._step, loss, seconds, _tokens(batch, count))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers under the user's names (tied ones under each) and
        shapes, on the CPU. They have the user's types; under a ``precision`` floating-point
        parameters have the master type, of which frozen ones hold no more than the compute type
        does.
        """
        snapshot = self._snapshot(optimizer=False)
        return user_state(self.dag, snapshot)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Overwrite parameters and persistent buffers. The optimizer's state is left alone;
        gradients that ``step(update=False)`` kept are dropped, since they are those of other
        parameters.

        Under a ``precision`` floating-point parameters of any such type are converted. Raises
        :class:`StateError` for missing, unexpected, misshapen entries, or different tensors under
        tied names.
        """
        current = self._snapshot(optimizer=False)
        snapshot = snapshot_from(self.dag, state, current)
        with self._interruptible(), late_interrupts():
            with self._closing_on_error():
                self._backend.restore(snapshot)
            self._forget()

    def copy_to(self, model: torch.nn.Module) -> None:
        """Copy the trained parameters and persistent buffers into *model*, in place. Raises
        :class:`StateError` for a model with others.
        """
        state = self.state_dict()
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            raise StateError(
                f"copy_to needs a model with the parameters and buffers of the one that was compiled: {error}"
            ) from error

    def save(self, path: str | Path, *, metadata: Mapping[str, object] | None = None) -> None:
        """Write a checkpoint: a new folder *path* with all that :meth:`load` needs to go on as if
        nothing had happened, under any strategy.

        It holds parameters (under a ``precision`` the master weights), buffers, the optimizer's
        state and options, the number of steps done (and so the place in the schedule of learning
        rates and in the data), ``lr_factor``, the seed, and the loss scaler's state; besides *metadata*: numbers,
        texts, lists, tuples and mappings of them. Every device writes what it owns, so *path* must
        be in a folder that the driver and all devices share. Nothing has the name *path* before all
        of it is on the disk.

        Raises :class:`StateError` between ``step(update=False)`` and the step that updates, and
        :class:`CheckpointError` when *path* exists or cannot be written, or the optimizer keeps
        what a checkpoint cannot hold. Training may go on after either.
        """
        self._require_open()
        if self._kept_steps:
            raise StateError(
                f"the gradients of {self._kept_steps} steps with update=False are kept, and no checkpoint holds them; save after a step that "
                "updates"
            )
        scaler = self.loss_scaler
        with self._interruptible(), late_interrupts(), self._closing_on_error():
            save_checkpoint(
                Path(path).absolute(),
                self._backend,
                self._groups,
                step=self._step,
                seed=self._seed,
                lr_factor=self.lr_factor,
                loss_scaler=None if scaler is None else scaler.state_dict(),
                metadata=metadata or {},
            )

    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint, whatever strategy and backend it was saved under.

        The seed and the optimizer's options (learning rates) are the checkpoint's, too; gradients
        that ``step(update=False)`` kept are dropped. Without an optimizer, only the weights are
        taken. A loss scaler goes on with the saved one's state, if one was saved.

        Raises :class:`CheckpointError`, before anything is changed, for a folder that is no
        checkpoint, is of another version or is damaged (every file's checksum is compared), and for
        state that does not fit: missing, unexpected or misshapen tensors, another class of
        optimizer or other parameter groups.
        """
        self._require_open()
        checkpoint = Checkpoint.open(path)
        check_fits(checkpoint, self._state_of, self._groups)
        saved, scaler = checkpoint.index.loss_scaler, self.loss_scaler
        if saved is not None and scaler is not None:
            LossScaler(scaler.policy).load_state_dict(saved)  # raises what there is to be raised
        with self._interruptible(), late_interrupts():
            with self._closing_on_error():
                self._backend.read_files(checkpoint)
            if saved is not None and scaler is not None:
                scaler.load_state_dict(saved)
            self._step, self._seed = checkpoint.step, checkpoint.index.seed
            self._rates.factor = checkpoint.index.lr_factor
            self._forget()

    def close(self) -> None:
        """Stop the workers; kept gradients are lost. May be called twice."""
        self._close("it was closed")

    def _close(self, why: str) -> None:
        self._closed = self._closed or why
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _batch(self, inputs: object, targets: object) -> Batch:
        """The batch that one or both arguments are."""
        whole = targets is _PART_OF_INPUTS
        return self._programs.pair(inputs if whole else (inputs, targets))

    # --- running ------------------------------------------------------------------------------------

    def _run(self, batch: Batch, results: list[TrainResult]) -> None:
        """A training step that updates; adds what it came to."""
        use = GradientUse.ADD if self._kept_steps else GradientUse.UPDATE
        program = self._programs.training(batch, use)
        self._require_kept(program)
        with late_interrupts():
            self._train = program
            (result,) = self._call(program, [batch], self._step)
            results.append(self._advance(result, _tokens(batch, None)))
            self._forget()

    def _keep(self, batch: Batch, results: list[TrainResult]) -> None:
        """A training step that keeps its gradients; adds what it came to."""
        program = self._programs.training(batch, GradientUse.KEEP)
        with late_interrupts():
            self._train = program
            (result,) = self._call(program, [batch], self._step)
            self._kept |= _keeping(program)
            self._kept_steps += 1
            results.append(self._result(result, _tokens(batch, None)))

    def _require_kept(self, program: Program) -> None:
        """Refuse to update without what is kept of some parameter on some device."""
        if missing := sorted(self._kept - _keeping(program)):
            name, device = missing[0]
            count = len({name for name, _ in missing})
            raise BatchError(
                f"parameter {name!r} has a gradient from step(update=False) on device {device}, which computes none under this batch, so "
                f"this step would lose it ({count} such parameters); end the accumulation with a batch that uses it there"
            )

    def _forget(self) -> None:
        """Nothing is kept any more."""
        self._kept, self._kept_steps = set(), 0

    def _pushed(
        self, data: Iterable[Batch], steps: int, results: list[TrainResult]
    ) -> Iterator[None]:
        """Train on batches of *data*; adds to *results* and returns to the caller after each call
        to the workers.
        """
        stream = iter(data)
        at_once = 1
        while len(results) < steps:
            wanted = 1 if self._kept_steps else min(self._most_at_once(at_once), BATCHES_PER_CALL)
            batches = list(islice(stream, min(wanted, steps - len(results))))
            if not batches:
                raise BatchError(
                    f"the data ended after {len(results)} of {steps} steps; give more, or ask for fewer steps"
                )
            if self._kept_steps:
                self._run(batches[0], results)
                yield
                continue
            same = [self._programs.training(b) for b in batches]
            first = same[0]
            count = next((i for i, p in enumerate(same) if p is not first), len(batches))
            if count < len(batches):
                stream = _chained(batches[count:], stream)
                batches = batches[:count]
            with late_interrupts():
                self._train = first
                for result, batch in zip(
                    self._call(first, batches, self._step), batches, strict=True
                ):
                    results.append(self._advance(result, _tokens(batch, None)))
            yield
            at_once = _fitting(results[-len(batches) :])

    def _pulled(self, data: Data, steps: int, results: list[TrainResult]) -> Iterator[None]:
        """Train on what the workers ask *data* for; otherwise as :meth:`_pushed`."""
        end, count = self._step + steps, 1
        if self._kept_steps and steps:
            self._run(data(self._step), results)
            yield
        while self._step < end:
            sample = data(self._step)
            program = self._programs.training(sample)
            tokens = _tokens(sample, None)
            stopped = False
            while self._step < end and not stopped:
                before = len(results)
                factors = self._rates.of(self._step, min(count, end - self._step))
                with late_interrupts():
                    self._train = program
                    self._load(program)
                    with self._closing_on_error():
                        run = self._backend.run(
                            program.key,
                            data,
                            first_step=self._step,
                            num_steps=len(factors),
                            seed=self._seed,
                            loss_scale=self._scale(),
                            lr_factors=factors,
                        )
                    results.extend(self._advance(result, tokens) for result in run.steps)
                stopped = run.stopped_at is not None  # plan for another kind of batch
                if len(results) > before:
                    yield
                    count = self._most_at_once(_fitting(results[before:]))

    def _call(
        self, program: Program, batches: Sequence[Batch], step: int
    ) -> tuple[StepResult, ...]:
        factors = self._rates.of(step, len(batches)) if program.trains else None
        self._load(program)
        with self._closing_on_error():
            seed = _seed_of_call(self._seed, self._kept_steps)
            run = self._backend.run(
                program.key,
                batches,
                first_step=step,
                seed=seed,
                loss_scale=self._scale(),
                lr_factors=factors,
            )
        if run.stopped_at is not None:
            raise BatchError(
                f"step {run.stopped_at}: the batch does not have the signature that it was planned for: "
                f"{program.signature.difference(run.signature) if run.signature else ''}"
            )
        return run.steps

    def _require_optimizer(self) -> None:
        if not self._has_optimizer:
            raise StateError(
                "this trainer was compiled with optimizer=None and cannot update parameters; compile with an optimizer, or call "
                "evaluate or step(update=False)"
            )

    def _require_rates(self, what: str) -> None:
        if not self._rated:
            raise ConfigError(
                f"{what} multiplies the learning rates of all parameter groups, but the optimizer has a group without option 'lr'; "
                "use an optimizer with learning rates, or leave it out"
            )

    def _require_open(self) -> None:
        if self._closed is not None:
            raise StateError(f"this trainer is closed: {self._closed}; compile a new one")

    def _load(self, program: Program) -> None:
        self._require_open()
        if program.key not in self._loaded:
            if thawed := sorted(_trained(program) - self._trained):
                raise StateError(
                    f"parameter {thawed[0]!r} did not require a gradient when the trainer was made, so the optimizer does not know "
                    "it; compile a new trainer, or make it with the parameter trained and freeze it afterwards"
                )
            self._require_cuts(program)
            with self._closing_on_error():
                self._backend.load(
                    program.key,
                    program.plan,
                    program.signature,
                    program.constants,
                    self._compilation,
                )
        self._loaded.pop(program.key, None)
        self._loaded[program.key] = None
        while len(self._loaded) > KEPT:
            oldest = next(iter(self._loaded))
            del self._loaded[oldest]
            with self._closing_on_error():
                self._backend.unload(oldest)

    def _require_cuts(self, program: Program) -> None:
        """Refuse a plan that cuts parameters that the first did not, if the optimizer cannot have
        that.
        """
        cut = self._cut | _cut(program.plan.dag)
        if self._optimizer is None or cut == self._cut:
            return
        plan, updates = program.plan, _most_updates(program.plan)
        with same_random_numbers():
            check_optimizer(self._optimizer, plan.dag.parameters, cut, plan.num_devices, updates)
        self._cut = cut

    def _scale(self) -> float:
        """What the loss of the next step is scaled by."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.scale

    def _most_at_once(self, wanted: int) -> int:
        """Steps of one call to the workers: one where the scale of the loss may change after
        each.
        """
        return wanted if self.loss_scaler is None else 1

    def _advance(self, result: StepResult, tokens: int) -> TrainResult:
        """What a step that updates came to; the next one follows."""
        self._step = result.step + 1
        found = self._result(result, tokens)
        if self.loss_scaler is not None:
            self.loss_scaler.update(skipped=found.skipped)
        return found

    def _result(self, result: StepResult, tokens: int) -> TrainResult:
        values = result.values
        loss = _combine(self.dag.loss_kind, values["loss"], values.get("weight", {}))
        norm = values.get("grad_norm", {}).get(0)
        if self.loss_scaler is None:
            return TrainResult(result.step, loss, result.seconds, tokens, norm)
        return TrainResult(
            result.step,
            loss,
            result.seconds,
            tokens,
            norm,
            loss_scale=self.loss_scaler.scale,
            skipped=is_skipped(norm),
        )

    def _snapshot(self, *, optimizer: bool) -> StateSnapshot:
        self._require_open()
        with self._interruptible(), late_interrupts(), self._closing_on_error():
            return self._backend.snapshot(optimizer=optimizer)

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """Leave no worker behind when a call to the backend fails or is interrupted."""
        try:
            yield
        except StateError:
            raise
        except BaseException as error:
            first_line = str(error).partition("\n")[0]
            self._close(f"it was closed after {type(error).__name__}: {first_line}")
            raise

    @contextmanager
    def _interruptible(self, results: Sequence[TrainResult] = ()) -> Iterator[None]:
        """Say of a Ctrl-C that left the trainer usable what it left; *results* are those so far."""
        try:
            yield
        except KeyboardInterrupt as error:
            if self._closed is not None or isinstance(error, Interrupted):
                raise
            raise Interrupted(
                f"interrupted, after {len(results)} steps of this call and {self._step} of this trainer; it can be used as before, and "
                "save keeps what was done (this exception's `results` are those of this call's steps)",
                results,
            ) from None


def _fitting(results: Sequence[TrainResult]) -> int:
    """Steps that take about :data:`SECONDS_PER_CALL`."""
    slowest = max(r.seconds for r in results)
    return max(1, min(1000, int(SECONDS_PER_CALL / max(slowest, 1e-4))))


def _combine(kind: LossKind, losses: Mapping[int, float], weights: Mapping[int, float]) -> float:
    """The loss of the global batch from those of its microbatches, added in microbatch order."""
    total = sum(losses[m] for m in sorted(losses))
    if kind is LossKind.MEAN:
        return total / len(losses)
    weight = sum(weights[m] for m in sorted(weights))
    return total / weight if weight else math.nan


def _seed_of_call(seed: int, kept_steps: int) -> int:
    """The seed of a step, after so many that only kept their gradients: these have the same number,
    but draw other numbers.
    """
    return seed + (kept_steps << 32)


def _keeping(program: Program) -> set[tuple[str, DeviceId]]:
    """The parameters of which *program* keeps gradients, or adds those that are kept, and on which
    devices.
    """
    return {
        (slot.name, device.device)
        for device in program.plan.devices
        for slot in device.slots
        if slot.role is Role.KEPT
    }


def _most_updates(plan: Plan) -> int:
    """The most calls of its optimizer that a device makes in a step."""
    return max(
        sum(bool(instruction.updates()) for instruction in device.instructions)
        for device in plan.devices
    )


def _cut(dag: Dag) -> set[str]:
    """Parameters of which devices hold slices, or parts of the experts."""
    sliced = {n for n, groups in dag.shards.items() if any(len(g) > 1 for g in groups)}
    return {*sliced, *dag.expert_groups}


def _trained(program: Program) -> set[str]:
    return {n for n, p in program.plan.dag.parameters.items() if p.requires_grad}


def _tokens(batch: Batch, rows: int | None) -> int:
    for tree in (batch[1], batch[0]):
        tensor = _first_tensor(tree)
        if tensor is not None and not tensor.is_floating_point():
            return tensor.numel()
    tensor = _first_tensor(batch[0])
    return (
        rows if rows is not None else tensor.shape[0] if tensor is not None and tensor.dim() else 1
    )


def _first_tensor(tree: object) -> torch.Tensor | None:
    if isinstance(tree, torch.Tensor):
        return tree
    children = list(tree.values()) if isinstance(tree, Mapping) else tree
    if not isinstance(children, (tuple, list)):
        return None
    return next((t for child in children if (t := _first_tensor(child)) is not None), None)


def _chained(first: Sequence[Batch], rest: Iterator[Batch]) -> Iterator[Batch]:
    yield from first
    yield from rest

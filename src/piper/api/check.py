"""check: does a strategy compute what single-process training computes?"""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from piper.api.capture_check import check_capture
from piper.api.compare import Errors, compare, scalar_error
from piper.api.programs import Programs, model_tensors
from piper.api.reference import Reference
from piper.api.rows import rebuild_sequence
from piper.api.trainer import Trainer
from piper.backends.base import Backend
from piper.backends.inprocess import InProcessBackend
from piper.capture.joint import LossFn
from piper.directives.base import Directive
from piper.errors import CheckError
from piper.runtime.batch import Batch
from piper.runtime.state import OptimizerFactory, OptimizerSpec, to_user_names

TOLERANCE = 1e-10
"""Largest error that counts as equal, in float64."""

WHOLE_BATCH_TOLERANCE = 1e-8
"""Larger differences between the step's loss and that of the whole batch in one piece are pointed out."""


@dataclass(frozen=True, slots=True)
class StepErrors:
    """Errors of one step against single-process training: of the loss, of each gradient on each device, of each updated parameter and buffer."""

    step: int
    loss: float
    gradients: Errors
    parameters: Errors
    buffers: Errors


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The comparison. Print it with rich, or read its fields.

    ``whole_batch_difference`` is the relative difference between the first step's loss and the loss of the whole batch in one
    piece: nonzero where microbatches change the meaning of the model (BatchNorm, means over unequal counts).
    """

    steps: tuple[StepErrors, ...]
    tolerance: float
    whole_batch_difference: float

    @property
    def max_loss_error(self) -> float:
        """Largest relative error of a step's loss."""
        return max(step.loss for step in self.steps)

    @property
    def max_grad_error(self) -> float:
        """Largest relative error of a gradient."""
        return max(step.gradients.worst for step in self.steps)

    @property
    def max_param_error(self) -> float:
        """Largest relative error of an updated parameter or buffer."""
        return max(max(s.parameters.worst, s.buffers.worst) for s in self.steps)

    @property
    def ok(self) -> bool:
        """Whether every error is within the tolerance."""
        return max(self.max_loss_error, self.max_grad_error, self.max_param_error) <= self.tolerance

    def require(self) -> None:
        """Raise :class:`CheckError` unless ``ok``."""
        if not self.ok:
            raise CheckError(
                f"the strategy differs from single-process training: errors of loss {self.max_loss_error:.1e}, "
                f"gradients {self.max_grad_error:.1e}, parameters {self.max_param_error:.1e}; allowed {self.tolerance:.0e}"
            )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """A table of the worst errors, the verdict, and what to know about the loss."""
        table = Table(
            "step", "what", "worst at", "error", title="against single-process training, float64"
        )
        for step in self.steps:
            table.add_row(str(step.step), "loss", "", _mark(step.loss, self.tolerance))
            for what, errors in (
                ("gradients", step.gradients),
                ("parameters", step.parameters),
                ("buffers", step.buffers),
            ):
                if errors.by_name:
                    name = max(errors.by_name, key=errors.by_name.__getitem__)
                    table.add_row("", what, name, _mark(errors.worst, self.tolerance))
        yield table
        yield "[green]equal[/green]" if self.ok else "[red]different[/red]"
        if self.whole_batch_difference > WHOLE_BATCH_TOLERANCE:
            yield (
                f"[yellow]note[/yellow]: the loss of the whole batch in one piece differs by {self.whole_batch_difference:.1e}: "
                "microbatches change what this model or loss computes (batch statistics, a mean over unequal counts)"
            )


def _mark(error: float, tolerance: float) -> str:
    return f"[{'green' if error <= tolerance else 'red'}]{error:.1e}[/]"


def check(
    model: torch.nn.Module,
    loss_fn: LossFn,
    strategy: Sequence[Directive],
    batch: Batch | Callable[[int], Batch],
    *,
    optimizer: OptimizerFactory,
    param_groups: Sequence[Mapping[str, object]] | None = None,
    lr_schedule: Callable[[int], float] | None = None,
    steps: int = 2,
    seed: int = 0,
    batch_dims: Mapping[str, int | None] | None = None,
    tolerance: float = TOLERANCE,
    backend: Backend | None = None,
) -> CheckReport:
    """Train a float64 copy of *model* for *steps* steps under *strategy*, and in one process, and compare.

    *batch* is a global batch, or a function of the step. Compared after each step: the loss, every gradient on every device that has one, every
    parameter and buffer. *backend* defaults to threads of this process. Raises what :func:`piper.compile` raises.
    """
    model = copy.deepcopy(model).double()

    def fetch(step: int) -> Batch:
        inputs, targets = batch(step) if callable(batch) else batch
        return _double(inputs), _double(targets)

    groups = None if param_groups is None else tuple(param_groups)
    spec = OptimizerSpec(build=optimizer, param_groups=groups, lr_schedule=lr_schedule)
    programs = Programs(model, loss_fn, strategy, batch_dims)
    program = programs.training(fetch(0))
    tensors = model_tensors(model)
    check_capture(model, loss_fn, program, fetch(0), seed)
    reference = Reference(model, loss_fn, program.captured.dag, tensors, spec, seed)
    whole = reference.loss(fetch(0), 0)
    tap = _Tap()
    observed = OptimizerSpec(optimizer, groups, lr_schedule, tap.observe)
    errors: list[StepErrors] = []
    loss = 0.0
    with Trainer(
        programs, program, backend or InProcessBackend(), tensors, observed, seed
    ) as trainer:
        for step in range(steps):
            current = fetch(step)
            result = trainer.step(*current)
            plan = trainer.program.plan
            expected = reference.step(current, plan.num_replicas * plan.num_microbatches, step)
            if step == 0:
                loss = expected.loss
            errors.append(
                StepErrors(
                    step=step,
                    loss=scalar_error(result.loss, expected.loss),
                    gradients=tap.compare(expected.gradients),
                    parameters=compare(*_parameters(trainer, reference)),
                    buffers=compare(*_buffers(trainer, reference)),
                )
            )
    return CheckReport(tuple(errors), tolerance, scalar_error(whole, loss))


class _Tap:
    """Collects the gradients that the devices' optimizers receive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: list[tuple[str, torch.Tensor]] = []

    def observe(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Called by every device, with its final gradients."""
        with self._lock:
            self._found.extend((n, g.detach().clone()) for n, g in gradients.items())

    def compare(self, expected: Mapping[str, torch.Tensor]) -> Errors:
        """The worst error of each gradient over all devices, since the last call."""
        copies: dict[str, list[torch.Tensor]] = {}
        for name, gradient in self._found:
            copies.setdefault(name, []).append(gradient)
        self._found = []
        rounds = max((len(c) for c in copies.values()), default=1)
        worst: dict[str, float] = {}
        for i in range(rounds):
            found = {n: c[min(i, len(c) - 1)] for n, c in copies.items()}
            for name, error in compare(found, expected).by_name.items():
                worst[name] = max(error, worst.get(name, 0.0))
        return Errors(worst)


def _parameters(
    trainer: Trainer, reference: Reference
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    dag = trainer.dag
    state = trainer.state_dict()
    expected = to_user_names(
        {n: p.detach() for n, p in reference.state.parameters.items()}, dag.parameters
    )
    return {n: state[n] for n in expected}, expected


def _buffers(
    trainer: Trainer, reference: Reference
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    dag = trainer.dag
    state = trainer.state_dict()
    persistent = {n: b for n, b in reference.state.buffers.items() if dag.buffers[n].persistent}
    expected = to_user_names(persistent, dag.buffers)
    return {n: state[n] for n in expected}, expected


def _double(tree: object) -> object:
    if isinstance(tree, torch.Tensor):
        return tree.double() if tree.is_floating_point() else tree
    if isinstance(tree, Mapping):
        return {key: _double(child) for key, child in tree.items()}
    if isinstance(tree, (tuple, list)):
        return rebuild_sequence(tree, [_double(child) for child in tree])
    return tree

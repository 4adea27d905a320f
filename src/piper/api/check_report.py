"""What a check found, step by step, and how it is printed."""

from dataclasses import dataclass
from io import StringIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table

from piper.api.compare import Errors
from piper.api.loss_check import LossFinding
from piper.api.whole_batch import WholeBatch
from piper.boundary import public
from piper.brief import brief, count
from piper.capture.precision import Precision
from piper.errors import CheckError


@dataclass(frozen=True, slots=True)
class StepErrors:
    """Errors of one step against single-process training: of the loss, and, on every device that
    holds one, of each gradient, updated parameter, buffer, and tensor of the optimizer's state; of
    the gradients' norm, if they are clipped; of the scale of the loss, if that is scaled, which is
    infinitely wrong too where a step was skipped on one side only.
    """

    step: int
    loss: float
    gradients: Errors
    parameters: Errors
    buffers: Errors
    optimizer: Errors
    grad_norm: float = 0.0
    loss_scale: float = 0.0


def _brief_check_report(it: "CheckReport") -> str:
    return f"{'equal' if it.ok else 'different'} after {count(len(it.steps), 'step')}; errors of loss {it.max_loss_error:.1e}, gradients {it.max_grad_error:.1e}, state {it.max_param_error:.1e}; allowed {it.tolerance:.0e}"


@brief(_brief_check_report)
@public
@dataclass(frozen=True, slots=True)
class CheckReport:
    """The comparison. Print it, or read its fields.

    ``whole_batch`` compares the first step with one on the whole batch in one piece: not zero where
    microbatches change the meaning of the model (BatchNorm, balance losses, dropout) or of the
    loss. It informs; only ``loss_finding``, that the loss function itself, on equal outputs, is no
    mean over rows, makes a report that is not ``ok``.
    """

    steps: tuple[StepErrors, ...]
    tolerance: float
    whole_batch: WholeBatch
    precision: Precision | None = None
    loss_finding: LossFinding | None = None

    @property
    def whole_batch_difference(self) -> float:
        """Relative difference between the first step's loss and that of the whole batch."""
        return self.whole_batch.loss

    @property
    def max_loss_error(self) -> float:
        """Largest relative error of a step's loss."""
        return max(step.loss for step in self.steps)

    @property
    def max_grad_error(self) -> float:
        """Largest relative error of a gradient, of the norm of all, or of the scale of the loss."""
        return max(max(s.gradients.worst, s.grad_norm, s.loss_scale) for s in self.steps)

    @property
    def max_param_error(self) -> float:
        """Largest relative error of an updated parameter, buffer or optimizer state."""
        return max(max(s.parameters.worst, s.buffers.worst, s.optimizer.worst) for s in self.steps)

    @property
    def ok(self) -> bool:
        """Whether every error is within the tolerance, and the loss such that microbatches may be
        averaged.
        """
        return self._keeps_to_reference and self.loss_finding is None

    @property
    def _keeps_to_reference(self) -> bool:
        return max(self.max_loss_error, self.max_grad_error, self.max_param_error) <= self.tolerance

    def require(self) -> None:
        """Raise :class:`CheckError` unless ``ok``."""
        if not self._keeps_to_reference:
            raise CheckError(
                f"the strategy differs from single-process training: errors of loss {self.max_loss_error:.1e}, "
                f"gradients {self.max_grad_error:.1e}, parameters {self.max_param_error:.1e}; allowed {self.tolerance:.0e}"
            )
        if self.loss_finding is not None:
            raise CheckError(
                f"microbatches train something else than the whole batch in one piece: {self.loss_finding}"
            )

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=100, color_system=None)
        with console.capture() as printed:
            console.print(self)
        return printed.get().rstrip()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """A table of the worst errors, the verdict, and what to know about the loss."""
        types = "float64" if self.precision is None else str(self.precision.types)
        table = Table(
            "step", "what", "worst at", "error", title=f"against single-process training, {types}"
        )
        for step in self.steps:
            table.add_row(str(step.step), "loss", "", _mark(step.loss, self.tolerance))
            for what, errors in (
                ("gradients", step.gradients),
                ("parameters", step.parameters),
                ("buffers", step.buffers),
                ("optimizer state", step.optimizer),
            ):
                if errors.by_name:
                    name = max(errors.by_name, key=errors.by_name.__getitem__)
                    table.add_row("", what, name, _mark(errors.worst, self.tolerance))
            if step.grad_norm:
                table.add_row("", "gradients' norm", "", _mark(step.grad_norm, self.tolerance))
            if step.loss_scale:
                table.add_row("", "scale of the loss", "", _mark(step.loss_scale, self.tolerance))
        whole = self.whole_batch
        differs = whole.differs(rounded=self.precision is not None)
        colour = "yellow" if differs else "green"
        table.add_section()
        name = max(whole.gradients.by_name, key=whole.gradients.by_name.__getitem__, default="")
        for what, at, error in (
            ("loss", "", whole.loss),
            ("gradients", name, whole.gradients.worst),
        ):
            table.add_row("whole batch", what, at, f"[{colour}]{error:.1e}[/]")
        yield table
        yield "[green]equal[/green]" if self.ok else "[red]different[/red]"
        if self.loss_finding is not None:
            yield f"[red]loss[/red]: {escape(str(self.loss_finding))}"
        elif differs:
            why = "; ".join(whole.reasons) or "batch statistics, capacities, losses of a microbatch"
            yield (
                "[yellow]note[/yellow]: the whole batch in one piece, without microbatches, gives something else, so microbatches change "
                f"what is computed: {escape(why)}"
            )


def _mark(error: float, tolerance: float) -> str:
    return f"[{'green' if error <= tolerance else 'red'}]{error:.1e}[/]"

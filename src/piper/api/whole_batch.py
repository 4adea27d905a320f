"""Plain PyTorch on the whole batch in one piece, next to what microbatches make of it; and why they
differ, if they do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.utils._pytree as pytree

from piper.api.compare import Errors, compare, scalar_error
from piper.api.loss_check import LossFinding
from piper.api.loss_check.forward import close, forward_of
from piper.api.programs import Program, Programs
from piper.api.reference import ReferenceStep
from piper.api.rows import Rows
from piper.api.trial.untouched import untouched
from piper.runtime.batch import Batch

TOLERANCE = 1e-8
"""In float64, larger differences are pointed out."""

PRECISION_TOLERANCE = 1e-2
"""The same of the loss under a mixed-precision policy, where one kernel rounds once."""


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """How far the first step is from one step on the whole batch without microbatches: the loss,
    the gradients, and ``reasons`` for it that were seen.
    """

    loss: float
    gradients: Errors
    reasons: tuple[str, ...] = ()

    def differs(self, *, rounded: bool) -> bool:
        """Whether more differs than rounding explains: to a policy's types if *rounded*."""
        if rounded:
            return self.loss > PRECISION_TOLERANCE
        return max(self.loss, self.gradients.worst) > TOLERANCE


def compare_whole(whole: ReferenceStep, microbatches: ReferenceStep) -> WholeBatch:
    """The first step both ways; no reasons yet."""
    return WholeBatch(
        scalar_error(whole.loss, microbatches.loss),
        compare(whole.gradients, microbatches.gradients),
    )


def reasons(
    programs: Programs, program: Program, batch: Batch, finding: LossFinding | None
) -> tuple[str, ...]:
    """Why microbatches change what is computed, as far as the model shows it."""
    found = [] if finding is None else ["the loss function is no mean over rows"]
    if _draws(program):
        return (*found, "random numbers (dropout) are drawn by microbatch")
    rows = Rows(program.captured.dag.batch)
    size = program.plan.microbatch_size
    with untouched(programs.model):
        forward = forward_of(programs.model, evaluate=False)
        whole = pytree.tree_leaves(forward(batch))
        part = pytree.tree_leaves(forward(rows.take(batch, torch.arange(size))))
    if len(whole) == len(part):
        changed = [p for w, p in zip(whole, part, strict=True) if _is_changed(w, p)]
        if any(t.dim() for t in changed):
            found.append(f"the model's outputs of a row depend on the other rows{_norms(programs)}")
        if any(not t.dim() for t in changed):
            found.append(
                "the model returns numbers that are those of a microbatch (losses of its own)"
            )
    return tuple(found)


def _draws(program: Program) -> bool:
    bodies = program.captured.dag.bodies.values()
    return any(call.rng is not None for body in bodies for call in body.calls)


def _is_changed(whole: object, part: object) -> bool:
    """Whether the *part*, of the first rows, is not what the *whole* has for them."""
    if not isinstance(whole, torch.Tensor) or not isinstance(part, torch.Tensor):
        return False
    if whole.dim() != part.dim():
        return True
    first: torch.Tensor = whole
    for dim, length in enumerate(part.shape):
        first = first.narrow(dim, 0, min(length, first.shape[dim]))
    return first.shape != part.shape or not close(first, part)


def _norms(programs: Programs) -> str:
    names: Sequence[str] = [
        name
        for name, module in programs.model.named_modules()
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.training  # noqa: SLF001 (the common base)
    ]
    return f": batch statistics of {names[0]!r}" if names else " (statistics, capacities)"

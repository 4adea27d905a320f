"""What is wrong with a loss function, and what to do about it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from piper.api.loss_check.measured import Measured


class Fault(StrEnum):
    """Why parts do not combine to the whole."""

    SUM = "sum"
    MEAN_OVER_COUNTS = "mean over counts"
    ROWS_TOGETHER = "rows together"
    PAIR = "pair"
    WEIGHT = "weight"


_WHY = {
    Fault.SUM: "it is a sum over rows, which averaging divides by the number of microbatches. Return (sum, weight), with the number of rows "
    "as the weight; for the gradients of the sum itself multiply the first by the rows of the global batch",
    Fault.MEAN_OVER_COUNTS: "it divides by something that differs between microbatches (a mean over tokens some of which are ignored, over "
    "classes with weights) or is not linear in the rows (the root of a mean). Return (sum, weight): the sum over what counts "
    '(reduction="sum") and how much that is',
    Fault.ROWS_TOGETHER: "it looks at the rows together (other rows as negatives, statistics of the batch, a root or a maximum over rows), so "
    "microbatches change what it is. If it can be a quotient of sums over rows, return (sum, weight); else train with one microbatch per step "
    "and replica, or mean the loss of a microbatch",
    Fault.PAIR: "a pair is (sum, weight), and both must be sums over rows: of microbatches they are added up. Return the loss summed over what "
    'counts (reduction="sum", not a mean) and how much that is',
    Fault.WEIGHT: "a pair is (sum, weight), but the second depends on the model's outputs and is no sum over rows, as a weight would be. "
    "Return the loss alone if the second is another loss or a figure to look at",
}

_OWN = (
    "The model computes it itself (loss_fn=None): give a loss_fn(outputs, targets) that returns (sum, weight), such as the cross-entropy "
    "with reduction='sum' and the number of labels that are not ignored"
)


@dataclass(frozen=True, slots=True)
class LossFinding:
    """On equal outputs the loss of ``parts`` parts in one piece is ``whole``, and ``combined`` as a
    step combines theirs. ``own`` says that the model computes it.
    """

    fault: Fault
    whole: float
    combined: float
    parts: int
    own: bool = False

    def __str__(self) -> str:
        if self.fault is Fault.WEIGHT:
            return f"the loss function: {_WHY[self.fault]}"
        remedy = f". {_OWN}" if self.own else ""
        given = "" if self.own else "on equal outputs, "
        return (
            f"the loss is no mean over rows: {given}{self.parts} microbatches in one piece have the loss {self.whole:.6g}, but theirs "
            f"combine to {self.combined:.6g}: {_WHY[self.fault]}{remedy}"
        )


def judged(
    whole: Measured, parts: Sequence[Measured], tolerance: float, *, own: bool = False
) -> LossFinding | None:
    """What *parts* say of the *whole*; ``None`` where they combine to it, or one is no number."""
    values = [m.value for m in (whole, *parts)]
    if not all(m.finite for m in (whole, *parts)):
        return None
    combined = _combined(parts)
    allowed = tolerance * max(abs(v) for v in values)
    if abs(whole.value - combined) <= allowed:
        return None
    fault = Fault.ROWS_TOGETHER
    if whole.weight is not None:
        fault = Fault.PAIR
    elif abs(whole.value - sum(m.value for m in parts)) <= allowed * len(parts):
        fault = Fault.SUM
    elif min(values[1:]) + allowed < whole.value < max(values[1:]) - allowed:
        fault = Fault.MEAN_OVER_COUNTS
    return LossFinding(fault, whole.value, combined, len(parts), own)


def _combined(parts: Sequence[Measured]) -> float:
    """The loss of a step whose microbatches are *parts*."""
    total = sum(m.total for m in parts)
    if parts[0].weight is None:
        return total / len(parts)
    return total / sum(m.weight or 0.0 for m in parts)

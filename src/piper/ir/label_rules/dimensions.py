"""Operators that work along dimensions: sums and other reductions, softmax, cumulative sums."""

from collections.abc import Mapping

from piper.ir.label_rules.elementwise import broadcast, linear
from piper.ir.label_rules.operation import (
    Operation,
    Result,
    Rule,
    aten,
    has_axes,
)
from piper.ir.label_rules.shapes import replaced
from piper.ir.labels import DimLabel, Label


def _sum(op: Operation) -> Result:
    source = op.label(0)
    chosen, kept = _reduced(op, source)
    summed = source.summed | op.contracted(*(source.dims[i] for i in chosen))
    return op.done(Label(kept, summed))


def _reduce(op: Operation) -> Result:
    """A reduction that is not a sum: over features only."""
    source = op.unsummed(op.label(0))
    chosen, kept = _reduced(op, source)
    if any(has_axes(source.dims[i]) for i in chosen):
        raise op.refuse("reduces over experts or tokens: the region mixes them")
    return op.done(*(Label(kept) for _ in op.call.results))


def _reduced(op: Operation, source: Label) -> tuple[tuple[int, ...], tuple[DimLabel, ...]]:
    rank = len(source.dims)
    chosen = op.dims(1, rank)
    keep = len(op.result().shape) == rank
    kept = tuple(
        () if i in chosen else d for i, d in enumerate(source.dims) if keep or i not in chosen
    )
    return chosen, kept


def _flip(op: Operation) -> Result:
    source = op.label(0)
    if any(has_axes(source.dims[i]) for i in op.dims(1, len(source.dims))):
        raise op.refuse("works along experts or tokens: the region mixes them")
    return op.done(source)


def _along(position: int) -> Rule:
    """An operation along one dimension, given by the argument at *position*, which is of
    features.
    """

    def rule(op: Operation) -> Result:
        label = Label(broadcast(op, op.inputs, len(op.result().shape)), linear(op))
        dim = op.number(position, -1) % max(len(label.dims), 1)
        if has_axes(label.dims[dim]):
            raise op.refuse("works along experts or tokens: the region mixes them")
        return op.done(
            *(replaced(op, label, dim, i, gone=False) for i in range(len(op.call.results)))
        )

    return rule


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(aten("sum"), _sum),
    **dict.fromkeys(aten("mean", "amax", "amin", "prod", "any", "all", "logsumexp"), _reduce),
    **dict.fromkeys(aten("_softmax", "_log_softmax", "cumsum"), _along(1)),
    **dict.fromkeys(aten("_softmax_backward_data", "_log_softmax_backward_data"), _along(2)),
    **dict.fromkeys(aten("flip"), _flip),
}

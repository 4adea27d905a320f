"""Matrix products, and products of rows sorted by expert."""

from collections.abc import Mapping

from piper.ir.label_rules.elementwise import broadcast
from piper.ir.label_rules.operation import (
    Operation,
    Result,
    Rule,
    aten,
)
from piper.ir.labels import Axis, Label

GROUPED = ("piper.grouped_mm.default", "piper.grouped_outer.default")
"""Products of rows sorted by group: ``(rows, weights, counts)`` and ``(rows, rows, counts)``."""


def _product(op: Operation, left: Label, right: Label) -> Label:
    """``[*, n, k] @ [*, k, m]``."""
    op.unsummed(left)
    op.unsummed(right)
    *batch, rows, inner = left.dims
    *batch2, inner2, columns = right.dims
    if inner != inner2 or batch != batch2:
        raise op.refuse("multiplies matrices whose experts or tokens do not correspond")
    label = Label((*batch, rows, columns), op.contracted(inner))
    if len(set(label.axes)) < len(label.axes):
        raise op.refuse(
            "multiplies each expert's tokens with others': the region mixes experts or tokens"
        )
    return label


def _mm(op: Operation) -> Result:
    return op.done(_product(op, op.label(0), op.label(1)))


def _addmm(op: Operation) -> Result:
    label = _product(op, op.label(1), op.label(2))
    op.unsummed(label, "adds something else to")
    dims = broadcast(op, [op.unsummed(op.label(0)), label], len(label.dims))
    return op.done(Label(dims))


def _grouped_mm(op: Operation) -> Result:
    """``rows[N, k], weights[E, k, m], counts[E] -> [N, m]``."""
    rows, weights = _rows(op, op.label(0)), op.label(1)
    _counts(op)
    if weights.dims[0] != (op.region.factor(Axis.EXPERTS),) or weights.dims[1] != rows.dims[1]:
        raise op.refuse("expects weights [experts, features of the rows, …]")
    return op.done(Label((rows.dims[0], op.unsummed(weights).dims[2]), zeros=True))


def _grouped_outer(op: Operation) -> Result:
    """``rows[N, k], rows[N, m], counts[E] -> [E, k, m]``."""
    left, right = _rows(op, op.label(0)), _rows(op, op.label(1))
    _counts(op)
    experts = op.region.factor(Axis.EXPERTS)
    return op.done(Label(((experts,), left.dims[1], right.dims[1]), frozenset((Axis.TOKENS,))))


def _rows(op: Operation, label: Label) -> Label:
    tokens = (op.region.factor(Axis.TOKENS),)
    if label.dims[0] != tokens or len(label.axes) > 1:
        raise op.refuse("expects rows that are the region's tokens")
    return op.unsummed(label)


def _counts(op: Operation) -> None:
    if not op.label(2).counts:
        raise op.refuse("expects the counts that enter the region, unchanged")


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(aten("mm", "bmm"), _mm),
    **dict.fromkeys(aten("addmm", "baddbmm"), _addmm),
    "piper.grouped_mm": _grouped_mm,
    "piper.grouped_outer": _grouped_outer,
}

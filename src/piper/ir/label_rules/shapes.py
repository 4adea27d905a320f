"""Operators that move or select elements, and those that make new tensors."""

from collections.abc import Mapping

from piper.ir.label_rules.operation import (
    Operation,
    Result,
    Rule,
    aten,
    has_axes,
    plain_results,
)
from piper.ir.labels import DimLabel, Label, regroup


def _view(op: Operation) -> Result:
    source = op.label(0)
    dims = regroup(source.dims, op.shape())
    if dims is None:
        raise op.refuse(
            f"to {op.result()} has a size that does not follow from the tensor's experts and tokens (a literal size?)"
        )
    return op.resized(1, Label(dims, source.summed, source.counts, source.zeros))


def _expand(op: Operation) -> Result:
    source, shape = op.label(0), op.shape()
    old: list[DimLabel] = [()] * (len(shape) - len(source.dims)) + list(source.dims)
    guessed = op.region.guess(
        (size if not dim else op.region.sizes.one for size, dim in zip(shape, old, strict=True)),
        source.axes,
    )
    dims = tuple(a or b for a, b in zip(old, guessed, strict=True))
    label = Label(dims, source.summed)
    if source.summed.intersection(label.axes):
        op.unsummed(source)
    return op.resized(1, label)


def _permute(op: Operation) -> Result:
    source = op.label(0)
    rank = len(source.dims)
    order = list(range(rank))
    if op.name == "aten.permute":
        order = list(op.dims(1, rank))
    elif rank > 1:
        a, b = (0, 1) if op.name == "aten.t" else (op.number(1) % rank, op.number(2) % rank)
        order[a], order[b] = order[b], order[a]
    dims = tuple(source.dims[i] for i in order)
    return op.done(Label(dims, source.summed, zeros=source.zeros))


def _unsqueeze(op: Operation) -> Result:
    source = op.label(0)
    dims = list(source.dims)
    dims.insert(op.number(1) % (len(dims) + 1), ())
    return op.done(Label(tuple(dims), source.summed))


def _squeeze(op: Operation) -> Result:
    source = op.label(0)
    chosen = op.dims(1, len(source.dims))
    keep = tuple(dim for i, dim in enumerate(source.dims) if i not in chosen or dim)
    return op.done(Label(keep, source.summed))


def _part(op: Operation) -> Result:
    """Some of the indices along one dimension, which is not of experts or tokens, or all of
    them.
    """
    source = op.label(0)
    position = 1 if op.name in ("aten.slice", "aten.select", "aten.unbind", "aten.narrow") else 2
    dim = op.number(position) % len(source.dims)
    if has_axes(source.dims[dim]):
        if op.name == "aten.slice" and op.shape() == op.region.sizes.shape(op.spec(0)):
            return op.done(source, args={3: 2**63 - 1})
        raise op.refuse("takes some experts or tokens out of all by their number")
    return op.done(
        *(
            replaced(op, source, dim, number, gone=op.name in ("aten.select", "aten.unbind"))
            for number in range(len(op.call.results))
        )
    )


def replaced(op: Operation, source: Label, dim: int, number: int, *, gone: bool) -> Label:
    """*source* with dimension *dim* as result *number* has it, or without that dimension."""
    dims = list(source.dims)
    if gone:
        del dims[dim]
    else:
        dims[dim] = op.region.sizes.plain(op.shape(number)[dim])
    return Label(tuple(dims), source.summed, zeros=source.zeros)


def _part_backward(op: Operation) -> Result:
    """``slice_backward`` and ``select_backward``: zeros around a part."""
    source, dim = op.label(0), op.number(2) % len(op.shape())
    dims = list(source.dims)
    whole = op.region.sizes.plain(op.shape()[dim])
    if op.name == "aten.select_backward":
        dims.insert(dim, whole)
    else:
        if has_axes(dims[dim]):
            raise op.refuse("takes some experts or tokens out of all by their number")
        dims[dim] = whole
    return op.resized(1, Label(tuple(dims), source.summed, zeros=source.zeros))


def _join(op: Operation) -> Result:
    """``cat`` and ``stack``."""
    labels = op.inputs
    rank = len(op.result().shape)
    dim = op.number(1) % rank
    stack = op.name == "aten.stack"
    rest = {tuple(d for i, d in enumerate(label.dims) if stack or i != dim) for label in labels}
    summed = {label.summed for label in labels}
    joined = () if stack else tuple(label.dims[dim] for label in labels)
    if len(rest) > 1 or len(summed) > 1 or any(has_axes(d) for d in joined):
        raise op.refuse("joins tensors of different experts or tokens")
    dims = list(rest.pop())
    dims.insert(dim, op.region.sizes.plain(op.shape()[dim]))
    zeros = all(label.zeros for label in labels)
    return op.done(Label(tuple(dims), summed.pop(), zeros=zeros))


def _pad(op: Operation) -> Result:
    source = op.label(0)
    shape, before = op.shape(), op.region.sizes.shape(op.spec(0))
    dims = list(source.dims)
    for i, (new, old) in enumerate(zip(shape, before, strict=True)):
        if new != old and has_axes(dims[i]):
            raise op.refuse("pads experts or tokens")
        if new != old:
            dims[i] = op.region.sizes.plain(new)
    return op.done(Label(tuple(dims), source.summed))


def _fill(op: Operation) -> Result:
    """A new tensor of literal sizes, the same everywhere."""
    position = 1 if op.name.startswith("aten.new_") else 0
    dims = op.region.guess(op.shape())
    return op.resized(position, Label(dims))


def _scalar(op: Operation) -> Result:
    return op.done(*plain_results(op))


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(aten("view", "reshape", "_unsafe_view"), _view),
    **dict.fromkeys(aten("permute", "transpose", "t"), _permute),
    **dict.fromkeys(aten("expand"), _expand),
    **dict.fromkeys(aten("unsqueeze"), _unsqueeze),
    **dict.fromkeys(aten("squeeze"), _squeeze),
    **dict.fromkeys(
        aten("slice", "select", "narrow", "unbind", "split", "split_with_sizes"), _part
    ),
    **dict.fromkeys(aten("slice_backward", "select_backward"), _part_backward),
    **dict.fromkeys(aten("cat", "stack"), _join),
    **dict.fromkeys(aten("constant_pad_nd"), _pad),
    **dict.fromkeys(aten("full", "zeros", "ones", "new_zeros", "new_ones", "new_full"), _fill),
    **dict.fromkeys(aten("scalar_tensor"), _scalar),
}

"""The model itself in evaluation mode on some rows, where outputs that were made up do not do: what
grows with the rows, and along which dimension?
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TypeAlias

import torch
import torch.utils._pytree as pytree
from torch.func import functional_call

from piper.api.loss_check.made_up import Layout
from piper.api.loss_check.measured import COARSE
from piper.api.programs import evaluating
from piper.capture.batch import as_arguments
from piper.runtime.batch import Batch

Forward: TypeAlias = Callable[[Batch], object]

_CLOSE = {torch.float64: 1e-8, torch.float32: 1e-3}


def forward_of(model: torch.nn.Module, *, evaluate: bool = True) -> Forward:
    """The outputs of *model*, in evaluation mode unless told otherwise; nothing of it is
    written.
    """

    def forward(batch: Batch) -> object:
        args, kwargs = as_arguments(batch[0])
        buffers = {n: b.clone() for n, b in model.named_buffers()}
        with torch.no_grad(), evaluating(model) if evaluate else nullcontext():
            outputs: object = functional_call(model, buffers, args, kwargs)
        return outputs

    return forward


def layout_of(parts: Sequence[object], whole: object) -> Layout | None:
    """How outputs grow, read off those of two *parts* and of both in one piece; ``None`` where they
    are not such that loss functions can be given made-up ones.
    """
    first, second, both = (pytree.tree_leaves(tree) for tree in (*parts, whole))
    if not len(first) == len(second) == len(both):
        return None
    dims: list[int | None] = []
    for one, other, joint in zip(first, second, both, strict=True):
        if not isinstance(joint, torch.Tensor):
            dims.append(None)
            continue
        grown = [d for d in range(joint.dim()) if joint.shape[d] != one.shape[d]]
        if not grown:
            dims.append(None)
        elif len(grown) == 1 and joint.shape[grown[0]] == 2 * one.shape[grown[0]]:
            dims.append(grown[0])
        else:
            return None
        if other.shape != one.shape:
            return None
    return Layout(tuple(dims))


def are_rows_alone(
    parts: Sequence[object], whole: object, layout: Layout, *, ordered: bool = True
) -> bool:
    """Whether the outputs of two *parts*, joined, are those of the *whole*: no row depends on
    others, and, if *ordered*, rows are in their order. Scalars are not looked at.
    """
    leaves = (pytree.tree_leaves(tree) for tree in (*parts, whole))
    same = close if ordered else _have_the_same_rows
    return all(
        same(torch.cat([one, other], dim).movedim(dim, 0), joint.movedim(dim, 0))
        for dim, one, other, joint in zip(layout.dims, *leaves, strict=True)
        if dim is not None
    )


def _have_the_same_rows(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors have the same rows in any order, by each column sorted."""
    return close(found.sort(0).values, expected.sort(0).values)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two outputs of one shape differ by rounding only."""
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    allowed = _CLOSE.get(expected.dtype, COARSE)
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return float((found - expected).abs().max()) <= allowed * scale if scale else True

"""Grouped matrix products: rows sorted by group, and each group's matrix.

Two operators of the namespace ``piper``, each the other's gradient. Importing the module registers
them.
"""

from typing import Protocol

import torch

from piper.boundary import public
from piper.errors import BatchError

_KERNEL_TYPE = torch.bfloat16
"""The element type for which torch has a kernel."""


@torch.library.custom_op("piper::grouped_mm", mutates_args=())
def _grouped_mm(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    out = rows.new_zeros((rows.shape[0], weights.shape[2]))
    if _has_kernel(rows, weights):
        ends = counts.cumsum(0).to(torch.int32)
        found = torch._grouped_mm(rows, weights, ends)  # noqa: SLF001 (torch has no public name for it)
        inside = torch.arange(rows.shape[0], device=rows.device) < ends[-1]
        return torch.where(inside[:, None], found, out)
    start = 0
    for group, count in enumerate(counts.tolist()):
        if count:
            torch.mm(rows[start : start + count], weights[group], out=out[start : start + count])
        start += count
    return out


@torch.library.custom_op("piper::grouped_outer", mutates_args=())
def _grouped_outer(left: torch.Tensor, right: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    out = left.new_zeros((counts.shape[0], left.shape[1], right.shape[1]))
    start = 0
    for group, count in enumerate(counts.tolist()):
        if count:
            stop = start + count
            torch.mm(left[start:stop].t(), right[start:stop], out=out[group])
        start += count
    return out


def _has_kernel(rows: torch.Tensor, weights: torch.Tensor) -> bool:
    aligned = rows.shape[1] % 8 == 0 and weights.shape[2] % 8 == 0  # 16 bytes
    return rows.is_cuda and rows.dtype is _KERNEL_TYPE and aligned


@_grouped_mm.register_fake
def _(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    return rows.new_empty((rows.shape[0], weights.shape[2]))


@_grouped_outer.register_fake
def _(left: torch.Tensor, right: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return left.new_empty((counts.shape[0], left.shape[1], right.shape[1]))


class _Context(Protocol):
    """What autograd gives the two functions below."""

    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...


def _save(
    ctx: _Context,
    inputs: tuple[torch.Tensor, ...],
    output: torch.Tensor,  # noqa: ARG001
) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_mm_backward(
    ctx: _Context, gradient: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
    rows, weights, counts = ctx.saved_tensors
    wants_rows, wants_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
    return (
        grouped_mm(gradient, weights.transpose(1, 2), counts) if wants_rows else None,
        grouped_outer(rows, gradient, counts) if wants_weights else None,
        None,
    )


def _grouped_outer_backward(
    ctx: _Context, gradient: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
    left, right, counts = ctx.saved_tensors
    wants_left, wants_right = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
    return (
        grouped_mm(right, gradient.transpose(1, 2), counts) if wants_left else None,
        grouped_mm(left, gradient, counts) if wants_right else None,
        None,
    )


_grouped_mm.register_autograd(_grouped_mm_backward, setup_context=_save)
_grouped_outer.register_autograd(_grouped_outer_backward, setup_context=_save)


@public
def grouped_mm(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Multiply each row by the matrix of its group: ``rows[N, k]`` sorted by group, ``weights[G, k,
    m]``, ``counts[G]`` (int64, the rows of each group) to ``[N, m]``. Rows behind the last group's,
    if there are any, become zeros. Differentiable.

    bfloat16 on a GPU uses torch's grouped kernel; everything else is a loop over groups, which
    works for every element type.

    Raises :class:`~piper.errors.BatchError` for other numbers of dimensions, or counts that are no
    int64.
    """
    found = [tuple(t.shape) for t in (rows, weights, counts)]
    if [len(shape) for shape in found] != [2, 3, 1] or counts.dtype is not torch.int64:
        raise BatchError(
            f"grouped_mm: expected rows [N, k], weights [G, k, m] and counts [G] (int64), found shapes "
            f"{', '.join(map(str, found))} and counts of type {counts.dtype}"
        )
    out: torch.Tensor = torch.ops.piper.grouped_mm(rows, weights, counts)
    return out


def grouped_outer(left: torch.Tensor, right: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Per group, the product of ``left[N, k]`` transposed and ``right[N, m]``, rows sorted by
    group: ``[G, k, m]``. Differentiable.
    """
    out: torch.Tensor = torch.ops.piper.grouped_outer(left, right, counts)
    return out

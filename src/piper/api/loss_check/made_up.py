"""Outputs for many rows from those of one microbatch: what a loss function says of any outputs does
not depend on where they come from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.utils._pytree as pytree

from piper.runtime.batch import flatten

MOST_ELEMENTS = 1 << 25
"""Elements of all outputs that are made up together (in float64 256 MiB), unless two rows have
more.
"""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the tensors among a model's outputs grow with the rows: the dimension along which those
    of parts are joined, ``None`` for one that is the same for any number of rows; by position among
    the leaves.
    """

    dims: tuple[int | None, ...]

    @classmethod
    def guessed(cls, outputs: object, rows: int) -> "Layout":
        """By dimension 0, which for rows, or rows flattened with what follows, is a multiple of
        *rows*.
        """
        return cls(
            tuple(
                0
                if isinstance(t, torch.Tensor) and t.dim() and t.shape[0] and not t.shape[0] % rows
                else None
                for t in pytree.tree_leaves(outputs)
            )
        )

    def is_plain(self, outputs: object, rows: int) -> bool:
        """Whether every tensor that grows has exactly one entry per row, on dimension 0."""
        return all(
            dim is None or (dim == 0 and t.shape[0] == rows)
            for dim, t in zip(self.dims, pytree.tree_leaves(outputs), strict=True)
        )


def has_only_tensors(outputs: object) -> bool:
    """Whether all containers of *outputs* are known, so that no tensor hides in an object."""
    plain = (torch.Tensor, int, float, str, type(None))
    return all(isinstance(leaf, plain) for leaf in pytree.tree_leaves(outputs))


def rows_at_once(outputs: object, layout: Layout, rows: int, parts: int) -> tuple[int, int]:
    """How many parts of how many rows each to make up, of *parts* of *rows*; at least 2 of 1."""
    per_row = sum(
        t.numel() // rows
        for t, dim in zip(pytree.tree_leaves(outputs), layout.dims, strict=True)
        if dim is not None
    )
    most = max(2, MOST_ELEMENTS // max(1, per_row))
    if 2 * rows > most:
        return 2, most // 2
    return min(parts, most // rows), rows


@dataclass(frozen=True, slots=True)
class MadeUp:
    """Outputs of ``rows`` rows for part after part, made of the ``outputs`` of ``whole_rows`` rows.

    Values stay such as the model made them: parts see them moved along the rows and along the last
    dimension, or, where a row has one number alone, shrunk (which keeps signs, probabilities and
    ranges around 0). Tensors of the ``batch`` that the model only passes on are the batch's own
    rows.
    """

    outputs: object
    layout: Layout
    whole_rows: int
    rows: int
    batch: tuple[object, object]

    def part(self, number: int, of: int, batch: tuple[object, object]) -> object:
        """The outputs of part *number* of *of*, whose rows of the batch are *batch*."""
        leaves, spec = pytree.tree_flatten(self.outputs)
        carried = self._carried(leaves, batch)
        made = [
            carried.get(i, self._varied(leaf, dim, number, of))
            for i, (leaf, dim) in enumerate(zip(leaves, self.layout.dims, strict=True))
        ]
        return pytree.tree_unflatten(made, spec)

    def _varied(self, leaf: object, dim: int | None, number: int, of: int) -> object:
        if dim is None or not isinstance(leaf, torch.Tensor):
            return leaf
        each = leaf.shape[dim] // self.whole_rows
        moved = leaf.roll(number * each, dim).narrow(dim, 0, each * self.rows)
        if not moved.is_floating_point() and not moved.is_complex():
            return moved
        if moved.dim() > 1 and moved.shape[-1] > 1 and dim != moved.dim() - 1:
            return moved.roll(number, -1)
        return moved * (1 - 0.5 * number / of)

    def _carried(
        self, leaves: Sequence[object], batch: tuple[object, object]
    ) -> dict[int, torch.Tensor]:
        """The real rows of *batch* for the leaves that are tensors of the batch."""
        here, there = _tensors(self.batch), _tensors(batch)
        found: dict[int, torch.Tensor] = {}
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor) or self.layout.dims[i] != 0:
                continue
            for name, own in here.items():
                if own.shape == leaf.shape and torch.equal(own.to(leaf.dtype), leaf):
                    found[i] = there[name].to(leaf.dtype)
        return found


def joined(parts: Sequence[object], layout: Layout) -> object:
    """The outputs of all *parts* in one piece."""
    flat = [pytree.tree_leaves(part) for part in parts]
    spec = pytree.tree_structure(parts[0])
    made = [
        leaves[0] if dim is None else torch.cat(leaves, dim)
        for dim, leaves in zip(layout.dims, zip(*flat, strict=True), strict=True)
    ]
    return pytree.tree_unflatten(made, spec)


def doubled(tree: object) -> object:
    """*tree* with its floating-point tensors in float64."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, tree
    )


def shrunk(tree: object) -> object:
    """*tree* with other numbers in its floating-point tensors."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t * 0.75 if t.is_floating_point() else t, tree
    )


def _tensors(batch: tuple[object, object]) -> Mapping[str, torch.Tensor]:
    return {n: t for n, t in flatten(batch).items() if isinstance(t, torch.Tensor)}

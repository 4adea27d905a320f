"""Rows of a batch: the same choice along the batch dimension of every leaf that is split."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from piper.errors import BatchError
from piper.ir.dag import BatchLeaf
from piper.runtime.batch import Batch


@dataclass(frozen=True, slots=True)
class Rows:
    """Takes rows of batches whose tensors are split as *leaves* say."""

    leaves: Sequence[BatchLeaf]

    def count(self, batch: Batch) -> int:
        """Rows of *batch*. Raises :class:`BatchError` if its tensors disagree, none is split, or
        there are none.
        """
        found: dict[int, str] = {}
        self._map(batch, lambda name, tensor, dim: self._note(found, name, tensor, dim))
        if len(found) != 1:
            what = (
                ", ".join(f"{name} has {rows}" for rows, name in found.items())
                or "no tensor is split"
            )
            raise BatchError(f"the tensors of a batch must have one number of rows, found: {what}")
        (rows,) = found
        if rows == 0:
            raise BatchError("the batch has no rows; give at least one")
        return rows

    def take(self, batch: Batch, index: torch.Tensor) -> Batch:
        """The rows of *batch* that *index* (int64 ``[n]``) names, in that order."""
        taken = self._map(batch, lambda _, tensor, dim: tensor.index_select(dim, index))
        assert isinstance(taken, tuple)
        return taken

    def parts(self, batch: Batch, count: int) -> list[Batch]:
        """*batch* in *count* equal parts. Raises :class:`BatchError` if it does not divide."""
        rows = self.count(batch)
        size, rest = divmod(rows, count)
        if rest:
            raise BatchError(
                f"a batch of {rows} rows does not divide into {count} microbatches; give a multiple of {count} rows"
            )
        return [
            self.take(batch, torch.arange(i * size, (i + 1) * size, device="cpu"))
            for i in range(count)
        ]

    @staticmethod
    def _note(found: dict[int, str], name: str, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        found.setdefault(tensor.shape[dim], name)
        return tensor

    def _map(
        self, batch: Batch, function: Callable[[str, torch.Tensor, int], torch.Tensor]
    ) -> object:
        dims = {leaf.name: leaf.batch_dim for leaf in self.leaves}

        def walk(name: str, tree: object) -> object:
            if isinstance(tree, Mapping):
                return {key: walk(f"{name}.{key}", child) for key, child in tree.items()}
            if isinstance(tree, (tuple, list)):
                children = [walk(f"{name}[{i}]", child) for i, child in enumerate(tree)]
                return rebuild_sequence(tree, children)
            dim = dims.get(name)
            if dim is None or not isinstance(tree, torch.Tensor):
                return tree
            return function(name, tree, dim)

        return walk("inputs", batch[0]), walk("targets", batch[1])


def rebuild_sequence(
    original: tuple[object, ...] | list[object], children: list[object]
) -> tuple[object, ...] | list[object]:
    """*children* in a sequence of *original*'s kind; a named tuple stays one."""
    if isinstance(original, list):
        return children
    make = getattr(type(original), "_make", tuple)
    made = make(children)
    assert isinstance(made, tuple)
    return made

"""Slices: equal runs of a tensor's flattened elements, one per device that shards it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from piper.ops.base import shard_length


@dataclass(frozen=True, slots=True)
class Slice:
    """Slice ``index`` of ``count`` equal runs of a tensor's flattened elements (the last ones may
    be short or empty). The only slice of a tensor is the tensor itself, in its shape.

    Where experts are sharded, ``experts`` says which of how many equal parts of dimension 0 is
    meant; the slice is one of that part, or, with ``count`` 1, the part itself in its own shape.
    """

    index: int = 0
    count: int = 1
    experts: tuple[int, int] = (0, 1)

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of the experts; a view of *tensor*."""
        index, count = self.experts
        return tensor if count == 1 else tensor.chunk(count)[index]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The slice, one-dimensional (unless it is a whole part of the experts), without padding; a
        view of *tensor* where possible.
        """
        part = self.part(tensor)
        if self.count == 1:
            return part
        length = shard_length(tuple(part.shape), self.count)
        return part.reshape(-1)[self.index * length : (self.index + 1) * length]

    def length(self, shape: tuple[int, ...]) -> int:
        """Elements of each slice of a tensor of *shape*, padding included."""
        first = shape[:1] if self.experts[1] == 1 else (shape[0] // self.experts[1],)
        return shard_length((*first, *shape[1:]), self.count)


@dataclass(frozen=True, slots=True)
class Form:
    """How a device holds a parameter or buffer: ``whole``, or slice ``shard`` = (index, count) of
    it, or both; each of them of a part (index, count) of the ``experts`` if that is not ``None``.
    """

    whole: bool
    shard: tuple[int, int] | None = None
    experts: tuple[int, int] | None = None

    @property
    def part(self) -> tuple[tuple[int, int] | None, tuple[int, int] | None] | None:
        """What part of it a snapshot takes from here; ``None``: all."""
        partial = self.experts is not None or self.shard is not None
        return (self.experts, self.shard) if partial else None


@dataclass(frozen=True, slots=True)
class Shard:
    """A slice of a parameter: which, and its elements, as :meth:`Slice.of` gives them."""

    part: Slice
    tensor: torch.Tensor


def merge_slices(parts: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    """The tensor of which *parts* are all slices, in order."""
    if len(parts) == 1:
        return parts[0].reshape(tuple(shape))
    return torch.cat([part.reshape(-1) for part in parts]).reshape(tuple(shape))

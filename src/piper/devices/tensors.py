"""The tensor operations that every device of torch shares."""

from collections.abc import Sequence
from math import prod

import torch

from piper.errors import PlanError
from piper.ops.base import Tensor


class TensorOperations:
    """The arithmetic part of the device protocol; streams are the subclass's."""

    def flatten(self, tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """A new flat tensor holding the elements of *tensors*, one after the other."""
        flat = [as_torch(tensor).reshape(-1) for tensor in tensors]
        assert len(flat) == len(shapes)
        return torch.cat(flat)

    def unflatten(self, flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """Views of *flat* with the given shapes, one after the other."""
        parts = torch.split(as_torch(flat), [prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def add(self, a: Tensor, b: Tensor) -> torch.Tensor:
        """Elementwise sum, a new tensor."""
        return torch.add(as_torch(a), as_torch(b))

    def add_(self, a: Tensor, b: Tensor) -> None:
        """Add *b* to *a*, in place."""
        as_torch(a).add_(as_torch(b))

    def divide_(self, a: Tensor, divisor: int) -> None:
        """Divide *a*, in place."""
        as_torch(a).div_(divisor)


def as_torch(tensor: Tensor) -> torch.Tensor:
    """The torch tensor that an opaque tensor of the ops layer is."""
    assert isinstance(tensor, torch.Tensor)
    return tensor


def torch_dtype(name: str) -> torch.dtype:
    """The element type that a plan names.

    Raises :class:`PlanError` for an unknown name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise PlanError(f"unknown element type {name!r}")
    return dtype

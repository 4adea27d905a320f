"""The tensor operations that every device of torch shares."""

from collections.abc import Sequence
from math import prod

import torch

from piper.dtypes import DType
from piper.errors import PlanError
from piper.ops.base import ReduceOp, Tensor, shard_length


class TensorOperations:
    """The arithmetic part of the device protocol; streams are the subclass's."""

    torch_device: torch.device

    def flatten(
        self,
        tensors: Sequence[Tensor],
        shapes: Sequence[tuple[int, ...]],
        dtype: DType | None = None,
    ) -> torch.Tensor:
        """A new flat tensor holding the elements of *tensors*, one after the other, converted to
        *dtype* if given.
        """
        flat = [as_torch(tensor).reshape(-1) for tensor in tensors]
        assert len(flat) == len(shapes)
        if dtype is None:
            return torch.cat(flat)
        out = self.empty(sum(part.numel() for part in flat), dtype)
        return torch.cat(flat, out=out)

    def unflatten(self, flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """Views of *flat* with the given shapes, one after the other."""
        parts = torch.split(as_torch(flat), [prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def pack_shards(self, tensors: Sequence[Tensor], count: int) -> torch.Tensor:
        """A new flat tensor of *count* equal parts; part i holds the i-th slice of each tensor."""
        return torch.cat([_slices(as_torch(tensor), count) for tensor in tensors], dim=1).reshape(
            -1
        )

    def unpack_shards(
        self, flat: Tensor, shapes: Sequence[tuple[int, ...]], count: int
    ) -> list[torch.Tensor]:
        """The inverse of :meth:`pack_shards`: new tensors, or a view of *flat* where one tensor is
        all that is in it.
        """
        lengths = [shard_length(shape, count) for shape in shapes]
        columns = torch.split(as_torch(flat).view(count, -1), lengths, dim=1)
        return [
            _own_memory(column, as_torch(flat)).view(-1)[: prod(shape)].view(shape)
            for column, shape in zip(columns, shapes, strict=True)
        ]

    def split_parts(
        self,
        tensor: Tensor,
        sizes: tuple[int, ...],
        dim: int,
        count: int,
        last: int | None = None,
    ) -> torch.Tensor:
        """See :class:`~piper.ops.base.Device`."""
        parts = list(as_torch(tensor).reshape(sizes).chunk(count, dim))
        if last is not None:
            parts.append(parts.pop(last))
        flat = parts[0].new_empty(sum(part.numel() for part in parts))
        for part, place in zip(parts, flat.chunk(count), strict=True):
            # One copy, though a part need not be contiguous.
            place.view(part.shape).copy_(part)
        return flat

    def join_parts(
        self, parts: Sequence[Tensor], sizes: tuple[int, ...], dim: int, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """See :class:`~piper.ops.base.Device`."""
        return torch.cat([as_torch(part).view(sizes) for part in parts], dim).reshape(shape)

    def sum_rows(self, tensor: Tensor) -> torch.Tensor:
        """See :class:`~piper.ops.base.Device`."""
        return as_torch(tensor).sum(0)

    def numbers(self, tensor: Tensor) -> list[int]:
        """See :class:`~piper.ops.base.Device`."""
        values: list[int] = as_torch(tensor).reshape(-1).tolist()
        return values

    def first_rows(self, tensor: Tensor, count: int) -> torch.Tensor:
        """See :class:`~piper.ops.base.Device`."""
        return as_torch(tensor)[:count].clone(memory_format=torch.contiguous_format).view(-1)

    def padded_rows(self, flat: Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See :class:`~piper.ops.base.Device`."""
        source = as_torch(flat)
        out = source.new_zeros(shape)
        out.view(-1)[: source.numel()] = source
        return out

    def rows_by_expert(
        self, flat: Tensor, received: Sequence[Sequence[int]], shape: tuple[int, ...]
    ) -> torch.Tensor:
        """See :class:`~piper.ops.base.Device`."""
        numbers = [n for sender in received for n in sender]
        rows = as_torch(flat).view(sum(numbers), -1) if sum(numbers) else None
        parts = () if rows is None else torch.split(rows, numbers)
        experts = len(received[0])
        ordered = [part for e in range(experts) for part in parts[e::experts]]
        sorted_rows = torch.cat(ordered).reshape(-1) if ordered else as_torch(flat)
        return self.padded_rows(sorted_rows, shape)

    def rows_by_sender(self, rows: Tensor, received: Sequence[Sequence[int]]) -> torch.Tensor:
        """See :class:`~piper.ops.base.Device`."""
        senders = len(received)
        numbers = [n for by_expert in zip(*received, strict=True) for n in by_expert]
        parts = torch.split(as_torch(rows)[: sum(numbers)], numbers)
        ordered = [part for s in range(senders) for part in parts[s::senders]]
        return torch.cat(ordered).reshape(-1)

    def empty(self, numel: int, dtype: DType) -> torch.Tensor:
        """A new flat tensor with undefined contents."""
        return torch.empty(numel, dtype=torch_dtype(dtype), device=self.torch_device)

    def copy_(self, target: Tensor, source: Tensor) -> None:
        """Overwrite *target* by *source*."""
        as_torch(target).copy_(as_torch(source))

    def add(self, a: Tensor, b: Tensor) -> torch.Tensor:
        """Elementwise sum, a new tensor."""
        return torch.add(as_torch(a), as_torch(b))

    def add_(self, a: Tensor, b: Tensor) -> None:
        """Add *b* to *a*, in place."""
        as_torch(a).add_(as_torch(b))

    def divide_(self, a: Tensor, divisor: int) -> None:
        """Divide *a*, in place."""
        as_torch(a).div_(divisor)

    def divide(self, a: Tensor, divisor: Tensor) -> torch.Tensor:
        """Quotient by a scalar, a new tensor of *a*'s type."""
        dividend = as_torch(a)
        return (dividend / as_torch(divisor)).to(dividend.dtype)

    def multiply(self, a: Tensor, b: Tensor) -> torch.Tensor:
        """Product of two scalars, a new float64 scalar."""
        return as_torch(a).double() * as_torch(b).double()

    def zero_(self, a: Tensor) -> None:
        """Overwrite *a* by zeros."""
        as_torch(a).zero_()

    def norm_part(
        self, tensors: Sequence[Tensor], divisor: Tensor | None, op: ReduceOp
    ) -> torch.Tensor:
        """See :class:`~piper.ops.base.Device`. Each tensor's own norm comes first, as in
        ``clip_grad_norm_``.
        """
        order = 2.0 if op is ReduceOp.SUM else torch.inf
        norms = [_vector_norm(t, order) for t in map(as_torch, tensors) if t.numel()]
        if divisor is not None:
            norms = [norm / as_torch(divisor).abs().double() for norm in norms]
        return self.norm_sum([n.square() for n in norms] if op is ReduceOp.SUM else norms, op)

    def norm_sum(self, parts: Sequence[Tensor], op: ReduceOp) -> torch.Tensor:
        """See :class:`~piper.ops.base.Device`."""
        if not parts:
            return torch.zeros((), dtype=torch.float64, device=self.torch_device)
        stacked = torch.stack([as_torch(part) for part in parts])
        return stacked.sum() if op is ReduceOp.SUM else stacked.amax()

    def norm_root(self, part: Tensor, op: ReduceOp) -> torch.Tensor:
        """See :class:`~piper.ops.base.Device`."""
        value = as_torch(part)
        return value.sqrt() if op is ReduceOp.SUM else value.clone()


def _vector_norm(tensor: torch.Tensor, order: float) -> torch.Tensor:
    """The norm of all elements, as a float64 scalar; half precision is summed in single."""
    short = tensor.dtype in (torch.float16, torch.bfloat16)
    wide = tensor.float() if short else tensor
    norm: torch.Tensor = torch.linalg.vector_norm(wide, order)
    return norm.double()


def _slices(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """*tensor* as ``[count, length]``, padded with zeros."""
    flat = tensor.reshape(-1)
    missing = shard_length(tuple(tensor.shape), count) * count - flat.numel()
    return (
        torch.nn.functional.pad(flat, (0, missing)).view(count, -1)
        if missing
        else flat.view(count, -1)
    )


def _own_memory(column: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """*column*, contiguous. Copied unless it is the whole of *flat*, though one element per row (a
    scalar's slices) could be a view: that would keep the whole bucket alive for as long as the
    scalar is needed.
    """
    if column.numel() == flat.numel():
        return column
    return column.clone(memory_format=torch.contiguous_format)


def as_torch(tensor: Tensor) -> torch.Tensor:
    """The torch tensor that an opaque tensor of the ops layer is."""
    assert isinstance(tensor, torch.Tensor)
    return tensor


def dtype_name(dtype: torch.dtype) -> str:
    """The name of an element type in plans and files: torch's own, ``float32``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The element type that a plan names.

    Raises :class:`PlanError` for an unknown name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise PlanError(f"unknown element type {name!r}")
    return dtype

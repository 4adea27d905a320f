"""Labels: which dimensions of a tensor are experts, which are tokens.

A dimension is a product of *factors*, the slowest first: ``[E·C, d]`` has the dimensions (experts,
tokens) and (d). Labels are compared by the sizes of their factors at a few sample sizes of the
batch, since sizes are expressions.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from piper.ir.body import TensorSpec
from piper.ir.symbols import Dim, Expr, bind

Size: TypeAlias = tuple[int, ...]
"""A size at each of the sample points."""


class Axis(StrEnum):
    """What is cut, or grows, when experts are sharded."""

    EXPERTS = "experts"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor of a dimension; ``axis`` is ``None`` for one that sharding does not change."""

    axis: Axis | None
    size: Size


DimLabel: TypeAlias = tuple[Factor, ...]


@dataclass(frozen=True, slots=True)
class Label:
    """The factors of each dimension, and the axes that the tensor is a sum over; whether it counts
    tokens by expert; whether rows of a dropless region that belong to no expert are known to be
    zeros.
    """

    dims: tuple[DimLabel, ...]
    summed: frozenset[Axis] = frozenset()
    counts: bool = False
    zeros: bool = False

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of the dimensions, in order."""
        return tuple(f.axis for dim in self.dims for f in dim if f.axis is not None)

    @property
    def is_plain(self) -> bool:
        """Whether the tensor is the same however experts are sharded."""
        return not self.axes and not self.summed


class Sizes:
    """Sizes at the sample points, where *symbol* (if any) is the number of a microbatch's rows."""

    def __init__(self, symbol: str | None) -> None:
        rows = (6, 10, 14, 15) if symbol is not None else (1,)
        self._points: tuple[Mapping[str, int], ...] = tuple(
            {} if symbol is None else {symbol: n} for n in rows
        )
        self.one: Size = (1,) * len(rows)

    def of(self, dim: Dim) -> Size:
        """A dimension's size."""
        return tuple(bind(dim, point) for point in self._points)

    def shape(self, spec: TensorSpec) -> tuple[Size, ...]:
        """The sizes of all dimensions."""
        return tuple(self.of(dim) for dim in spec.shape)

    def plain(self, size: Size) -> DimLabel:
        """A dimension that sharding does not change."""
        return () if size == self.one else (Factor(None, size),)

    def plain_label(self, spec: TensorSpec) -> Label:
        """The label of a tensor that sharding does not change."""
        return Label(tuple(self.plain(size) for size in self.shape(spec)))


def product(factors: Iterable[Factor], count: int) -> Size:
    """The sizes of a dimension of *factors*, at *count* sample points."""
    sizes = [factor.size for factor in factors]
    return tuple(math.prod(size[i] for size in sizes) for i in range(count))


def normal(dim: DimLabel) -> DimLabel:
    """*dim* with neighbouring plain factors merged, so that equal dimensions have equal labels."""
    merged: list[Factor] = []
    for factor in dim:
        if merged and factor.axis is None and merged[-1].axis is None:
            size = product((merged[-1], factor), len(factor.size))
            merged[-1] = Factor(None, size)
        else:
            merged.append(factor)
    return tuple(merged)


def regroup(dims: Sequence[DimLabel], shape: Sequence[Size]) -> tuple[DimLabel, ...] | None:
    """The labels of a tensor's dimensions after a view to *shape*; ``None`` if that cuts through
    experts or tokens.
    """
    queue = [factor for dim in dims for factor in dim]
    found: list[DimLabel] = []
    for size in shape:
        mine: list[Factor] = []
        left = size
        while any(n != 1 for n in left) or (queue and queue[0].size == left and queue[0].axis):
            if not queue:
                return None
            factor = queue.pop(0)
            if _divides(factor.size, left):
                mine.append(factor)
                left = _quotient(left, factor.size)
            elif factor.axis is None and _divides(left, factor.size):
                mine.append(Factor(None, left))
                queue.insert(0, Factor(None, _quotient(factor.size, left)))
                left = (1,) * len(left)
            else:
                return None
        found.append(normal(tuple(mine)))
    return None if queue else tuple(found)


def _divides(part: Size, whole: Size) -> bool:
    return all(p and w % p == 0 for p, w in zip(part, whole, strict=True))


def _quotient(whole: Size, part: Size) -> Size:
    return tuple(w // p for w, p in zip(whole, part, strict=True))


@dataclass(frozen=True, slots=True)
class Scale:
    """What sharding over ``count`` devices, which work on the tokens of ``sources`` devices, makes
    of sizes. ``bound`` is the room for tokens on one device where that is no multiple of the
    ``tokens`` of one microbatch (both as in the body).
    """

    count: int
    sources: int
    tokens: Dim | None = None
    bound: Dim | None = None

    def dim(self, size: Dim, axes: Iterable[Axis | None]) -> Dim:
        """A dimension's new size."""
        found = set(axes)
        experts, tokens = Axis.EXPERTS in found, Axis.TOKENS in found
        if self.bound is not None and tokens:
            size = _times(_over(size, self.tokens or 1), self.bound)
        elif experts and tokens and self.count == self.sources:
            return size
        elif tokens and self.sources > 1:
            size = _times(size, self.sources)
        if experts and self.count > 1:
            size = _over(size, self.count)
        return size

    def spec(self, spec: TensorSpec, label: Label) -> TensorSpec:
        """A tensor's new spec."""
        return TensorSpec(self.shape(spec.shape, label.dims), spec.dtype)

    def shape(self, shape: Sequence[Dim], dims: Sequence[DimLabel]) -> tuple[Dim, ...]:
        """A tensor's new shape."""
        pairs = zip(shape, dims, strict=True)
        return tuple(self.dim(size, (f.axis for f in dim)) for size, dim in pairs)


def _times(size: Dim, factor: Dim) -> Dim:
    if isinstance(size, int) and isinstance(factor, int):
        return size * factor
    if size == 1:
        return factor
    return Expr(f"({factor})*({size})")


def _over(size: Dim, divisor: Dim) -> Dim:
    if isinstance(size, int) and isinstance(divisor, int):
        return size // divisor
    return 1 if size == divisor else Expr(f"({size})//({divisor})")

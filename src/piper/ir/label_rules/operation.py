"""One call of a region with the labels of what it reads: what the rules ask, and what they
answer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from msgspec.structs import replace

from piper.errors import DirectiveError
from piper.ir import body as ir
from piper.ir.body import Arg, Call, Ref, TensorSpec, call_refs
from piper.ir.labels import Axis, DimLabel, Factor, Label, Scale, Size, Sizes
from piper.ir.symbols import Dim

Labels: TypeAlias = tuple[Label, ...]
"""One per result of a call."""

Result: TypeAlias = tuple[Call, Labels]


@dataclass(frozen=True, slots=True)
class Region:
    """What the rules need to know of a region: its sizes, how they change, the sizes of the two
    axes (tokens: of one expert, or of all in a ``dropless`` region).
    """

    sizes: Sizes
    scale: Scale
    experts: Size
    tokens: Size
    dropless: bool

    def factor(self, axis: Axis) -> Factor:
        """The factor of an axis."""
        return Factor(axis, self.experts if axis is Axis.EXPERTS else self.tokens)

    def guess(self, shape: Iterable[Size], taken: Iterable[Axis] = ()) -> tuple[DimLabel, ...]:
        """Labels for literal sizes: the first that is as large as an axis is that axis, unless it
        is *taken*.
        """
        free = [axis for axis in Axis if axis not in set(taken)]
        found: list[DimLabel] = []
        for size in shape:
            axis = next((a for a in free if self.factor(a).size == size), None)
            if axis is None or size == self.sizes.one:
                found.append(self.sizes.plain(size))
                continue
            free.remove(axis)
            found.append((self.factor(axis),))
        return tuple(found)


class Operation:
    """One call with the labels and specs of what it reads."""

    def __init__(
        self,
        call: Call,
        labels: Sequence[Labels],
        specs: Sequence[tuple[TensorSpec | None, ...]],
        region: Region,
    ) -> None:
        self.call, self.region = call, region
        self._labels, self._specs = labels, specs
        self.name = call.target.rpartition(".")[0]
        arguments = (*call.args, *(arg for _, arg in call.kwargs))
        self.inputs = [label for arg in arguments for label in self._labels_in(arg)]

    def _labels_in(self, arg: Arg) -> tuple[Label, ...]:
        """The labels of the tensors in an argument."""
        match arg:
            case Ref(index=index):
                return (self._labels[index][0],)
            case ir.Literal(spec=spec):
                return (self.region.sizes.plain_label(spec),)
            case ir.Sequence(items=items):
                return tuple(label for item in items for label in self._labels_in(item))
            case _:
                return ()

    def label(self, position: int) -> Label:
        """The label of a positional argument."""
        found = self._labels_in(self.call.args[position])
        if len(found) != 1:
            raise self.refuse(f"has {self.call.args[position]} where piper expects a tensor")
        return found[0]

    def spec(self, position: int) -> TensorSpec:
        """The spec of a positional argument."""
        arg = self.call.args[position]
        found = self._specs[arg.index][0] if isinstance(arg, Ref) else None
        if found is None:
            raise self.refuse(f"has {arg} where piper expects a tensor of the region")
        return found

    def number(self, position: int, default: int = 0) -> int:
        """A positional argument that is a number."""
        if position >= len(self.call.args):
            return default
        arg = self.call.args[position]
        if not isinstance(arg, int):
            raise self.refuse(f"has {arg} where piper expects a number")
        return arg

    def dims(self, position: int, rank: int) -> tuple[int, ...]:
        """A positional argument that lists dimensions (none: all), counted from 0."""
        arg = self.call.args[position] if position < len(self.call.args) else None
        items = arg.items if isinstance(arg, ir.Sequence) else () if arg is None else (arg,)
        numbers = [i for i in items if isinstance(i, int)]
        if len(numbers) < len(items):
            raise self.refuse(f"has {arg} where piper expects dimensions")
        return tuple(i % rank for i in numbers) if numbers else tuple(range(rank))

    def result(self, number: int = 0) -> TensorSpec:
        """The spec of a result."""
        found = self.call.results[number]
        assert found is not None
        return found

    def shape(self, number: int = 0) -> tuple[Size, ...]:
        """The sizes of a result."""
        return self.region.sizes.shape(self.result(number))

    def done(self, *labels: Label, args: Mapping[int, Arg] | None = None) -> Result:
        """The call with results as *labels* say, some arguments exchanged."""
        results = tuple(
            None if spec is None else self.region.scale.spec(spec, label)
            for spec, label in zip(self.call.results, labels, strict=True)
        )
        changed = args or {}
        new = tuple(changed.get(i, arg) for i, arg in enumerate(self.call.args))
        return replace(self.call, args=new, results=results), labels

    def resized(self, position: int, label: Label, shape: Sequence[Dim] | None = None) -> Result:
        """The call, whose argument at *position* lists the sizes of its result (or *shape*), which
        follow *label*.
        """
        old = self.result().shape if shape is None else shape
        new = self.region.scale.shape(old, label.dims)
        return self.done(label, args={position: ir.Sequence(tuple(new))})

    def refuse(self, reason: str) -> DirectiveError:
        """The error of an operation that a sharded region cannot have."""
        shapes = " and ".join(str(self._specs[i][0]) for i in call_refs(self.call)) or "no tensor"
        return DirectiveError(f"operation {self.call.target} on {shapes} {reason}")

    def unsummed(self, label: Label, what: str = "is not linear in") -> Label:
        """*label*, refused if it is a sum over tokens or experts."""
        if label.summed:
            raise self.refuse(
                f"{what} a sum over {words(label.summed)}, of which each device has only a part: the region mixes "
                f"{words(label.summed)}"
            )
        return label

    def contracted(self, *dims: DimLabel) -> frozenset[Axis]:
        """The axes that a sum over *dims* sums over."""
        axes = frozenset(f.axis for dim in dims for f in dim if f.axis is not None)
        if self.region.dropless and axes:
            raise self.refuse(
                f"sums over {words(axes)}: in a dropless region only grouped products may (piper.grouped_mm)"
            )
        return axes


def words(axes: Iterable[Axis]) -> str:
    """The axes, as messages name them."""
    return " and ".join(axis.value for axis in Axis if axis in set(axes))


Rule: TypeAlias = Callable[[Operation], Result]
"""Raises :class:`DirectiveError` for an operation that mixes experts or tokens, or may do so."""


def plain_results(op: Operation) -> Iterable[Label]:
    """Labels of results that sharding does not change."""
    empty = Label(())
    return [
        empty if spec is None else op.region.sizes.plain_label(spec) for spec in op.call.results
    ]


def has_axes(dim: DimLabel) -> bool:
    """Whether a dimension is of experts or tokens."""
    return any(factor.axis is not None for factor in dim)


def aten(*names: str) -> tuple[str, ...]:
    """Names of operators of ATen."""
    return tuple(f"aten.{name}" for name in names)

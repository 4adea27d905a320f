"""What each operator does to labels: one rule per kind of operator.

A rule is a proof: the operator, applied to the experts and tokens that one device holds, computes for these what it computes for them among
all. A rule that cannot show that refuses, and so does an operator without a rule.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from msgspec.structs import replace

from piper.errors import DirectiveError
from piper.ir import body as ir
from piper.ir.body import Arg, Call, Ref, TensorSpec, call_refs
from piper.ir.labels import Axis, DimLabel, Factor, Label, Scale, Size, Sizes, normal, regroup
from piper.ir.symbols import Dim

GETITEM = "operator.getitem"
GROUPED = ("piper.grouped_mm.default", "piper.grouped_outer.default")
"""Products of rows sorted by group: ``(rows, weights, counts)`` and ``(rows, rows, counts)``."""

Labels: TypeAlias = tuple[Label, ...]
"""One per result of a call."""

Result: TypeAlias = tuple[Call, Labels]


@dataclass(frozen=True, slots=True)
class Region:
    """What the rules need to know of a region: its sizes, how they change, the sizes of the two axes (tokens: of one expert, or of all in
    a ``dropless`` region).
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
        """Labels for literal sizes: the first that is as large as an axis is that axis, unless it is *taken*."""
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
        """The call, whose argument at *position* lists the sizes of its result (or *shape*), which follow *label*."""
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
                f"{what} a sum over {_words(label.summed)}, of which each device has only a part: the region mixes "
                f"{_words(label.summed)}"
            )
        return label


def _words(axes: Iterable[Axis]) -> str:
    return " and ".join(axis.value for axis in Axis if axis in set(axes))


Rule: TypeAlias = Callable[[Operation], Result]


def follow(operation: Operation) -> Result:
    """The call as it is on one device, and the labels of its results. Raises :class:`DirectiveError` naming an operation that mixes experts or
    tokens, or of which that is not known.
    """
    call, name = operation.call, operation.name
    if call.rng is not None:
        raise operation.refuse(
            "draws random numbers, which would depend on how experts are sharded: move dropout out of the region"
        )
    rule = _RULES.get(name)
    if rule is not None:
        return rule(operation)
    if all(label.is_plain for label in operation.inputs) and operation.inputs:
        return operation.done(*_plain_results(operation))
    raise operation.refuse(
        "has no rule that says whether it works on each expert's tokens alone; write it with products, elementwise operations, "
        "and reductions over features, or move it out of the sharded region"
    )


def _plain_results(op: Operation) -> Iterable[Label]:
    empty = Label(())
    return [
        empty if spec is None else op.region.sizes.plain_label(spec) for spec in op.call.results
    ]


# --- elementwise ----------------------------------------------------------------------------------


def _elementwise(op: Operation) -> Result:
    dims = _broadcast(op, op.inputs, len(op.result().shape))
    label = Label(dims, _linear(op), zeros=_stays_zero(op))
    return op.done(label, *(Label(dims) for _ in op.call.results[1:]))


def _stays_zero(op: Operation) -> bool:
    """Whether zeros give zeros."""
    kind = op.name.partition(".")[2]
    first = bool(op.inputs) and op.inputs[0].zeros
    if kind in _SUMS:
        scalars = len([arg for arg in op.call.args[:2] if arg != 0]) > len(op.inputs)
        return not scalars and all(label.zeros for label in op.inputs)
    if kind == "mul":
        return any(label.zeros for label in op.inputs)
    return first and (kind in _ZERO_TO_ZERO or kind.endswith("_backward"))


def _alike(op: Operation) -> Result:
    """A new tensor of the same shape."""
    return op.done(Label(op.inputs[0].dims))


def _broadcast(op: Operation, labels: Sequence[Label], rank: int) -> tuple[DimLabel, ...]:
    found: list[DimLabel] = []
    for i in range(rank, 0, -1):
        here = {normal(label.dims[-i]) for label in labels if len(label.dims) >= i}
        here.discard(())
        if len(here) > 1:
            raise op.refuse(
                "combines an expert's or token's dimension with one that is not known to be the same (a literal size, or a tensor "
                "without experts)"
            )
        found.append(here.pop() if here else ())
    dims = tuple(found)
    axes = Label(dims).axes
    if len(set(axes)) < len(axes):
        raise op.refuse("pairs experts with experts, or tokens with tokens")
    return dims


def _linear(op: Operation) -> frozenset[Axis]:
    """What the result of an elementwise operation is a sum over."""
    summed = [label for label in op.inputs if label.summed]
    if not summed:
        return frozenset()
    axes = summed[0].summed
    kind = op.name.partition(".")[2]
    others = [label for label in op.inputs if not label.summed]
    if kind in _SUMS:
        tensors = [arg for arg in op.call.args[:2] if arg != 0]
        same = all(label.summed == axes for label in op.inputs) and len(tensors) == len(op.inputs)
        if not same:
            op.unsummed(summed[0], "adds something else to")
        return axes
    if kind in _KEEPING and not others:
        return axes
    # Gradients are linear in what they are the gradient of: the first argument.
    in_first = kind == "div" or kind.endswith(("_backward", "_backward_data"))
    scaled = kind == "mul" or (in_first and op.inputs[0].summed)
    if scaled and len(summed) == 1 and not any(axes.intersection(label.axes) for label in others):
        return axes
    op.unsummed(summed[0])
    return axes


_SUMS = ("add", "sub")
_ZERO_TO_ZERO = frozenset(
    [
        "abs",
        "alias",
        "clone",
        "contiguous",
        "convert_element_type",
        "detach",
        "div",
        "elu",
        "erf",
        "gelu",
        "hardswish",
        "leaky_relu",
        "mish",
        "neg",
        "relu",
        "sign",
        "silu",
        "sin",
        "sqrt",
        "square",
        "tanh",
        "_to_copy",
    ]
)
_KEEPING = ("neg", "clone", "alias", "detach", "_to_copy", "convert_element_type", "cumsum")


# --- products -------------------------------------------------------------------------------------


def _product(op: Operation, left: Label, right: Label) -> Label:
    """``[*, n, k] @ [*, k, m]``."""
    op.unsummed(left)
    op.unsummed(right)
    *batch, rows, inner = left.dims
    *batch2, inner2, columns = right.dims
    if inner != inner2 or batch != batch2:
        raise op.refuse("multiplies matrices whose experts or tokens do not correspond")
    label = Label((*batch, rows, columns), _contracted(op, inner))
    if len(set(label.axes)) < len(label.axes):
        raise op.refuse(
            "multiplies each expert's tokens with others': the region mixes experts or tokens"
        )
    return label


def _contracted(op: Operation, *dims: DimLabel) -> frozenset[Axis]:
    """The axes that a sum over *dims* sums over."""
    axes = frozenset(f.axis for dim in dims for f in dim if f.axis is not None)
    if op.region.dropless and axes:
        raise op.refuse(
            f"sums over {_words(axes)}: in a dropless region only grouped products may (piper.grouped_mm)"
        )
    return axes


def _mm(op: Operation) -> Result:
    return op.done(_product(op, op.label(0), op.label(1)))


def _addmm(op: Operation) -> Result:
    label = _product(op, op.label(1), op.label(2))
    op.unsummed(label, "adds something else to")
    dims = _broadcast(op, [op.unsummed(op.label(0)), label], len(label.dims))
    return op.done(Label(dims))


def _grouped_mm(op: Operation) -> Result:
    """``rows[N, k], weights[E, k, m], counts[E] -> [N, m]``."""
    rows, weights = _rows(op, op.label(0)), op.label(1)
    _counts(op)
    if weights.dims[0] != (op.region.factor(Axis.EXPERTS),) or weights.dims[1] != rows.dims[1]:
        raise op.refuse("expects weights [experts, features of the rows, …]")
    return op.done(Label((rows.dims[0], op.unsummed(weights).dims[2]), zeros=True))


def _grouped_outer(op: Operation) -> Result:
    """``rows[N, k], rows[N, m], counts[E] -> [E, k, m]``."""
    left, right = _rows(op, op.label(0)), _rows(op, op.label(1))
    _counts(op)
    experts = op.region.factor(Axis.EXPERTS)
    return op.done(Label(((experts,), left.dims[1], right.dims[1]), frozenset((Axis.TOKENS,))))


def _rows(op: Operation, label: Label) -> Label:
    tokens = (op.region.factor(Axis.TOKENS),)
    if label.dims[0] != tokens or len(label.axes) > 1:
        raise op.refuse("expects rows that are the region's tokens")
    return op.unsummed(label)


def _counts(op: Operation) -> None:
    if not op.label(2).counts:
        raise op.refuse("expects the counts that enter the region, unchanged")


# --- shapes ---------------------------------------------------------------------------------------


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
    """Some of the indices along one dimension, which is not of experts or tokens, or all of them."""
    source = op.label(0)
    position = 1 if op.name in ("aten.slice", "aten.select", "aten.unbind", "aten.narrow") else 2
    dim = op.number(position) % len(source.dims)
    if _has_axes(source.dims[dim]):
        if op.name == "aten.slice" and op.shape() == op.region.sizes.shape(op.spec(0)):
            return op.done(source, args={3: 2**63 - 1})
        raise op.refuse("takes some experts or tokens out of all by their number")
    return op.done(
        *(
            _replaced(op, source, dim, number, gone=op.name in ("aten.select", "aten.unbind"))
            for number in range(len(op.call.results))
        )
    )


def _replaced(op: Operation, source: Label, dim: int, number: int, *, gone: bool) -> Label:
    dims = list(source.dims)
    if gone:
        del dims[dim]
    else:
        dims[dim] = op.region.sizes.plain(op.shape(number)[dim])
    return Label(tuple(dims), source.summed, zeros=source.zeros)


def _has_axes(dim: DimLabel) -> bool:
    return any(factor.axis is not None for factor in dim)


def _part_backward(op: Operation) -> Result:
    """``slice_backward`` and ``select_backward``: zeros around a part."""
    source, dim = op.label(0), op.number(2) % len(op.shape())
    dims = list(source.dims)
    whole = op.region.sizes.plain(op.shape()[dim])
    if op.name == "aten.select_backward":
        dims.insert(dim, whole)
    else:
        if _has_axes(dims[dim]):
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
    if len(rest) > 1 or len(summed) > 1 or any(_has_axes(d) for d in joined):
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
        if new != old and _has_axes(dims[i]):
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
    return op.done(*_plain_results(op))


# --- along dimensions -----------------------------------------------------------------------------


def _sum(op: Operation) -> Result:
    source = op.label(0)
    chosen, kept = _reduced(op, source)
    summed = source.summed | _contracted(op, *(source.dims[i] for i in chosen))
    return op.done(Label(kept, summed))


def _reduce(op: Operation) -> Result:
    """A reduction that is not a sum: over features only."""
    source = op.unsummed(op.label(0))
    chosen, kept = _reduced(op, source)
    if any(_has_axes(source.dims[i]) for i in chosen):
        raise op.refuse("reduces over experts or tokens: the region mixes them")
    return op.done(*(Label(kept) for _ in op.call.results))


def _reduced(op: Operation, source: Label) -> tuple[tuple[int, ...], tuple[DimLabel, ...]]:
    rank = len(source.dims)
    chosen = op.dims(1, rank)
    keep = len(op.result().shape) == rank
    kept = tuple(
        () if i in chosen else d for i, d in enumerate(source.dims) if keep or i not in chosen
    )
    return chosen, kept


def _flip(op: Operation) -> Result:
    source = op.label(0)
    if any(_has_axes(source.dims[i]) for i in op.dims(1, len(source.dims))):
        raise op.refuse("works along experts or tokens: the region mixes them")
    return op.done(source)


def _along(position: int) -> Rule:
    """An operation along one dimension, given by the argument at *position*, which is of features."""

    def rule(op: Operation) -> Result:
        label = Label(_broadcast(op, op.inputs, len(op.result().shape)), _linear(op))
        dim = op.number(position, -1) % max(len(label.dims), 1)
        if _has_axes(label.dims[dim]):
            raise op.refuse("works along experts or tokens: the region mixes them")
        return op.done(
            *(_replaced(op, label, dim, i, gone=False) for i in range(len(op.call.results)))
        )

    return rule


def _names(*names: str) -> tuple[str, ...]:
    return tuple(f"aten.{name}" for name in names)


_ELEMENTWISE = (
    *_names("abs", "acos", "add", "addcdiv", "addcmul", "alias", "asin", "atan", "atan2"),
    *_names("bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "celu", "clamp"),
    *_names("clamp_max", "clamp_min", "clone", "contiguous", "cos", "cosh", "detach", "div", "elu"),
    *_names("elu_backward", "eq", "erf", "erfc", "exp", "exp2", "expm1", "fill", "floor"),
    *_names("floor_divide", "fmod", "frac", "ge", "gelu", "gelu_backward", "gt", "hardsigmoid"),
    *_names("hardswish", "hardswish_backward", "hardtanh", "hardtanh_backward", "isfinite"),
    *_names("isinf", "isnan", "le", "leaky_relu", "leaky_relu_backward", "lerp", "lift_fresh"),
    *_names("log", "log10", "log1p", "log2", "log_sigmoid_backward", "logical_and"),
    *_names("logical_not", "logical_or", "logical_xor", "lt", "masked_fill", "maximum", "minimum"),
    *_names("mish", "mish_backward", "mul", "nan_to_num", "ne", "neg", "pow", "reciprocal", "relu"),
    *_names("remainder", "round", "rsqrt", "rsub", "sgn", "sigmoid", "sigmoid_backward", "sign"),
    *_names("silu", "silu_backward", "sin", "sinh", "softplus", "softplus_backward", "sqrt"),
    *_names("square", "sub", "tan", "tanh", "tanh_backward", "threshold", "threshold_backward"),
    *_names("trunc", "where", "xlogy", "_to_copy"),
    "prims.convert_element_type",
)

_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_names("zeros_like", "ones_like", "full_like", "empty_like"), _alike),
    **dict.fromkeys(_names("full", "zeros", "ones", "new_zeros", "new_ones", "new_full"), _fill),
    **dict.fromkeys(_names("scalar_tensor"), _scalar),
    **dict.fromkeys(_names("mm", "bmm"), _mm),
    **dict.fromkeys(_names("addmm", "baddbmm"), _addmm),
    **dict.fromkeys(_names("view", "reshape", "_unsafe_view"), _view),
    **dict.fromkeys(_names("permute", "transpose", "t"), _permute),
    **dict.fromkeys(_names("expand"), _expand),
    **dict.fromkeys(_names("unsqueeze"), _unsqueeze),
    **dict.fromkeys(_names("squeeze"), _squeeze),
    **dict.fromkeys(
        _names("slice", "select", "narrow", "unbind", "split", "split_with_sizes"), _part
    ),
    **dict.fromkeys(_names("slice_backward", "select_backward"), _part_backward),
    **dict.fromkeys(_names("cat", "stack"), _join),
    **dict.fromkeys(_names("constant_pad_nd"), _pad),
    **dict.fromkeys(_names("sum"), _sum),
    **dict.fromkeys(_names("mean", "amax", "amin", "prod", "any", "all", "logsumexp"), _reduce),
    **dict.fromkeys(_names("_softmax", "_log_softmax", "cumsum"), _along(1)),
    **dict.fromkeys(_names("_softmax_backward_data", "_log_softmax_backward_data"), _along(2)),
    "aten.flip": _flip,
    "piper.grouped_mm": _grouped_mm,
    "piper.grouped_outer": _grouped_outer,
}


def follow_body(
    body: ir.Body, inputs: Sequence[Label], region: Region
) -> tuple[ir.Body, tuple[Label, ...]]:
    """*body* as it is on one device, and the labels of its outputs. Raises what :func:`follow` raises."""
    labels: list[Labels] = [(label,) for label in inputs]
    specs: list[tuple[TensorSpec | None, ...]] = [(spec,) for spec in body.inputs]
    calls: list[Call] = []
    for call in body.calls:
        if call.target == GETITEM:
            (source,) = call_refs(call)
            index = call.args[1]
            assert isinstance(index, int)
            label, new = labels[source][index], calls[source - len(inputs)].results[index]
            calls.append(replace(call, results=(new,)))
            labels.append((label,))
        else:
            changed, found = follow(Operation(call, labels, specs, region))
            calls.append(changed)
            labels.append(found)
        specs.append(call.results)
    outputs = tuple(labels[ref][0] for ref in body.outputs)
    new_inputs = tuple(
        region.scale.spec(spec, label) for spec, label in zip(body.inputs, inputs, strict=True)
    )
    return replace(body, inputs=new_inputs, calls=tuple(calls)), outputs

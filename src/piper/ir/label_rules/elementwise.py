"""Elementwise operators."""

from collections.abc import Mapping, Sequence

from piper.ir.label_rules.operation import (
    Operation,
    Result,
    Rule,
    aten,
)
from piper.ir.labels import Axis, DimLabel, Label, normal


def _elementwise(op: Operation) -> Result:
    dims = broadcast(op, op.inputs, len(op.result().shape))
    label = Label(dims, linear(op), zeros=_stays_zero(op))
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


def broadcast(op: Operation, labels: Sequence[Label], rank: int) -> tuple[DimLabel, ...]:
    """The dimensions of a result of that many, to which tensors of *labels* are broadcast."""
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


def linear(op: Operation) -> frozenset[Axis]:
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

_ELEMENTWISE = (
    *aten("abs", "acos", "add", "addcdiv", "addcmul", "alias", "asin", "atan", "atan2"),
    *aten("bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "celu", "clamp"),
    *aten("clamp_max", "clamp_min", "clone", "contiguous", "cos", "cosh", "detach", "div", "elu"),
    *aten("elu_backward", "eq", "erf", "erfc", "exp", "exp2", "expm1", "fill", "floor"),
    *aten("floor_divide", "fmod", "frac", "ge", "gelu", "gelu_backward", "gt", "hardsigmoid"),
    *aten("hardswish", "hardswish_backward", "hardtanh", "hardtanh_backward", "isfinite"),
    *aten("isinf", "isnan", "le", "leaky_relu", "leaky_relu_backward", "lerp", "lift_fresh"),
    *aten("log", "log10", "log1p", "log2", "log_sigmoid_backward", "logical_and"),
    *aten("logical_not", "logical_or", "logical_xor", "lt", "masked_fill", "maximum", "minimum"),
    *aten("mish", "mish_backward", "mul", "nan_to_num", "ne", "neg", "pow", "reciprocal", "relu"),
    *aten("remainder", "round", "rsqrt", "rsub", "sgn", "sigmoid", "sigmoid_backward", "sign"),
    *aten("silu", "silu_backward", "sin", "sinh", "softplus", "softplus_backward", "sqrt"),
    *aten("square", "sub", "tan", "tanh", "tanh_backward", "threshold", "threshold_backward"),
    *aten("trunc", "where", "xlogy", "_to_copy"),
    "prims.convert_element_type",
)


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(aten("zeros_like", "ones_like", "full_like", "empty_like"), _alike),
}

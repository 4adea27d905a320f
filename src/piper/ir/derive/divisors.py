"""What gradients are divided by before they are used: the loss's total weight, the scale of the
loss, or the product of both.
"""

from collections.abc import Collection, Mapping

from piper.dtypes import DType
from piper.ids import ValueId
from piper.ir.body import TensorSpec
from piper.ir.dag import UNNUMBERED, Role, Value
from piper.ir.derive.builder import Builder, Group, update_chunk
from piper.ir.derive.weights import sum_weights
from piper.ops.product import Product

SCALE = Value(UNNUMBERED, TensorSpec((), DType.FLOAT64), Role.SCALE)
"""The scale of the step's loss."""

SCALED_WEIGHT = Value(UNNUMBERED, TensorSpec((), DType.FLOAT64), Role.TOTAL, "scaled weight")
"""The total weight times the scale."""


def find_divisors(builder: Builder, groups: Collection[Group]) -> Mapping[Group, ValueId]:
    """The scalar that gradients are divided by on each of *groups*, which use some; empty if they
    are not.
    """
    weights = sum_weights(builder, groups)
    if not builder.dag.loss_scaled or not groups:
        return weights
    scale = builder.source(SCALE)
    if not weights:
        return dict.fromkeys(groups, scale)
    maker = builder.makers[builder.dag.weights[0]]
    region = builder.region(maker)
    homes: dict[ValueId, list[Group]] = {}
    for group in groups:
        if group in weights:
            homes.setdefault(weights[group], []).append(group)
    found: dict[Group, ValueId] = {}
    for weight, using in homes.items():
        devices = None if None in using else tuple({d: d for g in using for d in g or ()})
        node = update_chunk(Product(), region, (weight, scale), devices)
        (product,) = builder.add(node, [SCALED_WEIGHT])
        found.update(dict.fromkeys(using, product))
    return found

"""What capture needs to know about ATen operators, by name."""

import operator

import torch
import torch.fx

from piper.ir.body import GETITEM

RESHAPES = frozenset(
    f"aten.{name}"
    for name in (
        "t.default",
        "transpose.int",
        "permute.default",
        "view.default",
        "view.dtype",
        "_unsafe_view.default",
        "unsqueeze.default",
        "squeeze.default",
        "squeeze.dim",
        "squeeze.dims",
        "expand.default",
        "view_as_real.default",
        "view_as_complex.default",
    )
)
"""Views with at least as many elements as what they view."""

PARTS = frozenset(
    f"aten.{name}"
    for name in (
        "slice.Tensor",
        "select.int",
        "narrow.default",
        "diagonal.default",
        "split.Tensor",
        "split_with_sizes.default",
        "unbind.int",
        "unfold.default",
    )
)
"""Views that may show only a part of what they view."""

CASTS = frozenset({"aten._to_copy.default", "prims.convert_element_type.default"})
"""Conversions of element type."""

IDENTITIES = frozenset(
    {
        "aten.detach.default",
        "aten.alias.default",
        "aten.lift.default",
        "aten.lift_fresh.default",
        "aten.lift_fresh_copy.default",
    }
)
"""Operators that return their input, in a graph where nothing is written in place."""

ASSERTIONS = ("aten._assert", "aten.sym_constrain_range", "aten._functional_assert")
"""Beginnings of the names of operators that only check."""

ADD = "aten.add.Tensor"

_SIZES = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


def name(node: torch.fx.Node) -> str:
    """The operator's name, for instance ``aten.mm.default`` or ``operator.getitem``."""
    if node.op != "call_function":
        return node.op
    return GETITEM if node.target is operator.getitem else str(node.target)


def is_size(node: torch.fx.Node) -> bool:
    """Whether the node's result is a number (a size or arithmetic on sizes), not a tensor."""
    return isinstance(node.meta.get("val"), _SIZES)


def is_getitem(node: torch.fx.Node) -> bool:
    """Whether the node picks one result of a multi-result call."""
    return node.target is operator.getitem


def tensor_inputs(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes that *node* reads, without sizes."""
    return [i for i in node.all_input_nodes if not is_size(i)]


def same_shape(a: torch.fx.Node, b: torch.fx.Node) -> bool:
    """Whether two tensor nodes have, symbol for symbol, equal shape and element type."""
    x, y = a.meta.get("val"), b.meta.get("val")
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    return x.dtype == y.dtype and str(tuple(x.shape)) == str(tuple(y.shape))

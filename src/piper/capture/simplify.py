"""Removal of operators that do nothing in a graph without in-place writes."""

import torch.fx

from piper.capture.operators import (
    ASSERTIONS,
    IDENTITIES,
    is_size,
    name,
    same_shape,
)

_SHAPERS = frozenset({"aten.view.default", "aten._unsafe_view.default", "aten.expand.default"})


def simplify(graph: torch.fx.Graph) -> None:
    """Drop assertions, identities, reshapes to the same shape and double transposes, in place."""
    for node in list(graph.nodes):
        if node.op != "call_function" or is_size(node):
            continue
        _drop_unread(node)
        if name(node).startswith(ASSERTIONS):
            node.replace_all_uses_with(None)
            graph.erase_node(node)
        elif (same := _equal_to(node)) is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _drop_unread(node: torch.fx.Node) -> None:
    """The backward of batch norm in training takes the running statistics but does not read
    them.
    """
    if name(node) == "aten.native_batch_norm_backward.default" and node.args[7] is True:
        node.args = (*node.args[:3], None, None, *node.args[5:])


def _equal_to(node: torch.fx.Node) -> torch.fx.Node | None:
    """An earlier node with the same value as *node*, if its operator shows that."""
    source = node.args[0] if node.args else None
    if not isinstance(source, torch.fx.Node) or is_size(source):
        return None
    operation = name(node)
    if operation in IDENTITIES:
        return source
    if operation in _SHAPERS and same_shape(node, source):
        return source
    if operation == "aten.slice.Tensor" and same_shape(node, source) and len(node.args) < 5:
        return source
    if operation == "aten.t.default" and name(source) == "aten.t.default":
        twice = source.args[0]
        return twice if isinstance(twice, torch.fx.Node) else None
    return None

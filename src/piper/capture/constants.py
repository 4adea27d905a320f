"""Tensors that the model uses without registering them: literals in bodies, or constant buffers."""

from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.fx

from piper.capture.bodies import tensor_spec
from piper.capture.joint import constant_value
from piper.ir.body import Literal

Node: TypeAlias = torch.fx.Node

LITERAL_ELEMENTS = 64
"""Larger constants become buffers."""

PREFIX = "constant."
"""Beginning of the names of constant buffers."""


@dataclass(frozen=True, slots=True)
class Constants:
    """``literals`` by node; ``tensors`` by the name of their buffer, and ``names`` of nodes in
    it.
    """

    literals: dict[Node, Literal]
    names: dict[Node, str]
    tensors: dict[str, torch.Tensor]


def find_constants(module: torch.fx.GraphModule) -> Constants:
    """All constant tensors of the graph. A tensor used several times gets one name.

    Constants with one value throughout become calls of ``aten.full`` in the graph.
    """
    found = Constants({}, {}, {})
    for node in list(module.graph.find_nodes(op="get_attr")):
        value = constant_value(module, node)
        if _is_uniform(value):
            _replace_by_fill(node, value)
            continue
        if (literal := _literal(value, node.name)) is not None:
            found.literals[node] = literal
            continue
        same = [key for key, known in found.tensors.items() if known is value]
        key = same[0] if same else f"{PREFIX}{len(found.tensors)}"
        found.tensors[key] = value
        found.names[node] = key
    return found


def _is_uniform(value: torch.Tensor) -> bool:
    return (
        value.numel() > 0 and not value.is_complex() and bool((value == value.reshape(-1)[0]).all())
    )


def _replace_by_fill(node: Node, value: torch.Tensor) -> None:
    graph = node.graph
    with graph.inserting_before(node):
        fill = graph.call_function(
            torch.ops.aten.full.default,
            (list(value.shape), value.reshape(-1)[0].item()),
            {"dtype": value.dtype, "device": value.device, "pin_memory": False},
        )
    fill.meta = dict(node.meta)
    node.replace_all_uses_with(fill)
    graph.erase_node(node)


def _literal(value: torch.Tensor, where: str) -> Literal | None:
    """*value* as a literal if it is small, real and finite (JSON has no word for the rest)."""
    if value.numel() > LITERAL_ELEMENTS or value.is_complex():
        return None
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        return None
    return Literal(tensor_spec(value, where), tuple(value.flatten().tolist()))

"""From a chunk's nodes to its body: torch-free data with position-local names."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.fx
from torch._ops import OpOverload

from piper.capture.joint import is_random
from piper.capture.operators import is_size, name
from piper.capture.sizes import dim, size_argument
from piper.dtypes import DType
from piper.errors import CaptureError
from piper.ir import body as ir
from piper.ir.body import GETITEM, Arg, Body, Call, Const, Literal, Ref, TensorSpec

Node: TypeAlias = torch.fx.Node

# The graph's views were legal for the strides of its values. A value that comes from another device
# is contiguous, so a view of it (or of a sunk view of it) may need a copy.
_STRIDE_FREE = {
    "aten.view.default": "aten.reshape.default",
    "aten._unsafe_view.default": "aten.reshape.default",
}


@dataclass(frozen=True, slots=True)
class ChunkCode:
    """A body with the nodes that its inputs stand for and the random nodes that fill its slots."""

    body: Body
    inputs: tuple[Node, ...]
    randoms: tuple[Node, ...]


def tensor_spec(value: object, where: str) -> TensorSpec:
    """Shape and type of a traced tensor."""
    assert isinstance(value, torch.Tensor), f"{where} is not a tensor"
    return TensorSpec(tuple(dim(size) for size in value.shape), dtype_of(value, where))


def dtype_of(value: torch.Tensor, where: str) -> DType:
    """The element type; :class:`CaptureError` for one that piper cannot send or store."""
    text = str(value.dtype).removeprefix("torch.")
    if text not in set(DType):
        raise CaptureError(
            f"{where} has element type {text}, which piper does not support; supported: "
            f"{', '.join(DType)}"
        )
    return DType(text)


def chunk_code(
    own: Sequence[Node],
    outputs: Sequence[Node],
    *,
    sunk: frozenset[Node],
    literals: Mapping[Node, Literal],
) -> ChunkCode:
    """The body that computes *outputs* from the values that *own* (in graph order) read.

    Sunk nodes are computed again where they are needed; *literals* become constants in place.
    """
    order, inputs = _order(own, outputs, sunk, literals)
    for node in order:
        _check_strides(node, inputs)
    index = {node: i for i, node in enumerate((*inputs, *order))}
    randoms = tuple(n for n in order if is_random(n))
    slots = {node: slot for slot, node in enumerate(randoms)}
    convert = _Arguments(index, literals)
    calls = tuple(_call(node, convert, slots.get(node)) for node in order)
    specs = tuple(tensor_spec(n.meta.get("val"), n.name) for n in inputs)
    body = Body(specs, calls, tuple(index[n] for n in outputs), len(randoms))
    return ChunkCode(body, tuple(inputs), randoms)


def _order(
    own: Sequence[Node],
    outputs: Sequence[Node],
    sunk: frozenset[Node],
    literals: Mapping[Node, Literal],
) -> tuple[list[Node], list[Node]]:
    """Nodes in the order in which they are computed, and inputs in the order of their first use."""
    mine = set(own)
    order: dict[Node, None] = {}
    inputs: dict[Node, None] = {}

    def need(node: Node) -> None:
        if node in order or node in inputs or node in literals or is_size(node):
            return
        if node.op != "call_function" or (node not in sunk and node not in mine):
            inputs[node] = None
            return
        for source in node.all_input_nodes:
            need(source)
        order[node] = None

    for node in (*own, *outputs):
        need(node)
    return list(order), list(inputs)


def _check_strides(node: Node, inputs: Sequence[Node]) -> None:
    if name(node) != "aten.as_strided.default":
        return
    source = node.all_input_nodes[0]
    if source in inputs and not source.meta["val"].is_contiguous():
        raise CaptureError(
            f"as_strided reads a tensor of shape {tuple(source.meta['val'].shape)} from another region, whose memory "
            f"layout is not kept between devices; call .contiguous() first, or use view, reshape, unfold"
        )


def _call(node: Node, convert: "_Arguments", slot: int | None) -> Call:
    value = node.meta.get("val")
    results = value if isinstance(value, (tuple, list)) else (value,)
    return Call(
        target=_STRIDE_FREE.get(name(node), name(node)),
        args=tuple(convert(arg, node) for arg in node.args),
        kwargs=tuple((key, convert(arg, node)) for key, arg in node.kwargs.items()),
        results=tuple(
            tensor_spec(r, node.name) if isinstance(r, torch.Tensor) else None for r in results
        ),
        rng=slot,
    )


class _Arguments:
    """Converts arguments of graph nodes."""

    def __init__(self, index: Mapping[Node, int], literals: Mapping[Node, Literal]) -> None:
        self._index = index
        self._literals = literals

    def __call__(self, arg: object, user: Node) -> Arg:
        if isinstance(arg, Node):
            return self._node(arg)
        if arg is None or isinstance(arg, (bool, int, str)):
            return arg
        if isinstance(arg, float):
            return arg if math.isfinite(arg) else Const("float", str(arg))
        if isinstance(arg, (tuple, list)):
            return ir.Sequence(tuple(self(item, user) for item in arg))
        for kind, convert in _CONSTANTS:
            if isinstance(arg, kind):
                return convert(arg)
        raise CaptureError(
            f"operator {name(user)} has an argument of type {type(arg).__name__} ({arg!r}), which piper "
            f"cannot store in a body"
        )

    def _node(self, node: Node) -> Arg:
        if node in self._literals:
            return self._literals[node]
        if is_size(node):
            return size_argument(node.meta["val"])
        return Ref(self._index[node])


_CONSTANTS: tuple[tuple[type, Callable[[object], Const]], ...] = (
    (torch.dtype, lambda v: Const("dtype", str(v).removeprefix("torch."))),
    (torch.device, lambda _: Const("device", "here")),
    (torch.layout, lambda v: Const("layout", str(v).removeprefix("torch."))),
    (torch.memory_format, lambda v: Const("memory_format", str(v).removeprefix("torch."))),
    (complex, lambda v: Const("complex", str(v))),
)


def check_operators(nodes: Iterable[Node]) -> None:
    """Raise :class:`CaptureError` for a node that is not a call of one registered operator."""
    for node in nodes:
        if node.op != "call_function" or is_size(node) or name(node) == GETITEM:
            continue
        if not isinstance(node.target, OpOverload):
            raise CaptureError(
                f"the graph contains {node.target}, which is not a plain operator (control flow, flex "
                f"attention and other higher-order operators are not supported); use plain tensor code"
            )

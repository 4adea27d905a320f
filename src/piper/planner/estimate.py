"""Rough durations of nodes, for choosing an order before anything was measured.

Only ratios matter. Chunks: floating-point operations of their matrix products, plus the bytes that the other
calls touch; communication: latency plus bytes over bandwidth.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from piper.ids import BodyId, NodeId, ValueId
from piper.ir.body import Body, Call, Ref, TensorSpec
from piper.ir.dag import Chunk, Dag, Node
from piper.ops.compute import Call as CallWork
from piper.ops.offload import Fetch, Offload


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds of an imagined device: floating-point operations and bytes per second, seconds."""

    flops: float = 5e10
    memory: float = 1e10
    link: float = 1e9
    host: float = 5e9  # between a device and its host's memory
    latency: float = 5e-5
    overhead: float = 1e-5


def node_seconds(dag: Dag, bindings: Mapping[str, int], rates: Rates) -> dict[NodeId, float]:
    """Estimated seconds of every node, all positive."""
    bodies = {b: body_seconds(body, bindings, rates) for b, body in dag.bodies.items()}
    sizes = {v.id: v.spec.nbytes(bindings) for v in dag.values.values()}
    return {n.id: _seconds(n, bodies, sizes, rates) for n in dag.nodes.values()}


def _seconds(
    node: Node, bodies: Mapping[BodyId, float], sizes: Mapping[ValueId, int], rates: Rates
) -> float:
    if isinstance(node, Chunk):
        if isinstance(node.work, CallWork):
            return bodies[node.work.body]
        return rates.overhead + sum(sizes[v] for v in node.inputs) / rates.memory
    local = isinstance(node.work, (Offload, Fetch))
    speed = rates.host if local else rates.link
    return rates.latency + sum(sizes[v] for v in node.outputs) / speed


def body_seconds(body: Body, bindings: Mapping[str, int], rates: Rates) -> float:
    """Estimated seconds of a chunk body."""
    seconds = rates.overhead
    specs: list[TensorSpec | None] = list(body.inputs)
    for call in body.calls:
        seconds += _call_flops(call, specs, bindings) / rates.flops
        seconds += sum(s.nbytes(bindings) for s in call.results if s) / rates.memory
        specs.append(call.results[0] if call.results else None)
    return seconds


def _call_flops(call: Call, specs: list[TensorSpec | None], bindings: Mapping[str, int]) -> float:
    """2·m·n·k for products; 4·b·h·s·s·d for attention (8/3 more backward); 0 for the rest."""
    result = call.results[0] if call.results else None
    if result is None:
        return 0.0
    operands = [specs[a.index] for a in call.args if isinstance(a, Ref)]
    name = call.target.split(".")[1] if "." in call.target else call.target
    first = next((s for s in operands if s is not None), None)
    if name in ("mm", "bmm") and first is not None:
        return 2.0 * result.numel(bindings) * first.sizes(bindings)[-1]
    if name in ("addmm", "baddbmm") and len(operands) > 1 and operands[1] is not None:
        return 2.0 * result.numel(bindings) * operands[1].sizes(bindings)[-1]
    if "scaled_dot_product" in name and first is not None and len(first.shape) == 4:
        batch, heads, length, width = first.sizes(bindings)
        factor = 10.0 if "backward" in name else 4.0
        return factor * math.prod((batch, heads, length, length, width))
    return 0.0

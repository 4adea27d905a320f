"""Durations of nodes, for choosing an order: rough ones before anything was measured, or those of
given costs.

Only ratios matter. Roughly, chunks: floating-point operations of their matrix products, plus the
bytes that the other calls touch; communication: latency plus bytes over bandwidth.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from piper.ids import BodyId, NodeId, ValueId
from piper.ir.body import Body, TensorSpec
from piper.ir.dag import Chunk, Dag, Node
from piper.ops.compute import Call as CallWork
from piper.ops.offload import Fetch, Offload
from piper.plan.costs import Costs
from piper.plan.topology import alone_seconds, traffic
from piper.plan.work import call_flops


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


def costed_seconds(dag: Dag, bindings: Mapping[str, int], costs: Costs) -> dict[NodeId, float]:
    """Seconds of every node by *costs*; communication as on idle links."""
    sizes = {v.id: v.spec.nbytes(bindings) for v in dag.values.values()}
    topology = costs.topology_for(1 + max(d for n in dag.nodes.values() for d in n.participants))

    def seconds(node: Node) -> float:
        if isinstance(node, Chunk):
            if isinstance(node.work, CallWork):
                return costs.chunk(dag, bindings, node)
            return costs.local(node.work.kind, sum(sizes[v] for v in node.inputs))
        if topology is None:
            return 0.0
        role = "send" if node.work.kind == "transfer" else node.work.kind
        nbytes = sum(sizes[v] for v in node.outputs)
        return alone_seconds(topology, traffic(topology, role, node.groups[0], nbytes))

    return {node.id: seconds(node) for node in dag.nodes.values()}


def body_seconds(body: Body, bindings: Mapping[str, int], rates: Rates) -> float:
    """Estimated seconds of a chunk body."""
    seconds = rates.overhead
    specs: list[TensorSpec | None] = list(body.inputs)
    for call in body.calls:
        seconds += call_flops(call, specs, bindings) / rates.flops
        seconds += sum(s.nbytes(bindings) for s in call.results if s) / rates.memory
        specs.append(call.results[0] if call.results else None)
    return seconds

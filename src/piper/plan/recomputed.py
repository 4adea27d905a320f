"""How much of a step's work is done a second time: what backwards recompute of their forwards."""

from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter

from piper.ids import BodyId, NodeId, ValueId
from piper.ir.body import call_refs
from piper.ir.dag import Chunk, Dag, Node, Pass, Role
from piper.ops.compute import Call
from piper.plan.work import working_calls

_BACKWARD = (Pass.BACKWARD, Pass.BACKWARD_INPUT, Pass.BACKWARD_WEIGHT)


def recomputed_flops(dag: Dag, bindings: Mapping[str, int]) -> Mapping[NodeId, float]:
    """Floating-point operations of each backward chunk that belong to its forward: where a region
    is recomputed, all that does not depend on a gradient. Chunks that recompute nothing are left
    out.
    """
    if not any(chunk.recompute is not None for chunk in dag.chunks()):
        return {}
    finder = _Finder(dag, bindings)
    for node in TopologicalSorter(dag.predecessors).static_order():
        finder.look(dag.nodes[node])
    found = {
        chunk.id: finder.recomputed(chunk)
        for chunk in dag.chunks()
        if chunk.recompute is not None and chunk.pass_ in _BACKWARD
    }
    return {node: flops for node, flops in found.items() if flops}


class _Finder:
    def __init__(self, dag: Dag, bindings: Mapping[str, int]) -> None:
        self.dag, self.bindings = dag, bindings
        self._gradients: dict[ValueId, bool] = {}
        self._bodies: dict[
            tuple[BodyId, tuple[bool, ...]], tuple[float, tuple[bool, ...]]
        ] = {}  # by body and which inputs are gradients: FLOPs that need none, which outputs need one

    def look(self, node: Node) -> None:
        """Find out which of the node's outputs depend on gradients; all nodes before it have been
        looked at.
        """
        for value in node.inputs:
            if value not in self._gradients and value not in self.dag.producers:
                self._gradients[value] = self.dag.values[value].role is Role.SEED
        self._gradients.update(zip(node.outputs, self._outputs(node), strict=True))

    def recomputed(self, chunk: Chunk) -> float:
        """The FLOPs of *chunk* that depend on no gradient."""
        return self._traced(chunk)[0]

    def _outputs(self, node: Node) -> Sequence[bool]:
        if not isinstance(node, Chunk):  # copies of what it carries
            return [any(self._gradients[v] for v in node.inputs)] * len(node.outputs)
        if isinstance(node.work, Call) and node.pass_ in _BACKWARD:
            return self._traced(node)[1]
        return [node.pass_ is not Pass.FORWARD] * len(node.outputs)

    def _traced(self, chunk: Chunk) -> tuple[float, tuple[bool, ...]]:
        assert isinstance(chunk.work, Call), f"core chunk {chunk.label!r} calls no body"
        given = tuple(self._gradients[value] for value in chunk.inputs)
        key = (chunk.work.body, given)
        if (known := self._bodies.get(key)) is None:
            known = self._bodies[key] = self._trace(*key)
        return known

    def _trace(self, name: BodyId, given: tuple[bool, ...]) -> tuple[float, tuple[bool, ...]]:
        body = self.dag.bodies[name]
        depends = list(given)
        for call in body.calls:
            depends.append(any(depends[ref] for ref in call_refs(call)))
        flops = sum(
            work.flops
            for number, work in working_calls(body, self.bindings)
            if not depends[len(given) + number]
        )
        return flops, tuple(depends[ref] for ref in body.outputs)

"""How much of a step's work is done a second time: what backwards recompute of their forwards."""

from collections.abc import Mapping

from piper.ids import BodyId, NodeId, ValueId
from piper.ir.body import call_refs
from piper.ir.dag import Chunk, Dag, Pass, Role
from piper.ops.compute import Call
from piper.plan.work import working_calls

_BACKWARD = (Pass.BACKWARD, Pass.BACKWARD_INPUT, Pass.BACKWARD_WEIGHT)


def recomputed_flops(dag: Dag, bindings: Mapping[str, int]) -> Mapping[NodeId, float]:
    """Floating-point operations of each backward chunk that belong to its forward: where a region is recomputed, all that does not depend on a
    gradient. Chunks that recompute nothing are left out.
    """
    if not any(chunk.recompute is not None for chunk in dag.chunks()):
        return {}
    finder = _Finder(dag, bindings)
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

    def recomputed(self, chunk: Chunk) -> float:
        """The FLOPs of *chunk* that depend on no gradient."""
        return self._traced(chunk)[0]

    def _depends(self, value: ValueId) -> bool:
        """Whether *value* depends on a gradient, the loss's own included."""
        if (known := self._gradients.get(value)) is None:
            known = self._gradients[value] = self._look(value)
        return known

    def _look(self, value: ValueId) -> bool:
        producer = self.dag.producers.get(value)
        if producer is None:
            return self.dag.values[value].role is Role.SEED
        node = self.dag.nodes[producer]
        if not isinstance(node, Chunk):  # a copy of what it carries
            return any(map(self._depends, node.inputs))
        if node.pass_ is Pass.FORWARD:
            return False
        if not isinstance(node.work, Call):
            return True
        return self._traced(node)[1][node.outputs.index(value)]

    def _traced(self, chunk: Chunk) -> tuple[float, tuple[bool, ...]]:
        assert isinstance(chunk.work, Call), f"core chunk {chunk.label!r} calls no body"
        given = tuple(map(self._depends, chunk.inputs))
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

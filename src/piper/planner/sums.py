"""Sums on one device: each contribution is added when it has come, one instruction per contributing
node.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import TypeAlias

from piper.ids import COMPUTE, BodyId, NodeId, Slot, ValueId
from piper.ir.dag import Chunk, Comm, Dag, Value
from piper.ir.storages import owned_outputs
from piper.ops.accumulate import Accumulate
from piper.ops.all_reduce import AllReduce
from piper.ops.base import Message
from piper.ops.compute import Call
from piper.ops.reduce_scatter import ReduceScatter
from piper.planner.program import Program

_Made: TypeAlias = tuple[NodeId, list[ValueId]]
"""What a node made that is to be added."""


def sums_of(dag: Dag) -> dict[ValueId, ValueId]:
    """The total that each summed value is part of."""
    found: dict[ValueId, ValueId] = {}
    for chunk in dag.chunks():
        if chunk.work.kind == "sum":
            share = len(chunk.inputs) // len(chunk.outputs)
            for i, value in enumerate(chunk.inputs):
                found[value] = chunk.outputs[i // share]
    return found


class Ownership:
    """Which values have memory that is nothing else's when they come into being: what reductions
    make, and of chunks' outputs what :func:`~piper.ir.storages.owned_outputs` says.
    """

    def __init__(self, dag: Dag) -> None:
        self._dag = dag
        self._outputs: dict[BodyId, tuple[bool, ...]] = {}

    def __call__(self, value: ValueId) -> bool:
        node = self._dag.nodes[self._dag.producers[value]]
        if isinstance(node, Comm):
            return isinstance(node.work, (AllReduce, ReduceScatter))
        if not isinstance(node.work, Call):
            return False
        body = node.work.body
        if body not in self._outputs:
            self._outputs[body] = owned_outputs(self._dag.bodies[body])
        return self._outputs[body][node.outputs.index(value)]


class PartialSums:
    """The running sums of one device.

    The first of a total's contributions becomes the total, and the others are added to it in place,
    where its memory is its own; else the first addition makes a new tensor.

    Adding is put off: what a chunk made, past the sends of that chunk; what a reduction made, until
    the device has waited for the reduction anyway, because what is in flight has reached its bound,
    or because the sum is needed. So nothing waits for an addition, and no addition makes the device
    wait for a link.
    """

    def __init__(
        self,
        program: Program,
        totals: Mapping[ValueId, ValueId],
        values: Mapping[ValueId, Value],
        messages: Mapping[ValueId, Message],
        owned: Callable[[ValueId], bool],
    ) -> None:
        self._program, self._totals, self._owned = program, totals, owned
        self._values, self._messages = values, messages
        self._partial: dict[ValueId, Slot] = {}
        self._computed: list[_Made] = []
        self._reduced: list[_Made] = []

    def computed(self, node: NodeId, outputs: Sequence[ValueId]) -> None:
        """A chunk has made *outputs*; those that are summed are added before the next chunk
        runs.
        """
        if mine := [v for v in outputs if v in self._totals]:
            self._computed.append((node, mine))

    def reduced(self, node: NodeId, outputs: Sequence[ValueId]) -> None:
        """A reduction that makes *outputs* has started."""
        if mine := [v for v in outputs if v in self._totals]:
            self._reduced.append((node, mine))

    def landed(self, nodes: Container[NodeId]) -> None:
        """The device has waited for the reductions *nodes*: add what they have made."""
        self._flush(self._reduced, lambda node, _: node in nodes)

    def before_compute(self) -> None:
        """Add what chunks have made."""
        self._flush(self._computed)

    def finish(self, chunk: Chunk) -> None:
        """The sum *chunk* is needed: add all that is left. A sum of one contribution is that
        contribution.
        """
        mine = set(chunk.inputs)
        for waiting in (self._computed, self._reduced):
            self._flush(waiting, lambda _, values: not mine.isdisjoint(values))
        if len(chunk.inputs) > len(chunk.outputs):
            return
        for total, contribution in zip(chunk.outputs, chunk.inputs, strict=True):
            self._program.alias(total, self._program.slot(contribution))

    def _flush(
        self,
        waiting: list[_Made],
        ready: Callable[[NodeId, Sequence[ValueId]], bool] = lambda *_: True,
    ) -> None:
        """Add those of *waiting* that are *ready*."""
        for made in [made for made in waiting if ready(*made)]:
            self._add(*made)
            waiting.remove(made)

    def _add(self, node: NodeId, values: Sequence[ValueId]) -> None:
        program, partial = self._program, self._partial
        totals: list[Slot] = []
        left: list[Slot] = []
        right: list[Slot] = []
        used: list[Slot] = []
        moved: list[Slot] = []
        for value in values:
            total, slot = self._totals[value], program.slot(value)
            before = partial.get(total)
            if before is None:
                partial[total] = slot
                continue
            if not program.has(total):
                program.allocate(self._values[total], self._messages[total])
                used.append(before)
                first = program.value(before)
                if self._owned(first) and program.is_last_use(before):
                    moved.append(before)
            partial[total] = program.slot(total)
            totals.append(partial[total])
            left.append(before)
            right.append(slot)
            used.append(slot)
        if totals:
            instruction = Accumulate(
                node=node,
                stream=COMPUTE,
                totals=tuple(totals),
                left=tuple(left),
                right=tuple(right),
                moved=tuple(moved),
            )
            program.emit(instruction, consume=used)

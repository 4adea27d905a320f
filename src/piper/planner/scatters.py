"""Consecutive contributions to the same gradients share a reduction."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from msgspec.structs import replace as replace_struct

from piper.ids import COMPUTE, DeviceId, NodeId, ValueId
from piper.ir.dag import Chunk, Comm, Dag, DeviceGroup, Node, Role, Value
from piper.ir.edit import ordered_by_user
from piper.ops.accumulate import Sum
from piper.ops.compute import Call
from piper.ops.reduce_scatter import ReduceScatter

Run: TypeAlias = list[Comm]
"""Scatters of the same gradients by consecutive chunks, in order."""


def share_scatters(dag: Dag, order: Sequence[NodeId]) -> tuple[Dag, list[NodeId]]:
    """*dag* and *order* with one scatter where consecutive chunks of the same devices contribute to
    the same bucket.

    Their contributions are added first, whole. That keeps no more memory than the scatters would:
    while one is in flight, whole contributions are alive too. It sends a part of the bytes: with k
    microbatches in a row, a k-th.

    Scatters that an order names, and buckets to which some chunk contributes only a part, stay as
    they are.
    """
    runs = [run for run in _runs(dag, order) if len(run) > 1]
    if not runs:
        return dag, list(order)
    shared = _Shared(dag)
    for run in runs:
        shared.merge(run)
    return shared.finish(order)


def _runs(dag: Dag, order: Sequence[NodeId]) -> Iterator[Run]:
    """The scatters that may be shared, in runs."""
    scatters = _scatters(dag)
    latest: dict[DeviceId, NodeId] = {}
    current: dict[DeviceGroup, dict[tuple[object, ...], Run]] = {}
    for number in order if scatters else ():
        chunk = dag.nodes[number]
        if not isinstance(chunk, Chunk) or not isinstance(chunk.work, Call):
            continue
        devices = chunk.participants
        before = current.get(devices, {})
        follows = len({latest.get(d) for d in devices}) == 1
        now: dict[tuple[object, ...], Run] = {}
        for scatter in scatters.get(number, ()):
            key = (_names(dag, scatter), scatter.groups, scatter.stream)
            now[key] = [*(before.pop(key, ()) if follows else ()), scatter]
        yield from before.values()
        for device in devices:
            last = latest.get(device)
            if last is not None and dag.nodes[last].participants != devices:
                yield from current.pop(dag.nodes[last].participants, {}).values()
            latest[device] = number
        current[devices] = now
    for left in current.values():
        yield from left.values()


def _names(dag: Dag, scatter: Comm) -> tuple[str, ...]:
    return tuple(dag.values[v].name for v in scatter.inputs)


def _scatters(dag: Dag) -> dict[NodeId, list[Comm]]:
    """By the chunk that makes the contributions, the scatters that may be shared."""
    ordered = ordered_by_user(dag)
    found: dict[NodeId, list[Comm]] = {}
    for total in dag.chunks():
        if not isinstance(total.work, Sum):
            continue
        makers = dict.fromkeys(dag.producers.get(v) for v in total.inputs)
        comms = [dag.nodes[m] for m in makers if m is not None]
        mine = [
            c
            for c in comms
            if isinstance(c, Comm)
            and isinstance(c.work, ReduceScatter)
            and c.id not in ordered
            and len(c.outputs) == len(total.outputs)
        ]
        if len(mine) == len(comms):
            for scatter in mine:
                found.setdefault(dag.producers[scatter.inputs[0]], []).append(scatter)
    return found


@dataclass
class _Shared:
    """The DAG in the making."""

    dag: Dag
    nodes: dict[NodeId, Node] = field(init=False)
    values: dict[ValueId, Value] = field(init=False)
    dropped: set[ValueId] = field(default_factory=set)
    before: dict[NodeId, NodeId] = field(default_factory=dict)  # a scatter's sum

    def __post_init__(self) -> None:
        self.nodes, self.values = dict(self.dag.nodes), dict(self.dag.values)
        self._next_node, self._next_value = max(self.nodes) + 1, max(self.values) + 1

    def merge(self, run: Run) -> None:
        """Let the last scatter of *run* have what all of them have."""
        *gone, last = run
        for scatter in gone:
            del self.nodes[scatter.id]
            self.dropped.update(scatter.outputs)
        inputs = tuple(v for same in zip(*(s.inputs for s in run), strict=True) for v in same)
        totals = tuple(self._total(v) for v in last.inputs)
        node = NodeId(self._next_node)
        self._next_node += 1
        self.nodes[node] = Chunk(
            id=node,
            tags=last.tags,
            pass_=last.pass_,
            inputs=inputs,
            outputs=totals,
            work=Sum(),
            devices=self.dag.nodes[self.dag.producers[last.inputs[0]]].participants,
            stream=COMPUTE,
            derived=True,
        )
        self.nodes[last.id] = replace_struct(last, inputs=totals)
        self.before[last.id] = node

    def _total(self, contribution: ValueId) -> ValueId:
        value = ValueId(self._next_value)
        self._next_value += 1
        self.values[value] = replace_struct(self.values[contribution], id=value, role=Role.TOTAL)
        return value

    def finish(self, order: Sequence[NodeId]) -> tuple[Dag, list[NodeId]]:
        """What :func:`share_scatters` returns."""
        for node in self.nodes.values():
            if isinstance(node, Chunk) and not self.dropped.isdisjoint(node.inputs):
                kept = tuple(v for v in node.inputs if v not in self.dropped)
                self.nodes[node.id] = replace_struct(node, inputs=kept)
        values = {v: value for v, value in self.values.items() if v not in self.dropped}
        return replace(self.dag, nodes=self.nodes, values=values), list(self._ordered(order))

    def _ordered(self, order: Sequence[NodeId]) -> Iterator[NodeId]:
        for node in order:
            if node in self.before:
                yield self.before[node]
            if node in self.nodes:
                yield node

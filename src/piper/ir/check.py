"""Invariants of a training DAG, checked after every directive."""

from collections.abc import Sequence

from piper.errors import DirectiveError, OrderError
from piper.ids import NodeId, ValueId
from piper.ir.dag import Chunk, Comm, Dag, Role
from piper.ir.edit import is_source
from piper.ops.reduce_scatter import ReduceScatter


def check_dag(dag: Dag) -> None:
    """Raise :class:`OrderError` for a cycle (with a table of it), :class:`DirectiveError` for any
    other violation.

    Acyclic; one producer per value; every gradient contribution reaches exactly one sum; no data
    edge crosses device groups without a communication node.
    """
    _check_producers(dag)
    _check_contributions(dag)
    _check_crossings(dag)
    topological_order(dag)


def topological_order(dag: Dag) -> Sequence[NodeId]:
    """The nodes in an order that respects all edges, stable with respect to node order.

    Raises :class:`OrderError` with the cycle if there is one.
    """
    waiting = {node: len(before) for node, before in dag.predecessors.items()}
    successors = dag.successors
    ready = [node for node, count in waiting.items() if not count]
    order: list[NodeId] = []
    for node in ready:
        order.append(node)
        for after in successors[node]:
            waiting[after] -= 1
            if not waiting[after]:
                ready.append(after)
    if len(order) < len(waiting):
        raise OrderError(_picture(dag, _cycle(dag, {n for n, c in waiting.items() if c > 0})))
    return order


def _check_producers(dag: Dag) -> None:
    made: dict[ValueId, NodeId] = {}
    for node in dag.nodes.values():
        for value in node.outputs:
            if value in made:
                raise DirectiveError(
                    f"value {value} has two producers, {dag.nodes[made[value]].label!r} and {node.label!r}"
                )
            made[value] = node.id
    for node in dag.nodes.values():
        for value in node.inputs:
            if value not in made and not is_source(dag.values[value]):
                raise DirectiveError(f"value {value}, read by {node.label!r}, has no producer")


def _check_contributions(dag: Dag) -> None:
    summed: dict[ValueId, int] = {}
    for chunk in dag.chunks():
        if chunk.work.kind == "sum":
            for value in chunk.inputs:
                summed[value] = summed.get(value, 0) + 1
    for comm in dag.comms():
        if isinstance(comm.work, ReduceScatter):
            for value, part in zip(comm.inputs, comm.outputs, strict=False):
                if dag.values[part].role is Role.CONTRIBUTION:
                    summed[value] = summed.get(value, 0) + summed.get(part, 0)
    for parameter, values in dag.contributions.items():
        for value in values:
            if summed.get(value, 0) != 1:
                raise DirectiveError(
                    f"a gradient contribution of {parameter!r}, made by {dag.nodes[dag.producers[value]].label!r}, "
                    f"reaches {summed.get(value, 0)} sums instead of one"
                )


def _check_crossings(dag: Dag) -> None:
    producers = dag.producers
    for chunk in dag.chunks():
        if chunk.devices is None:
            continue
        for value in chunk.inputs:
            if value not in producers:
                continue
            producer = dag.nodes[producers[value]]
            if isinstance(producer, Comm) or producer.devices is None:
                continue
            if producer.devices != chunk.devices and not chunk.derived:
                raise DirectiveError(
                    f"value {value} crosses from {producer.label!r} to {chunk.label!r} without communication"
                )
            leaves = (producer.sharding is None) != (chunk.sharding is None)
            if leaves and not chunk.derived and dag.values[value].experts is not None:
                raise DirectiveError(
                    f"value {value} crosses from {producer.label!r} to {chunk.label!r}, of which one is a sharded expert region, without "
                    "an all-to-all"
                )


def _cycle(dag: Dag, stuck: set[NodeId]) -> list[NodeId]:
    """A cycle among nodes of which each has a predecessor among them."""
    node, seen = min(stuck), dict[NodeId, int]()
    path: list[NodeId] = []
    while node not in seen:
        seen[node] = len(path)
        path.append(node)
        node = min(p for p in dag.predecessors[node] if p in stuck)
    return path[seen[node] :][::-1]


def _picture(dag: Dag, cycle: Sequence[NodeId]) -> str:
    orders = {(e.before, e.after): e for e in dag.order}
    rows: list[tuple[str, str, str]] = []
    for before, after in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        edge = orders.get((before, after))
        reason = "data" if edge is None else _directive(dag, edge.directive)
        if edge is not None and edge.halves:
            reason = "the halves of one backward"
        rows.append((dag.nodes[before].label, dag.nodes[after].label, reason))
    width = max(len(before) for before, _, _ in rows)
    width2 = max(len(after) for _, after, _ in rows)
    lines = [f"  {a:<{width}}  before  {b:<{width2}}  ({why})" for a, b, why in rows]
    return "the order contradicts the data flow or itself; this is a cycle:\n" + "\n".join(lines)


def _directive(dag: Dag, number: int) -> str:
    text = dag.directives[number] if 0 <= number < len(dag.directives) else ""
    if not text:
        return f"directive {number}"
    return f"directive {number}: {text}" if len(text) <= 60 else f"directive {number}: {text[:59]}…"


def unplaced(dag: Dag) -> list[Chunk]:
    """Core chunks without devices."""
    return [c for c in dag.chunks() if not c.derived and c.devices is None]

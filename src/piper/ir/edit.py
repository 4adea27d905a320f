"""Changes of a training DAG: the only way to make a new one from an old one.

Each function returns an :class:`Edit`: the new DAG and the map from old nodes to the new ones that
stand for them. Derived nodes are left as they are; ``piper.ir.derive.derive`` remakes them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec.structs import replace as replace_struct

from piper.errors import DirectiveError, SplitError
from piper.ids import BodyId, NodeId, ValueId
from piper.ir.body import Body
from piper.ir.core import core_chunks, core_values
from piper.ir.dag import (
    SOURCES,
    Chunk,
    Clip,
    Dag,
    GradientUse,
    Node,
    OrderEdge,
    Overlap,
    Replication,
    Role,
    Sharding,
    SplitDim,
    Value,
)
from piper.ops.compute import Call


@dataclass(frozen=True, slots=True)
class Edit:
    """The result of a change. ``remap`` has an entry for each old node that was replaced by others;
    a node without an entry is unchanged in identity.
    """

    dag: Dag
    remap: Mapping[NodeId, tuple[NodeId, ...]]


def replace_nodes(dag: Dag, changed: Mapping[NodeId, Chunk]) -> Edit:
    """Exchange nodes for changed versions of themselves."""
    nodes: dict[NodeId, Node] = {**dag.nodes, **changed}
    return Edit(replace(dag, nodes=nodes), {})


def add_replication(dag: Dag, replication: Replication, changed: Mapping[NodeId, Chunk]) -> Edit:
    """Record a replication and exchange the chunks that it claims."""
    nodes: dict[NodeId, Node] = {**dag.nodes, **changed}
    return Edit(replace(dag, nodes=nodes, replications=(*dag.replications, replication)), {})


def use_gradients(
    dag: Dag, use: GradientUse, clip: Clip | None, *, loss_scaled: bool = False
) -> Edit:
    """Say what becomes of the gradients; no core node changes. Where the loss is scaled their norm
    must be asked for.
    """
    assert clip is not None or not loss_scaled, "whether gradients are finite is seen by their norm"
    return Edit(replace(dag, gradient_use=use, clip=clip, loss_scaled=loss_scaled), {})


def discard_buffer_updates(dag: Dag) -> Edit:
    """Leave every buffer as it is: what the forward writes into one is used within its own
    microbatch and stored nowhere.
    """
    return Edit(replace(dag, buffer_updates={}), {})


def add_sharding(
    dag: Dag,
    sharding: Sharding,
    changed: Mapping[NodeId, Chunk],
    values: Mapping[ValueId, Value],
    bodies: Mapping[BodyId, Body],
) -> Edit:
    """Record a sharding and exchange the chunks that it claims, and values that it changes;
    *bodies* are the new chunks'.
    """
    nodes: dict[NodeId, Node] = {**dag.nodes, **changed}
    used = {node.work.body for node in nodes.values() if isinstance(node.work, Call)}
    sharded = replace(
        dag,
        nodes=nodes,
        values={**dag.values, **values},
        bodies={i: body for i, body in {**dag.bodies, **bodies}.items() if i in used},
        shardings=(*dag.shardings, sharding),
    )
    return Edit(sharded, {})


def add_order(dag: Dag, edges: Sequence[OrderEdge]) -> Edit:
    """Add order edges; an edge that exists already keeps its first directive."""
    known = {(e.before, e.after) for e in dag.order}
    fresh = tuple(e for e in edges if (e.before, e.after) not in known)
    return Edit(replace(dag, order=dag.order + fresh), {})


def add_overlaps(dag: Dag, overlaps: Sequence[Overlap]) -> Edit:
    """Record groups of chunks that are to overlap."""
    return Edit(replace(dag, overlaps=(*dag.overlaps, *overlaps)), {})


def ordered_by_user(dag: Dag) -> frozenset[NodeId]:
    """The nodes that order edges touch."""
    return frozenset(n for e in dag.order for n in (e.before, e.after))


def split_nodes(dag: Dag, dim: str, count: int) -> Edit:
    """*count* copies of every core chunk and of the values that they make.

    Batch inputs are divided; parameters and seeds are shared; a buffer that the forward writes
    passes from each copy to the next. Derived nodes are dropped (they follow from the core).

    Raises :class:`SplitError` for a second split of a model whose forward writes buffers,
    :class:`DirectiveError` if an order names derived nodes.
    """
    return _Splitter(dag, dim, count).split()


class _Splitter:
    def __init__(self, dag: Dag, dim: str, count: int) -> None:
        self.dag, self.dim, self.count = dag, dim, count
        self.core = list(core_chunks(dag).values())
        self.next_node = max(dag.nodes, default=-1) + 1
        self.next_value = max(dag.values, default=-1) + 1
        self.values: dict[ValueId, Value] = {}
        self.copies: dict[ValueId, tuple[ValueId, ...]] = {}
        self.whole_leaves = {leaf.name for leaf in dag.batch if leaf.batch_dim is None}

    def split(self) -> Edit:
        dag = self.dag
        if dag.buffer_updates and dag.splits:
            names = ", ".join(sorted(dag.buffer_updates))
            raise SplitError(
                f"a model whose forward writes buffers ({names}) can be split only once"
            )
        for value in core_values(dag).values():
            self.copies[value.id] = self._copies_of(value)
        nodes: dict[NodeId, Node] = {}
        remap: dict[NodeId, list[NodeId]] = {chunk.id: [] for chunk in self.core}
        for m in range(self.count):
            for chunk in self.core:
                copy = self._copy(chunk, m)
                nodes[copy.id] = copy
                remap[chunk.id].append(copy.id)
        return self._finish(nodes, {old: tuple(new) for old, new in remap.items()})

    def _finish(self, nodes: dict[NodeId, Node], remap: dict[NodeId, tuple[NodeId, ...]]) -> Edit:
        dag = self.dag
        order = tuple(
            replace_struct(edge, before=a, after=b)
            for edge in dag.order
            for a, b in _copied_edge(edge, remap)
        )
        split = replace(
            dag,
            nodes=nodes,
            values=self.values,
            losses=self._all(dag.losses),
            weights=self._all(dag.weights),
            contributions={p: self._all(vs) for p, vs in dag.contributions.items()},
            buffer_updates={b: self.copies[v][-1] for b, v in dag.buffer_updates.items()},
            order=order,
            overlaps=tuple(
                replace_struct(overlap, nodes=tuple(remap[n][m] for n in overlap.nodes))
                for overlap in dag.overlaps
                for m in range(self.count)
            ),
            splits=(*dag.splits, SplitDim(self.dim, self.count)),
        )
        return Edit(split, remap)

    def _copies_of(self, value: Value) -> tuple[ValueId, ...]:
        divided = value.role is Role.INPUT and value.name not in self.whole_leaves
        if not divided and is_source(value):
            self.values[value.id] = value
            return (value.id,) * self.count
        ids: list[ValueId] = []
        for m in range(self.count):
            new = ValueId(self.next_value)
            self.next_value += 1
            number = value.microbatch * self.count + m if divided else value.microbatch
            self.values[new] = replace_struct(value, id=new, microbatch=number)
            ids.append(new)
        return tuple(ids)

    def _copy(self, chunk: Chunk, m: int) -> Chunk:
        new = NodeId(self.next_node)
        self.next_node += 1
        return replace_struct(
            chunk,
            id=new,
            tags=(*chunk.tags, (self.dim, m)),
            inputs=tuple(self._input(v, m) for v in chunk.inputs),
            outputs=tuple(self.copies[v][m] for v in chunk.outputs),
        )

    def _input(self, value: ValueId, m: int) -> ValueId:
        info = self.dag.values[value]
        if m and info.role is Role.BUFFER and info.name in self.dag.buffer_updates:
            return self.copies[self.dag.buffer_updates[info.name]][m - 1]
        return self.copies[value][m]

    def _all(self, values: Iterable[ValueId]) -> tuple[ValueId, ...]:
        return tuple(copy for v in values for copy in self.copies[v])


def _copied_edge(
    edge: OrderEdge, remap: Mapping[NodeId, tuple[NodeId, ...]]
) -> Iterable[tuple[NodeId, NodeId]]:
    if edge.before not in remap or edge.after not in remap:
        raise DirectiveError(
            f"directive {edge.directive} ordered communication or an update, which a split makes anew; "
            "put that Order after the Split"
        )
    return zip(remap[edge.before], remap[edge.after], strict=True)


def is_source(value: Value) -> bool:
    """Whether no node produces the value."""
    return value.role in SOURCES

"""Splitting of backward chunks: BI makes the gradients of activations, BW those of parameters.

Before, g and d being gradients of activations::

    g, x, W ──▶ B ──d──▶ …
                └──dW──▶ sum

After, s being what both need::

    g, W ──▶ BI ──d──▶ …
              └──s──▶ BW ◀── x
                      └──dW──▶ sum

BI keeps the node id of B, so that what is derived for it keeps its identity; BW is new. A chunk
whose results nobody reads but sums becomes BW as it is, one that makes no contribution BI. What a
backward makes besides gradients (the new value of a buffer) belongs to BI. Random calls keep their
streams. Chunks with equal bodies share the work of splitting.

An order edge that touched B touches both halves. BI and BW are joined by an order edge of their
own (``OrderEdge.halves``), so that BW never comes first.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from msgspec.structs import replace as replace_struct

from piper.errors import DirectiveError
from piper.ids import BodyId, NodeId, ValueId
from piper.ir.body import Body, body_id
from piper.ir.core import core_chunks
from piper.ir.dag import UNNUMBERED, Chunk, Comm, Dag, Node, OrderEdge, Pass, Role, Tags, Value
from piper.ir.derive import derive
from piper.ir.edit import Edit
from piper.ir.halves import Half, Halves, halve
from piper.ir.parts import assemble, whole
from piper.ops.all_gather import AllGather
from piper.ops.compute import Call


def split_backward(dag: Dag, chunks: Collection[NodeId]) -> Edit:
    """Split the backward chunks *chunks*. Derived nodes are left as they are, unless an order names
    a gather that served one of the chunks.

    Raises :class:`DirectiveError` for a chunk of which nothing can be put off.
    """
    if not chunks:
        return Edit(dag, {})
    splitter = _Splitter(dag)
    nodes, remap = splitter.split(chunks, {})
    done = splitter.dag_with(nodes)
    gathers = {
        node.id: node
        for node in dag.comms()
        if isinstance(node.work, AllGather) and len(remap.get(node.work.use, ())) > 1
    }
    edges, renamed = _renamed_edges(dag.order, remap, gathers)
    joins = [OrderEdge(h[0], h[1], halves=True) for h in remap.values() if len(h) > 1]
    overlaps = tuple(
        replace_struct(o, nodes=tuple(h for n in o.nodes for h in remap.get(n, (n,))))
        for o in dag.overlaps
    )
    done = replace(done, order=_distinct([*joins, *edges]), overlaps=overlaps)
    if renamed:
        done = derive(done)
        done = replace(
            done, order=_distinct([*done.order, *_regathered(done, renamed, gathers, remap)])
        )
    return Edit(done, remap)


def halves_of(dag: Dag) -> dict[NodeId, NodeId]:
    """The BW of each BI that has one."""
    return {e.before: e.after for e in dag.order if e.halves}


def join_halves(dag: Dag, regions: Collection[Tags]) -> tuple[Dag, dict[NodeId, NodeId]]:
    """*dag* with the split backwards of *regions* whole again, and their halves, for
    :func:`split_again`. Orders still speak of the halves.
    """
    core = core_chunks(dag)
    pairs = {i: w for i, w in halves_of(dag).items() if core[i].tags in regions}
    if not pairs:
        return dag, {}
    nodes: dict[NodeId, Node] = dict(dag.nodes)
    values, bodies = dict(dag.values), dict(dag.bodies)
    for first, second in pairs.items():
        joined, body = _joined(core[first], core[second], dag)
        nodes[first] = joined
        del nodes[second]
        bodies[body_id(body)] = body
        for value in set(core[first].outputs).difference(joined.outputs):
            del values[value]
    return replace(dag, nodes=nodes, values=values, bodies=_used(nodes, bodies)), pairs


def split_again(dag: Dag, pairs: Mapping[NodeId, NodeId]) -> Dag:
    """Split the chunks that :func:`join_halves` made; the halves have the ids that they had."""
    if not pairs:
        return dag
    splitter = _Splitter(dag)
    nodes, _ = splitter.split(pairs, pairs)
    return splitter.dag_with(nodes)


def _joined(first: Chunk, second: Chunk, dag: Dag) -> tuple[Chunk, Body]:
    """The chunk that runs both, without what passes between them alone, and its body."""
    parts = []
    for chunk in (first, second):
        assert isinstance(chunk.work, Call)
        body = dag.bodies[chunk.work.body]
        parts.append(whole(body, chunk.inputs, chunk.outputs, chunk.work.rng))
    read = {v for n in dag.nodes.values() if n.id != second.id for v in n.inputs}
    read.update(dag.buffer_updates.values())
    kept = [v for v in first.outputs if v in read or v not in second.inputs]
    outputs = (*kept, *second.outputs)
    body, inputs, rng = assemble(parts, outputs)
    work = Call(body_id(body), rng)
    chunk = replace_struct(
        first,
        pass_=Pass.BACKWARD,
        inputs=tuple(ValueId(v) for v in inputs),
        outputs=tuple(outputs),
        work=work,
    )
    return chunk, body


class _Splitter:
    """Makes halves of core chunks of *dag*, and the values and bodies that they need."""

    def __init__(self, dag: Dag) -> None:
        self._dag = dag
        self._core = core_chunks(dag)
        self._values, self._bodies = dict(dag.values), dict(dag.bodies)
        self._next_node = max((*dag.nodes, *_named(dag)), default=-1) + 1
        self._next_value = max(dag.values, default=-1) + 1
        self._bindings = {dag.batch_symbol: dag.captured_size} if dag.batch_symbol else {}
        self._known: dict[tuple[BodyId, tuple[bool, ...]], Halves] = {}

    def split(
        self, chunks: Collection[NodeId], seconds: Mapping[NodeId, NodeId]
    ) -> tuple[dict[NodeId, Node], dict[NodeId, tuple[NodeId, ...]]]:
        """All nodes, each of *chunks* followed by its second half (whose id is in *seconds*, or
        new); and the halves of each.
        """
        nodes: dict[NodeId, Node] = {}
        remap: dict[NodeId, tuple[NodeId, ...]] = {}
        for node in self._dag.nodes.values():
            if node.id not in chunks:
                nodes[node.id] = node
                continue
            halves = self._halves(self._core[node.id], seconds.get(node.id))
            nodes.update({half.id: half for half in halves})
            remap[node.id] = tuple(half.id for half in halves)
        return nodes, remap

    def dag_with(self, nodes: Mapping[NodeId, Node]) -> Dag:
        return replace(
            self._dag, nodes=nodes, values=self._values, bodies=_used(nodes, self._bodies)
        )

    def _halves(self, chunk: Chunk, second: NodeId | None) -> tuple[Chunk, ...]:
        contributed = tuple(self._values[v].role is Role.CONTRIBUTION for v in chunk.outputs)
        if all(contributed):
            return (replace_struct(chunk, pass_=Pass.BACKWARD_WEIGHT),)
        if not any(contributed):
            return (replace_struct(chunk, pass_=Pass.BACKWARD_INPUT),)
        halves = self._halved(chunk, contributed)
        results = [v for v, c in zip(chunk.outputs, contributed, strict=True) if not c]
        contributions = [v for v, c in zip(chunk.outputs, contributed, strict=True) if c]
        values = dict(enumerate(chunk.inputs))
        for local, value in zip(halves.results, results, strict=True):
            values.setdefault(local, value)
        fresh: list[ValueId] = []
        for local, spec in halves.passed.items():
            if local not in values:
                values[local] = self._new_value(Value(UNNUMBERED, spec, Role.ACTIVATION))
                fresh.append(values[local])
        one = self._half(chunk, Pass.BACKWARD_INPUT, halves.first, values, (*results, *fresh))
        two = self._half(chunk, Pass.BACKWARD_WEIGHT, halves.second, values, contributions)
        if second is None:
            second = NodeId(self._next_node)
            self._next_node += 1
        return one, replace_struct(two, id=second)

    def _halved(self, chunk: Chunk, contributed: tuple[bool, ...]) -> Halves:
        assert isinstance(chunk.work, Call), f"core chunk {chunk.label!r} calls no body"
        key = (chunk.work.body, contributed)
        if key not in self._known:
            try:
                halves = halve(self._bodies[chunk.work.body], contributed, self._bindings)
            except DirectiveError as error:
                raise DirectiveError(f"{chunk.label!r} cannot be split: {error}") from error
            if halves.idle and halves.tied:
                raise DirectiveError(
                    f"{chunk.label!r} cannot be split: nothing would be left for BW, since {', '.join(halves.tied)} makes both the "
                    f"gradients of activations and those of {', '.join(self._parameters(chunk))}; order its B whole"
                )
            self._known[key] = halves
        return self._known[key]

    def _parameters(self, chunk: Chunk) -> list[str]:
        infos = [self._values[v] for v in chunk.outputs]
        return [repr(info.name) for info in infos if info.role is Role.CONTRIBUTION]

    def _half(
        self,
        chunk: Chunk,
        pass_: Pass,
        half: Half,
        values: Mapping[int, ValueId],
        outputs: Iterable[ValueId],
    ) -> Chunk:
        assert isinstance(chunk.work, Call)
        identity = body_id(half.body)
        self._bodies[identity] = half.body
        return replace_struct(
            chunk,
            pass_=pass_,
            inputs=tuple(values[local] for local in half.inputs),
            outputs=tuple(outputs),
            work=Call(identity, tuple(chunk.work.rng[slot] for slot in half.rng)),
        )

    def _new_value(self, value: Value) -> ValueId:
        identity = ValueId(self._next_value)
        self._next_value += 1
        self._values[identity] = replace_struct(value, id=identity)
        return identity


def _used(nodes: Mapping[NodeId, Node], bodies: Mapping[BodyId, Body]) -> dict[BodyId, Body]:
    used = {n.work.body for n in nodes.values() if isinstance(n.work, Call)}
    return {b: body for b, body in bodies.items() if b in used}


def _named(dag: Dag) -> set[NodeId]:
    """The nodes that orders name."""
    return {n for e in dag.order for n in (e.before, e.after)}


# --- orders ---------------------------------------------------------------------------------------


def _renamed_edges(
    order: Iterable[OrderEdge],
    remap: Mapping[NodeId, tuple[NodeId, ...]],
    gathers: Mapping[NodeId, Comm],
) -> tuple[list[OrderEdge], list[OrderEdge]]:
    """The edges between the new nodes, and those that touch *gathers*, which are to be made
    anew.
    """
    edges: list[OrderEdge] = []
    stale: list[OrderEdge] = []
    for edge in order:
        found = stale if edge.before in gathers or edge.after in gathers else edges
        for before in remap.get(edge.before, (edge.before,)):
            for after in remap.get(edge.after, (edge.after,)):
                found.append(replace_struct(edge, before=before, after=after))
    return edges, stale


def _regathered(
    dag: Dag,
    edges: Iterable[OrderEdge],
    gathers: Mapping[NodeId, Comm],
    remap: Mapping[NodeId, tuple[NodeId, ...]],
) -> Iterable[OrderEdge]:
    """*edges* with, in place of a gather for a whole backward, those of the same shards for its
    halves.

    A gather that neither half needs stays, for ``derive`` to refuse.
    """
    new: dict[tuple[NodeId, tuple[ValueId, ...]], NodeId] = {
        (node.work.use, node.inputs): node.id
        for node in dag.comms()
        if isinstance(node.work, AllGather)
    }

    def stand_ins(node: NodeId) -> Collection[NodeId]:
        if node not in gathers:
            return (node,)
        work = gathers[node].work
        assert isinstance(work, AllGather)
        shards = gathers[node].inputs
        return [new[use, shards] for use in remap[work.use] if (use, shards) in new] or (node,)

    for edge in edges:
        for before in stand_ins(edge.before):
            for after in stand_ins(edge.after):
                yield replace_struct(edge, before=before, after=after)


def _distinct(edges: Iterable[OrderEdge]) -> tuple[OrderEdge, ...]:
    """*edges* without repetitions; the first of equal ones says which directive."""
    found: dict[tuple[NodeId, NodeId], OrderEdge] = {}
    for edge in edges:
        found.setdefault((edge.before, edge.after), edge)
    return tuple(found.values())

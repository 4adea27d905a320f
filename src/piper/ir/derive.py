"""Derived nodes: the communication, sums and updates that follow from where the core chunks are placed.

* A *transfer* carries a value to each device group that reads it and does not make it.
* A *sum* adds up a parameter's gradient contributions on each device group that makes some; an *all_reduce* adds the sums of
  replicas and of the groups that hold a tied parameter; an *update* lets the optimizer use the result, once per copy. A group
  that reads the parameter but makes no contribution (a detached use) is sent the result, for its own copy's update.
* The weights of a weighted loss are summed the same way and sent to every update.
* Buffers that the forward writes are stored at the end, made equal on all replicas first.

Derivation is a function of the core alone. A derived node whose inputs and devices are as before keeps its id, so that
orders that name it survive later directives.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from msgspec.structs import replace as replace_struct

from piper.dtypes import DType
from piper.errors import DirectiveError, PlacementError
from piper.ids import COMPUTE, NodeId, Stream, ValueId
from piper.ir.core import core_chunks, core_values
from piper.ir.dag import (
    Chunk,
    Comm,
    Dag,
    DeviceGroup,
    LossKind,
    Node,
    Pass,
    Replication,
    Role,
    Tags,
    Value,
)
from piper.ops.accumulate import Sum
from piper.ops.all_reduce import AllReduce
from piper.ops.base import Work
from piper.ops.broadcast import Broadcast
from piper.ops.p2p import Transfer
from piper.ops.update import Update
from piper.ops.write_buffer import StoreBuffer

P2P_STREAM, REDUCE_STREAM = Stream("p2p"), Stream("reduce")

Group: TypeAlias = DeviceGroup | None


def derive(dag: Dag) -> Dag:
    """The DAG with its derived nodes made anew.

    Raises :class:`PlacementError` where device groups cannot be linked, :class:`DirectiveError` where replicas cannot
    be kept equal, or an order names communication that no longer exists.
    """
    builder = _Builder.start(dag)
    _link(builder)
    _synchronise(builder)
    _store_buffers(builder)
    return builder.finish()


_Key: TypeAlias = tuple[Work, tuple[ValueId, ...], tuple[DeviceGroup, ...]]


@dataclass
class _Builder:
    """Core nodes with values renamed to their origins, plus what has been derived so far."""

    dag: Dag
    nodes: dict[NodeId, Node]
    values: dict[ValueId, Value]
    old: Mapping[_Key, Node]
    next_node: int
    next_value: int
    makers: dict[ValueId, Chunk] = field(default_factory=dict)

    @classmethod
    def start(cls, dag: Dag) -> "_Builder":
        nodes = core_chunks(dag)
        makers = {v: chunk for chunk in nodes.values() for v in chunk.outputs}
        return cls(
            dag=dag,
            nodes=dict(nodes),
            values=core_values(dag),
            old={_key(node): node for node in dag.nodes.values() if node.derived},
            next_node=max(dag.nodes, default=-1) + 1,
            next_value=max(dag.values, default=-1) + 1,
            makers=makers,
        )

    def add(self, node: Node, results: Sequence[Value]) -> tuple[ValueId, ...]:
        """Add a derived node (its id and outputs are filled in here) that makes values like *results*."""
        known = self.old.get(_key(node))
        if known is not None and len(known.outputs) == len(results):
            identity, outputs = known.id, known.outputs
        else:
            identity = NodeId(self.next_node)
            self.next_node += 1
            outputs = tuple(ValueId(self.next_value + i) for i in range(len(results)))
            self.next_value += len(results)
        self.nodes[identity] = replace_struct(node, id=identity, outputs=outputs)
        for value, result in zip(outputs, results, strict=True):
            self.values[value] = replace_struct(result, id=value)
        return outputs

    def finish(self) -> Dag:
        for edge in self.dag.order:
            if edge.before not in self.nodes or edge.after not in self.nodes:
                raise DirectiveError(
                    f"directive {edge.directive} ordered communication that a later directive changed; "
                    "put an Order that names COMM after the directives that place and replicate"
                )
        return replace(self.dag, nodes=self.nodes, values=self.values)


def _key(node: Node) -> _Key:
    groups = node.groups if isinstance(node, Comm) else (node.devices or (),)
    return (node.work, node.inputs, groups)


def _chunk(work: Work, tags: Tags, inputs: Iterable[ValueId], devices: Group) -> Chunk:
    return Chunk(
        id=NodeId(-1),
        tags=tags,
        pass_=Pass.UPDATE,
        inputs=tuple(inputs),
        outputs=(),
        work=work,
        devices=devices,
        stream=COMPUTE,
        derived=True,
    )


# --- transfers ------------------------------------------------------------------------------------


def _link(builder: _Builder) -> None:
    arrived: dict[tuple[ValueId, DeviceGroup], ValueId] = {}
    for chunk in [n for n in builder.nodes.values() if isinstance(n, Chunk)]:
        inputs = tuple(_bring(builder, v, chunk, arrived) for v in chunk.inputs)
        if inputs != chunk.inputs:
            builder.nodes[chunk.id] = replace_struct(chunk, inputs=inputs)


def _bring(
    builder: _Builder,
    value: ValueId,
    reader: Chunk,
    arrived: dict[tuple[ValueId, DeviceGroup], ValueId],
) -> ValueId:
    maker = builder.makers.get(value)
    if maker is None or maker.devices is None or reader.devices in (None, maker.devices):
        return value
    assert reader.devices is not None
    key = (value, reader.devices)
    if key not in arrived:
        stream = maker.p2p_stream or reader.p2p_stream or P2P_STREAM
        arrived[key] = _transfer(builder, value, maker, reader.devices, reader.label, stream)
    return arrived[key]


def _transfer(
    builder: _Builder, value: ValueId, maker: Chunk, to: DeviceGroup, reader: str, stream: Stream
) -> ValueId:
    assert maker.devices is not None
    if len(maker.devices) != len(to):
        raise PlacementError(
            f"{maker.label!r} on devices {list(maker.devices)} feeds {reader!r} on devices {list(to)}: linked "
            "device groups must have equal sizes (member i sends to member i)"
        )
    pairs = tuple(zip(maker.devices, to, strict=True))
    if not set(maker.devices).isdisjoint(to):
        raise PlacementError(
            f"{maker.label!r} on devices {list(maker.devices)} feeds {reader!r} on devices {list(to)}: linked device groups "
            "must be the same, or share no device"
        )
    comm = Comm(
        id=NodeId(-1),
        tags=maker.tags,
        pass_=maker.pass_,
        inputs=(value,),
        outputs=(),
        work=Transfer(),
        groups=pairs,
        stream=stream,
    )
    return builder.add(comm, [builder.values[value]])[0]


# --- gradients and updates ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Use:
    """How one parameter is trained: who makes contributions, who else reads it, under which replication, for which region."""

    holders: tuple[Group, ...]
    readers: tuple[DeviceGroup, ...]
    region: Tags
    replication: int | None
    counts: tuple[int, ...]
    dtype: DType


def _synchronise(builder: _Builder) -> None:
    dag = builder.dag
    readers = _parameter_readers(builder)
    buckets: dict[_Use, list[str]] = {}
    by_parameter: dict[str, dict[Group, list[ValueId]]] = {}
    for parameter, values in dag.contributions.items():
        by_group: dict[Group, list[ValueId]] = {}
        for value in values:
            by_group.setdefault(builder.makers[value].devices, []).append(value)
        if by_group:
            by_parameter[parameter] = by_group
            others = tuple(g for g in readers.get(parameter, ()) if g not in by_group)
            use = _use(builder, parameter, values, by_group, others)
            buckets.setdefault(use, []).append(parameter)
    weights = _weights(
        builder, dict.fromkeys(g for use in buckets for g in (*use.holders, *use.readers))
    )
    for use, names in buckets.items():
        replication = None if use.replication is None else dag.replications[use.replication]
        limit = None if replication is None else replication.bucket_bytes
        for bucket in _buckets(names, builder, by_parameter, limit):
            _update(builder, use, replication, bucket, by_parameter, weights)


def _parameter_readers(builder: _Builder) -> Mapping[str, Iterable[DeviceGroup]]:
    """The device groups that read each parameter."""
    readers: dict[str, dict[DeviceGroup, None]] = {}
    for chunk in builder.nodes.values():
        if not isinstance(chunk, Chunk) or chunk.derived or chunk.devices is None:
            continue
        for value in chunk.inputs:
            info = builder.values[value]
            if info.role is Role.PARAMETER:
                readers.setdefault(info.name, {})[chunk.devices] = None
    return readers


def _use(
    builder: _Builder,
    parameter: str,
    values: Sequence[ValueId],
    by_group: Mapping[Group, list[ValueId]],
    readers: tuple[DeviceGroup, ...],
) -> _Use:
    makers = [builder.makers[v] for v in values]
    claims = {m.replication for m in makers}
    if len(claims) > 1:
        labels = sorted({m.label for m in makers})
        raise DirectiveError(
            f"parameter {parameter!r} is used by nodes that different Replicate directives claim ({', '.join(labels[:4])}); "
            "one Replicate must claim all users of a shared parameter"
        )
    _refuse_overlap(parameter, [*by_group, *readers])
    return _Use(
        holders=tuple(by_group),
        readers=readers,
        region=_region(builder, makers[0]),
        replication=claims.pop(),
        counts=tuple(len(vs) for vs in by_group.values()),
        dtype=builder.values[values[0]].spec.dtype,
    )


def _region(builder: _Builder, chunk: Chunk) -> Tags:
    """The region path of *chunk*: its tags without the split dimensions."""
    splits = {s.name for s in builder.dag.splits}
    return tuple((name, index) for name, index in chunk.tags if name not in splits)


def _refuse_overlap(parameter: str, groups: Sequence[Group]) -> None:
    seen: dict[int, Group] = {}
    for group in groups:
        for device in group or ():
            if device in seen:
                raise PlacementError(
                    f"parameter {parameter!r} is used on device groups {list(seen[device] or ())} and {list(group or ())}, which share "
                    f"device {device} but are not the same; place its users on equal or disjoint groups"
                )
            seen[device] = group


def _buckets(
    names: Sequence[str],
    builder: _Builder,
    contributions: Mapping[str, Mapping[Group, list[ValueId]]],
    limit: int | None,
) -> list[list[str]]:
    """Cut *names* into runs of at most *limit* bytes (at least one parameter each)."""
    buckets: list[list[str]] = []
    size = 0
    for name in names:
        first = next(iter(contributions[name].values()))[0]
        nbytes = builder.values[first].spec.nbytes()
        if not buckets or (limit is not None and size + nbytes > limit):
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size += nbytes
    return buckets


def _update(
    builder: _Builder,
    use: _Use,
    replication: Replication | None,
    names: Sequence[str],
    contributions: Mapping[str, Mapping[Group, list[ValueId]]],
    weights: Mapping[Group, ValueId],
) -> None:
    sums: list[ValueId] = []
    totals = [
        replace_struct(builder.values[next(iter(contributions[n].values()))[0]], role=Role.TOTAL)
        for n in names
    ]
    for group in use.holders:
        inputs = [v for name in names for v in contributions[name][group]]
        sums.extend(builder.add(_chunk(Sum(), use.region, inputs, group), totals))
    gradients = _reduce(builder, use, replication, sums, totals)
    devices = None if None in use.holders else tuple(d for g in use.holders for d in g or ())
    scales = dict.fromkeys(weights[group] for group in use.holders if group in weights)
    work = Update(parameters=tuple(names), scaled=bool(weights))
    builder.add(_chunk(work, use.region, (*gradients, *scales), devices), [])
    if use.holders[0] is None:
        return
    source = _chunk(work, use.region, (), use.holders[0])
    for group in use.readers:
        sent = [_transfer(builder, g, source, group, "update", P2P_STREAM) for g in gradients]
        scale = (weights[group],) if weights else ()
        builder.add(_chunk(work, use.region, (*sent, *scale), group), [])


def _reduce(
    builder: _Builder,
    use: _Use,
    replication: Replication | None,
    sums: Sequence[ValueId],
    totals: Sequence[Value],
) -> Sequence[ValueId]:
    members = tuple(d for group in use.holders for d in group or ())
    if len(members) <= 1:
        return sums
    comm = Comm(
        id=NodeId(-1),
        tags=use.region,
        pass_=Pass.UPDATE,
        inputs=tuple(sums),
        outputs=(),
        work=AllReduce(),
        groups=(members,),
        stream=REDUCE_STREAM if replication is None else replication.reduce_stream,
    )
    return builder.add(comm, totals)


def _weights(builder: _Builder, groups: Iterable[Group]) -> Mapping[Group, ValueId]:
    """The summed loss weight on each of *groups*, which update something; empty for a loss without weights."""
    dag = builder.dag
    if dag.loss_kind is LossKind.MEAN or not groups:
        return {}
    maker = builder.makers[dag.weights[0]]
    homes: dict[Group, list[ValueId]] = {}
    for weight in dag.weights:
        homes.setdefault(builder.makers[weight].devices, []).append(weight)
    total = replace_struct(builder.values[dag.weights[0]], role=Role.TOTAL, name="weight")
    region = _region(builder, maker)
    sums = [
        builder.add(_chunk(Sum(), region, weights, home), [total])[0]
        for home, weights in homes.items()
    ]
    use = _Use(tuple(homes), (), region, None, (), total.spec.dtype)
    (whole,) = _reduce(builder, use, None, sums, [total])
    found: dict[Group, ValueId] = dict.fromkeys(homes, whole)
    source = _chunk(Sum(), region, (), maker.devices)
    for group in groups:
        if group not in found and group is not None and maker.devices is not None:
            found[group] = _transfer(builder, whole, source, group, "update", P2P_STREAM)
    return found


# --- buffers --------------------------------------------------------------------------------------


def _store_buffers(builder: _Builder) -> None:
    writers = {name: builder.makers[v] for name, v in builder.dag.buffer_updates.items()}
    _refuse_distant_readers(builder, writers)
    for name, maker in writers.items():
        value = builder.dag.buffer_updates[name]
        # An unclaimed group is the planner's error: a directive to come may claim it.
        if maker.devices and len(maker.devices) > 1 and maker.replication is not None:
            replication = builder.dag.replications[maker.replication]
            value = _agree(builder, name, value, maker, replication)
        tags = _region(builder, maker)
        builder.add(_chunk(StoreBuffer(name), tags, (value,), maker.devices), [])


def _refuse_distant_readers(builder: _Builder, writers: Mapping[str, Chunk]) -> None:
    if not writers:
        return
    for node in builder.nodes.values():
        if not isinstance(node, Chunk) or node.derived or node.devices is None:
            continue
        for value in node.inputs:
            info = builder.values[value]
            maker = writers.get(info.name) if info.role is Role.BUFFER else None
            if maker is not None and maker.devices not in (None, node.devices):
                raise PlacementError(
                    f"buffer {info.name!r} is written by {maker.label!r} on {list(maker.devices or ())} but read by "
                    f"{node.label!r} on {list(node.devices)}; place both on the same devices"
                )


def _agree(
    builder: _Builder, name: str, value: ValueId, maker: Chunk, replication: Replication
) -> ValueId:
    """The value of a buffer that all replicas keep."""
    if replication.buffers is None:
        raise DirectiveError(
            f"the forward of {maker.label!r} writes buffer {name!r} on replicas {list(maker.devices or ())}, each from its own microbatches: "
            'single-process training has one sequence of them. Choose Replicate(..., replicated_buffers="first") or "mean", '
            "or a model without such buffers"
        )
    info = builder.values[value]
    averaged = replication.buffers == "mean" and info.spec.dtype.is_floating
    assert maker.devices is not None
    comm = Comm(
        id=NodeId(-1),
        tags=_region(builder, maker),
        pass_=Pass.UPDATE,
        inputs=(value,),
        outputs=(),
        work=AllReduce(average=True) if averaged else Broadcast(),
        groups=(maker.devices,),
        stream=replication.reduce_stream,
    )
    return builder.add(comm, [info])[0]

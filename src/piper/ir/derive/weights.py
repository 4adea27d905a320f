"""The total weight of a weighted loss, on every device group that updates something."""

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from piper.ids import ValueId
from piper.ir.dag import LossKind, Role
from piper.ir.derive.builder import (
    P2P_STREAM,
    REDUCE_STREAM,
    Builder,
    Group,
    communication,
    update_chunk,
)
from piper.ir.derive.transfers import transfer
from piper.ops.accumulate import Sum
from piper.ops.all_reduce import AllReduce
from piper.ops.broadcast import Broadcast


def sum_weights(builder: Builder, groups: Collection[Group]) -> Mapping[Group, ValueId]:
    """The total loss weight on each of *groups*, which update something; empty for a loss without
    weights.
    """
    dag = builder.dag
    if dag.loss_kind is LossKind.MEAN or not groups:
        return {}
    maker = builder.makers[dag.weights[0]]
    region = builder.region(maker)
    total = replace(builder.values[dag.weights[0]], role=Role.TOTAL, name="weight")
    by_home: dict[Group, list[ValueId]] = {}
    for weight in dag.weights:
        by_home.setdefault(builder.makers[weight].devices, []).append(weight)
    sums = [
        builder.add(update_chunk(Sum(), region, weights, home), [total])[0]
        for home, weights in by_home.items()
    ]
    members = tuple(d for home in by_home for d in home or ())
    whole = sums[0]
    if len(members) > 1:
        replication = builder.replication(maker)
        stream = REDUCE_STREAM if replication is None else replication.reduce_stream
        node = communication(AllReduce(), region, sums, (members,), stream)
        (whole,) = builder.add(node, [total])
    found: dict[Group, ValueId] = dict.fromkeys(by_home, whole)
    source = update_chunk(Sum(), region, (), maker.devices)
    for group in groups:
        if group in found or group is None or maker.devices is None:
            continue
        if set(group) <= set(members):  # each has the sum already
            found[group] = whole
            continue
        stream = maker.p2p_stream or P2P_STREAM
        if len(group) == len(maker.devices) and set(group).isdisjoint(maker.devices):
            found[group] = transfer(builder, whole, source, group, "update", stream)
        else:  # experts on a group of its own
            first = maker.devices[0]
            everyone = (first, *(d for d in group if d != first))
            node = communication(Broadcast(), region, (whole,), (everyone,), stream)
            (found[group],) = builder.add(node, [total])
    return found

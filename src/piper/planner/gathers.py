"""Consecutive uses of gathered parameters share a gather."""

from collections.abc import Sequence
from dataclasses import replace

from msgspec.structs import replace as replace_struct

from piper.ids import NodeId, ValueId
from piper.ir.dag import Chunk, Comm, Dag, DeviceGroup, Node
from piper.ops.all_gather import AllGather
from piper.ops.compute import Call


def share_gathers(dag: Dag, order: Sequence[NodeId]) -> Dag:
    """*dag* without the gathers of what is there already.

    What one chunk has gathered is there, for the chunks after it on the same devices, until one of
    them needs a bucket that is not: a chunk that needs only some of the buckets, or none, ends
    nothing. A gathered value then lives from the first of the chunks that share it to the last;
    beyond what they need themselves, no more is alive than one chunk's buckets.
    """
    gathers = {
        value: node
        for node in dag.nodes.values()
        if isinstance(node, Comm) and isinstance(node.work, AllGather)
        for value in node.outputs
    }
    if not gathers:
        return dag
    nodes: dict[NodeId, Node] = dict(dag.nodes)
    live: dict[DeviceGroup | None, dict[tuple[object, ...], Comm]] = {}
    dropped: set[ValueId] = set()
    for number in order:
        chunk = dag.nodes[number]
        if not isinstance(chunk, Chunk) or not isinstance(chunk.work, Call):
            continue
        before, now = live.get(chunk.devices, {}), dict[tuple[object, ...], Comm]()
        renamed: dict[ValueId, ValueId] = {}
        for gather in {gathers[v].id: gathers[v] for v in chunk.inputs if v in gathers}.values():
            key = (gather.inputs, gather.groups)
            shared = now[key] = before.get(key, gather)
            if shared is not gather:
                renamed.update(zip(gather.outputs, shared.outputs, strict=True))
                nodes.pop(gather.id, None)
                dropped.update(gather.outputs)
        if not now.keys() <= before.keys():
            live[chunk.devices] = now
        if renamed:
            inputs = tuple(renamed.get(v, v) for v in chunk.inputs)
            nodes[number] = replace_struct(chunk, inputs=inputs)
    values = {v: value for v, value in dag.values.items() if v not in dropped}
    edges = tuple(e for e in dag.order if e.before in nodes and e.after in nodes)
    return replace(dag, nodes=nodes, values=values, order=edges)

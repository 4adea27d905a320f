"""Consecutive chunks share a gather."""

from collections.abc import Sequence
from dataclasses import replace

from msgspec.structs import replace as replace_struct

from piper.ids import NodeId, ValueId
from piper.ir.dag import Chunk, Comm, Dag, DeviceGroup, Node
from piper.ops.all_gather import AllGather
from piper.ops.compute import Call


def share_gathers(dag: Dag, order: Sequence[NodeId]) -> Dag:
    """*dag* without the gathers of what the chunk before, on the same devices, has gathered already.

    A gathered value then lives from the first of a run of consecutive chunks that read it to the last.
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
        live[chunk.devices] = now
        if renamed:
            inputs = tuple(renamed.get(v, v) for v in chunk.inputs)
            nodes[number] = replace_struct(chunk, inputs=inputs)
    values = {v: value for v, value in dag.values.items() if v not in dropped}
    edges = tuple(e for e in dag.order if e.before in nodes and e.after in nodes)
    return replace(dag, nodes=nodes, values=values, order=edges)

"""The core of a training DAG: its chunks as if nothing had been derived yet."""

from collections.abc import Mapping

from msgspec.structs import replace

from piper.ids import NodeId, ValueId
from piper.ir.dag import Chunk, Dag, Role, Value
from piper.ops.all_gather import AllGather
from piper.ops.all_to_all import AllToAll, AllToAllCounts, AllToAllRows
from piper.ops.offload import Fetch, Offload
from piper.ops.p2p import Transfer


def core_chunks(dag: Dag) -> dict[NodeId, Chunk]:
    """The core chunks, each reading the values that its producers made, or parameters, and not
    transferred, exchanged, gathered or fetched copies of them.
    """
    origin: dict[ValueId, ValueId] = {}
    parameters = {v.name: v.id for v in dag.values.values() if v.role is Role.PARAMETER}
    for node in dag.nodes.values():
        if isinstance(node.work, Transfer):
            origin[node.outputs[0]] = node.inputs[0]
        elif isinstance(node.work, (Offload, Fetch)):
            origin.update(zip(node.outputs, node.inputs, strict=True))
        elif isinstance(node.work, (AllToAll, AllToAllCounts, AllToAllRows)):
            origin[node.outputs[-1]] = node.inputs[0]
        elif isinstance(node.work, AllGather):
            origin.update({v: parameters[dag.values[v].name] for v in node.outputs})
    chunks: dict[NodeId, Chunk] = {}
    for chunk in dag.chunks():
        if chunk.derived:
            continue
        moved = any(v in origin for v in chunk.inputs)
        inputs = tuple(_first(origin, v) for v in chunk.inputs)
        chunks[chunk.id] = replace(chunk, inputs=inputs) if moved else chunk
    return chunks


def _first(origin: Mapping[ValueId, ValueId], value: ValueId) -> ValueId:
    """What *value* is a copy of; it may have travelled through several nodes."""
    while value in origin:
        value = origin[value]
    return value


def core_values(dag: Dag) -> dict[ValueId, Value]:
    """The values that no derived node makes."""
    derived = {v for node in dag.nodes.values() if node.derived for v in node.outputs}
    return {v: value for v, value in dag.values.items() if v not in derived}

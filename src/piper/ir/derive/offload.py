"""Offloading: what the forward saves for the backward of an offloaded region waits in host memory.

What is moved is memory, not values: tensors of one *storage* (a tensor and its views, also across
chunks) go together. A storage is moved if giving it up on the device is of use: a forward chunk
made it or it arrived in the forward; of everything in it, each value that some backward reads is
read by backwards of offloaded regions only. So parameters, buffers, batch inputs, and views of them
stay, and so does what a region that is not offloaded keeps anyway. Readers in the forward, and
sends, read the device's own copy, which lives until the last of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from msgspec.structs import replace

from piper.ids import BodyId, NodeId, ValueId
from piper.ir.dag import Chunk, Comm, Dag, Node, Pass, Role, Value
from piper.ir.derive.builder import Builder, communication
from piper.ir.storages import Given, Memory, output_memory
from piper.ops.compute import Call
from piper.ops.offload import Fetch, Offload

Storage: TypeAlias = tuple[NodeId, int]
"""The node that made it, and which of those that the node made it is."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Values that backward chunks ``readers`` (in node order) read: whole storages, which the
    forward is done with at one time.
    """

    values: tuple[ValueId, ...]
    readers: tuple[Chunk, ...]


def offload_saved(builder: Builder) -> None:
    """Let the backward chunks of offloaded regions read values that were put aside and fetched."""
    for saved in find_saved(builder.dag, builder.nodes, builder.values):
        reader = saved.readers[0]
        if reader.devices is None or reader.offload is None:
            continue
        alone = [(device,) for device in reader.devices]
        stream = reader.offload.stream
        kinds = [builder.values[v] for v in saved.values]
        out = communication(Offload(), reader.tags, saved.values, alone, stream, Pass.FORWARD)
        host = builder.add(out, [replace(value, role=Role.HOST) for value in kinds])
        back = communication(Fetch(), reader.tags, host, alone, stream, reader.pass_)
        fetched = dict(zip(saved.values, builder.add(back, kinds), strict=True))
        for chunk in saved.readers:
            now = builder.nodes[chunk.id]
            inputs = tuple(fetched.get(v, v) for v in now.inputs)
            builder.nodes[chunk.id] = replace(now, inputs=inputs)


def find_saved(
    dag: Dag, nodes: Mapping[NodeId, Node], values: Mapping[ValueId, Value]
) -> list[Saved]:
    """What is to be moved, in parts that the forward is done with at one time and that the same
    chunks read. *nodes* are core chunks, and what carries values to them.
    """
    if not any(isinstance(n, Chunk) and n.offload is not None for n in nodes.values()):
        return []
    readers = _backward_readers(nodes)
    last_use = _last_forward_uses(nodes)
    place = {node: i for i, node in enumerate(nodes)}
    staying = {*dag.losses, *dag.weights, *dag.buffer_updates.values()}
    parts: dict[tuple[NodeId, tuple[NodeId, ...]], list[ValueId]] = {}
    for members in _storages(dag, nodes).values():
        saved = [v for v in members if v in readers]
        if not saved or not staying.isdisjoint(members):
            continue
        if any(values[v].role is not Role.ACTIVATION for v in members):
            continue
        reading = {chunk.id: chunk for v in saved for chunk in readers[v]}
        in_order = tuple(sorted(reading, key=place.__getitem__))
        if any(chunk.offload is None for chunk in reading.values()):
            continue
        done = max(last_use[v] for v in members)[1]
        parts.setdefault((done, in_order), []).extend(saved)
    return [
        Saved(tuple(mine), tuple(c for n in ids if isinstance(c := nodes[n], Chunk)))
        for (_, ids), mine in parts.items()
    ]


def _last_forward_uses(nodes: Mapping[NodeId, Node]) -> dict[ValueId, tuple[int, NodeId]]:
    """The last of the forward chunks that make or read each value, else what carries it: its place
    in node order and its id.
    """
    last: dict[ValueId, tuple[int, NodeId]] = {}
    for place, node in enumerate(nodes.values()):
        if isinstance(node, Comm):
            last.update({v: last.get(v, (-1, node.id)) for v in node.outputs})
        elif node.pass_ is Pass.FORWARD:
            last.update(dict.fromkeys((*node.inputs, *node.outputs), (place, node.id)))
    return last


def _backward_readers(nodes: Mapping[NodeId, Node]) -> dict[ValueId, list[Chunk]]:
    """The backward chunks that read each value."""
    readers: dict[ValueId, list[Chunk]] = {}
    for node in nodes.values():
        if isinstance(node, Chunk) and not node.derived and node.pass_ is not Pass.FORWARD:
            for value in dict.fromkeys(node.inputs):
                readers.setdefault(value, []).append(node)
    return readers


def _storages(dag: Dag, nodes: Mapping[NodeId, Node]) -> dict[Storage, list[ValueId]]:
    """The values in each storage that the forward makes, in node order."""
    places = _Places(dag, nodes)
    found: dict[Storage, list[ValueId]] = {}
    for node in nodes.values():
        if node.pass_ is not Pass.FORWARD:
            continue
        for value in node.outputs:
            storage = places.of(value)
            if storage is not None:
                found.setdefault(storage, []).append(value)
    return found


class _Places:
    """Finds the storage of each value."""

    def __init__(self, dag: Dag, nodes: Mapping[NodeId, Node]) -> None:
        self._dag = dag
        # Which outputs share memory does not depend on sizes.
        symbol = dag.batch_symbol
        self._bindings = {} if symbol is None else {symbol: dag.captured_size}
        self._memory: dict[BodyId, tuple[Memory, ...]] = {}
        self._makers = {v: node for node in nodes.values() for v in node.outputs}
        self._known: dict[ValueId, Storage | None] = {}

    def of(self, value: ValueId) -> Storage | None:
        """The storage of *value*; ``None`` for that of a source (state, the batch)."""
        if value not in self._known:
            node = self._makers.get(value)
            self._known.update(self._made_by(node) if node is not None else [(value, None)])
        return self._known[value]

    def _made_by(self, node: Node) -> Iterator[tuple[ValueId, Storage | None]]:
        # What arrives together may share one buffer.
        if isinstance(node, Comm) or not isinstance(node.work, Call):
            yield from ((value, (node.id, 0)) for value in node.outputs)
            return
        for value, memory in zip(node.outputs, self._memory_of(node.work.body), strict=True):
            if isinstance(memory, Given):
                yield value, self.of(node.inputs[memory.index])
            else:
                yield value, (node.id, memory.number)

    def _memory_of(self, body: BodyId) -> tuple[Memory, ...]:
        if body not in self._memory:
            self._memory[body] = output_memory(self._dag.bodies[body], self._bindings)
        return self._memory[body]

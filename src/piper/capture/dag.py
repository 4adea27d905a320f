"""Assembly of the training DAG from chunks of graph nodes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
import torch.fx

from piper.capture.batch import Batch
from piper.capture.bodies import ChunkCode, chunk_code, tensor_spec
from piper.capture.constants import Constants
from piper.capture.joint import (
    BatchInput,
    BufferInput,
    Joint,
    ParameterInput,
    is_random,
)
from piper.capture.regions import Layout
from piper.capture.sizes import SYMBOL
from piper.capture.states import TensorState
from piper.ids import BodyId, NodeId, ValueId
from piper.ir.body import Body, TensorSpec, body_id
from piper.ir.dag import BatchLeaf, Buffer, Chunk, Dag, LossKind, Parameter, Role, Value
from piper.ops.compute import Call

Node: TypeAlias = torch.fx.Node
Contributions: TypeAlias = Mapping[int, Sequence[tuple[str, Node]]]


def build_dag(
    joint: Joint,
    batch: Batch,
    layout: Layout,
    constants: Constants,
    chunk_of: Mapping[Node, int],
    contributions: Contributions,
) -> Dag:
    """The DAG whose chunks are the nodes of equal ``chunk_of``, in the order of their numbers."""
    return _Assembly(joint, batch, layout, constants, chunk_of, contributions).dag()


class _Assembly:
    """Allocates values and builds chunks."""

    def __init__(
        self,
        joint: Joint,
        batch: Batch,
        layout: Layout,
        constants: Constants,
        chunk_of: Mapping[Node, int],
        contributions: Contributions,
    ) -> None:
        self._joint = joint
        self._batch = batch
        self._layout = layout
        self._constants = constants
        self._chunk_of = chunk_of
        self._contributions = contributions
        self._parameter = _first_names(joint.parameters)
        self._buffer = _first_names(joint.buffers)
        self._types = None if joint.precision is None else joint.precision.types
        self._values: dict[ValueId, Value] = {}
        self._sources: dict[tuple[Role, str], ValueId] = {}
        self._of_node: dict[Node, ValueId] = {}
        self._bodies: dict[BodyId, Body] = {}
        self._contributed: dict[str, list[ValueId]] = {}
        random = [n for n in joint.module.graph.nodes if is_random(n)]
        self._ordinals = {node: ordinal for ordinal, node in enumerate(random)}

    def dag(self) -> Dag:
        joint, batch = self._joint, self._batch
        members = self._members()
        codes = [self._code(own, ()) for own in members]
        read = {node for code in codes for node in code.inputs}
        for node in (joint.loss, joint.weight, *(n for _, n in joint.buffer_updates)):
            if node is not None:
                read.add(node)
        nodes = {}
        for number, own in enumerate(members):
            chunk = self._chunk(number, own, [n for n in own if n in read])
            nodes[chunk.id] = chunk
        # What is written is state, whether or not its old value is read.
        written = {name for name, _ in joint.buffer_updates}
        for node, source in joint.inputs.items():
            if isinstance(source, BufferInput) and source.name in written:
                self._input(node)
        weights = () if joint.weight is None else (self._of_node[joint.weight],)
        return Dag(
            nodes=nodes,
            values=self._values,
            bodies=self._bodies,
            parameters={p.name: p for p in self._parameters()},
            buffers={b.name: b for b in self._buffers()},
            batch=tuple(self._leaves()),
            batch_size=batch.size or joint.captured_size,
            batch_symbol=SYMBOL if joint.symbolic else None,
            captured_size=joint.captured_size,
            guards=joint.size_guards,
            loss_kind=LossKind.MEAN if joint.weight is None else LossKind.WEIGHTED,
            losses=(self._of_node[joint.loss],),
            weights=weights,
            contributions={p: tuple(vs) for p, vs in self._contributed.items()},
            buffer_updates={
                self._buffer[name]: self._of_node[node] for name, node in joint.buffer_updates
            },
            precision=self._types,
        )

    def _members(self) -> list[list[Node]]:
        """The nodes of each chunk, in graph order."""
        members: list[list[Node]] = [
            [] for _ in range(max(self._chunk_of.values(), default=-1) + 1)
        ]
        for node in self._joint.module.graph.nodes:
            if node in self._chunk_of:
                members[self._chunk_of[node]].append(node)
        return members

    def _code(self, own: Sequence[Node], outputs: Sequence[Node]) -> ChunkCode:
        return chunk_code(own, outputs, sunk=self._layout.sunk, literals=self._constants.literals)

    def _chunk(self, number: int, own: Sequence[Node], kept: Sequence[Node]) -> Chunk:
        parts = self._contributions.get(number, ())
        code = self._code(own, [*kept, *(node for _, node in parts)])
        identity = body_id(code.body)
        self._bodies[identity] = code.body
        inputs = tuple(self._input(node) for node in code.inputs)
        outputs = [self._new(node, Role.ACTIVATION) for node in kept]
        self._of_node.update(zip(kept, outputs, strict=True))
        for parameter, node in parts:
            value = self._new(node, Role.CONTRIBUTION, parameter)
            self._contributed.setdefault(parameter, []).append(value)
            outputs.append(value)
        path, pass_ = self._layout.keys[own[0]]
        return Chunk(
            id=NodeId(number),
            tags=path,
            pass_=pass_,
            inputs=inputs,
            outputs=tuple(outputs),
            work=Call(body=identity, rng=tuple(self._ordinals[n] for n in code.randoms)),
        )

    def _new(self, node: Node, role: Role, name: str = "") -> ValueId:
        identity = ValueId(len(self._values))
        spec = tensor_spec(node.meta["val"], node.name)
        self._values[identity] = Value(identity, spec, role, name)
        return identity

    def _input(self, node: Node) -> ValueId:
        if node in self._of_node:
            return self._of_node[node]
        role, name = self._source(node)
        if (role, name) not in self._sources:
            self._sources[role, name] = self._new(node, role, name)
        return self._sources[role, name]

    def _source(self, node: Node) -> tuple[Role, str]:
        if node in self._constants.names:
            return Role.BUFFER, self._constants.names[node]
        match self._joint.inputs[node]:
            case ParameterInput(name=name):
                return Role.PARAMETER, self._parameter[name]
            case BufferInput(name=name):
                return Role.BUFFER, self._buffer[name]
            case BatchInput(index=index):
                return Role.INPUT, self._batch.leaves[index].name
            case _:
                return Role.SEED, ""

    def _parameters(self) -> Iterator[Parameter]:
        """The parameters as chunks read them."""
        for state in self._joint.parameters:
            first, *aliases = state.names
            spec = tensor_spec(state.tensor, f"parameter {first!r}")
            if self._types is not None and spec.dtype.is_real_floating:
                spec = TensorSpec(spec.shape, self._types.compute)
            yield Parameter(first, spec, state.requires_grad, tuple(aliases))

    def _buffers(self) -> Iterator[Buffer]:
        for state in self._joint.buffers:
            first, *aliases = state.names
            spec = tensor_spec(state.tensor, f"buffer {first!r}")
            yield Buffer(first, spec, state.persistent, tuple(aliases))
        for name, tensor in self._constants.tensors.items():
            yield Buffer(name, tensor_spec(tensor, name), persistent=False)

    def _leaves(self) -> Iterator[BatchLeaf]:
        for index, leaf in enumerate(self._batch.leaves):
            if isinstance(leaf.value, torch.Tensor):
                spec = tensor_spec(self._joint.leaves[index], f"batch tensor {leaf.name!r}")
                yield BatchLeaf(leaf.name, index, spec, 0 if leaf.split else None)


def _first_names(states: Sequence[TensorState]) -> dict[str, str]:
    return {name: state.names[0] for state in states for name in state.names}

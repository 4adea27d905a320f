"""What derivation builds on: the core, the nodes derived so far, and the ids that derived nodes had
before.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from msgspec.structs import replace as replace_struct

from piper.dtypes import DType
from piper.errors import DirectiveError
from piper.ids import COMPUTE, NodeId, Stream, ValueId
from piper.ir.body import TensorSpec
from piper.ir.core import core_chunks, core_values
from piper.ir.dag import Chunk, Comm, Dag, DeviceGroup, Node, Pass, Replication, Role, Tags, Value
from piper.ops.base import Work

P2P_STREAM, REDUCE_STREAM = Stream("p2p"), Stream("reduce")

Group: TypeAlias = DeviceGroup | None
"""A node's devices; ``None`` before it is placed."""

Key: TypeAlias = tuple[Work, tuple[ValueId, ...], tuple[DeviceGroup, ...]]


@dataclass
class Builder:
    """Core nodes with values renamed to their origins, plus what has been derived so far."""

    dag: Dag
    nodes: dict[NodeId, Node]
    values: dict[ValueId, Value]
    old: Mapping[Key, Node]
    next_node: int
    next_value: int
    makers: dict[ValueId, Chunk]
    shards: Mapping[str, tuple[DeviceGroup, ...]] = field(default_factory=dict)
    experts: Mapping[str, tuple[DeviceGroup, ...]] = field(default_factory=dict)
    named: dict[tuple[Role, str], ValueId] | None = None
    sharing: dict[tuple[int, DeviceGroup | None], tuple[DeviceGroup, ...]] = field(
        default_factory=dict
    )  # by number of a sharding and devices: the groups within which experts are shared
    shard_groups: dict[
        tuple[int, DeviceGroup, tuple[DeviceGroup, ...]], tuple[DeviceGroup, ...]
    ] = field(default_factory=dict)  # by a replication's identity, devices, and which have the same
    _copies: dict[tuple[int, DeviceGroup], tuple[DeviceGroup, ...]] = field(default_factory=dict)

    @classmethod
    def start(cls, dag: Dag) -> "Builder":
        """The core of *dag*."""
        nodes = core_chunks(dag)
        return cls(
            dag=dag,
            nodes=dict(nodes),
            values=core_values(dag),
            old={_key(node): node for node in dag.nodes.values() if node.derived},
            next_node=max(dag.nodes, default=-1) + 1,
            next_value=max(dag.values, default=-1) + 1,
            makers={v: chunk for chunk in nodes.values() for v in chunk.outputs},
        )

    def core(self) -> list[Chunk]:
        """The core chunks, as they are by now."""
        return [n for n in self.nodes.values() if isinstance(n, Chunk) and not n.derived]

    def region(self, chunk: Chunk) -> Tags:
        """The chunk's tags without those of splits."""
        return self.dag.region(chunk.tags)

    def replication(self, chunk: Chunk) -> Replication | None:
        """What the ``Replicate`` that claims *chunk* asks for."""
        return None if chunk.replication is None else self.dag.replications[chunk.replication]

    def add(self, node: Node, results: Sequence[Value]) -> tuple[ValueId, ...]:
        """Add a derived node (its id and outputs are filled in here) that makes values like
        *results*.
        """
        known = self.old.get(_key(node))
        if known is not None and len(known.outputs) == len(results):
            identity, outputs = known.id, known.outputs
        else:
            identity = NodeId(self.next_node)
            self.next_node += 1
            outputs = tuple(self._new_value() for _ in results)
        self.nodes[identity] = replace_struct(node, id=identity, outputs=outputs)
        for value, result in zip(outputs, results, strict=True):
            self.values[value] = replace_struct(result, id=value)
        return outputs

    def cut(
        self, names: Sequence[str], limit: int | None, dtype: DType | None = None
    ) -> list[list[str]]:
        """Cut the parameters *names* into runs of at most *limit* bytes (at least one parameter
        each), in type *dtype* if given, else in their own.
        """
        buckets: list[list[str]] = []
        size = 0
        for name in names:
            spec = self.held_spec(name)
            nbytes = spec.numel() * (dtype or spec.dtype).itemsize
            if not buckets or (limit is not None and size + nbytes > limit):
                buckets.append([])
                size = 0
            buckets[-1].append(name)
            size += nbytes
        return buckets

    def source(self, value: Value) -> ValueId:
        """The id of the source like *value* (by role and name), which is added if it does not
        exist.
        """
        key = (value.role, value.name)
        sources = self._sources()
        if key not in sources:
            sources[key] = self._new_value()
        self.values[sources[key]] = replace_struct(value, id=sources[key])
        return sources[key]

    def parameter(self, name: str) -> ValueId:
        """The value of a parameter that some chunk reads."""
        return self._sources()[Role.PARAMETER, name]

    def held_spec(self, name: str) -> TensorSpec:
        """Spec of what a device holds of a parameter, of which only the optimizer's state may be
        cut further: all of it, or its part of the experts.
        """
        spec = self.dag.parameters[name].spec
        if name not in self.experts:
            return spec
        (first, *rest), count = spec.shape, len(self.experts[name][0])
        assert isinstance(first, int)
        return TensorSpec((first // count, *rest), spec.dtype)

    def copies(self, name: str, devices: DeviceGroup) -> tuple[DeviceGroup, ...]:
        """*devices*, all of which hold the parameter, in groups of those that hold the same of it:
        all of it, or the same experts.
        """
        if (sharing := self.experts.get(name)) is None:
            return (devices,)
        if (known := self._copies.get((id(sharing), devices))) is None:
            here = frozenset(devices)
            groups = [g for g in sharing if here.issuperset(g)]
            known = tuple(zip(*groups, strict=True)) if groups else (devices,)
            self._copies[id(sharing), devices] = known
        return known

    def _sources(self) -> dict[tuple[Role, str], ValueId]:
        if self.named is None:
            produced = {v for node in self.nodes.values() for v in node.outputs}
            self.named = {
                (v.role, v.name): v.id
                for v in self.values.values()
                if v.role in (Role.PARAMETER, Role.SHARD, Role.KEPT, Role.SCALE)
                and v.id not in produced
            }
        return self.named

    def _new_value(self) -> ValueId:
        self.next_value += 1
        return ValueId(self.next_value - 1)

    def finish(self) -> Dag:
        """The DAG. Raises :class:`DirectiveError` if an order names a node that is gone."""
        for edge in self.dag.order:
            if edge.before not in self.nodes or edge.after not in self.nodes:
                raise DirectiveError(
                    f"directive {edge.directive} ordered communication that a later directive changed; "
                    "put an Order that names COMM after the directives that place and replicate"
                )
        return replace(
            self.dag,
            nodes=self.nodes,
            values=self.values,
            shards=dict(self.shards),
            expert_groups=dict(self.experts),
        )


def _key(node: Node) -> Key:
    groups = node.groups if isinstance(node, Comm) else (node.devices or (),)
    return (node.work, node.inputs, groups)


def update_chunk(work: Work, tags: Tags, inputs: Iterable[ValueId], devices: Group) -> Chunk:
    """A compute node of the update pass, to be added."""
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


def communication(
    work: Work,
    tags: Tags,
    inputs: Iterable[ValueId],
    groups: Sequence[DeviceGroup],
    stream: Stream,
    pass_: Pass = Pass.UPDATE,
) -> Comm:
    """A communication node, to be added."""
    return Comm(
        id=NodeId(-1),
        tags=tags,
        pass_=pass_,
        inputs=tuple(inputs),
        outputs=(),
        work=work,
        groups=tuple(groups),
        stream=stream,
    )

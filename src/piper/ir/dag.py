"""The training DAG: one training step as compute chunks and communications over named values.

The DAG is *SPMD over device groups*: a node placed on a group of n devices stands for n executions,
one per device, each on its own microbatches. A value lives on the devices of its producer.

Two kinds of node. A :class:`Chunk` computes: it calls a body, sums gradient contributions, or
updates parameters. A :class:`Comm` communicates within each of its device groups. Two kinds of
edge: *data* (a value's producer before its consumers, implied by ``inputs`` and ``outputs``) and
*order* (:class:`OrderEdge`). The DAG is immutable; ``piper.ir.edit`` is the only way to change it.

*Core* nodes are the chunks that capture made and directives copied. *Derived* nodes (transfers,
sums, reductions, updates) follow from the core nodes' placement and are made by
``piper.ir.derive``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import TypeAlias

import msgspec

from piper.brief import brief, count
from piper.dtypes import DType
from piper.ids import COMPUTE, BodyId, DeviceId, NodeId, Stream, ValueId
from piper.ir.body import Body, TensorSpec
from piper.ops.base import Work
from piper.ops.grad_norm import Norm, NormRoot

DeviceGroup: TypeAlias = tuple[DeviceId, ...]
Tags: TypeAlias = tuple[tuple[str, int], ...]


class Pass(StrEnum):
    """Which part of the step a node belongs to."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "BI"
    BACKWARD_WEIGHT = "BW"
    UPDATE = "UPDATE"


class Role(StrEnum):
    """Where a value comes from or what it is for."""

    PARAMETER = "parameter"  # state; named by the user's parameter
    BUFFER = "buffer"  # state at the start of the step; named by the user's buffer
    INPUT = "input"  # a batch leaf, rows of one microbatch
    SHARD = "shard"  # state: this device's slice of the parameter; named by it
    SEED = "seed"  # gradient of the step's loss with respect to one microbatch's loss
    SCALE = "scale"  # state: what seeds, and so all gradients, are multiplied by in this step
    ACTIVATION = "activation"  # anything else that a chunk made
    CONTRIBUTION = "contribution"  # one chunk's part of a parameter's gradient
    TOTAL = "total"  # a sum of contributions, or of loss weights
    GATHERED = "gathered"  # a whole parameter made of its shards for one use; named by it
    KEPT = "kept"  # state: the gradient kept from earlier steps, or this device's slice of it; named by the parameter
    HOST = "host"  # an activation's copy in host memory
    NORM = "norm"  # a part of the gradients' norm, or the norm


SOURCES = frozenset(
    {Role.PARAMETER, Role.SHARD, Role.BUFFER, Role.KEPT, Role.INPUT, Role.SEED, Role.SCALE}
)
"""Roles of values that no node produces."""


STATE = frozenset({Role.PARAMETER, Role.SHARD, Role.BUFFER, Role.KEPT, Role.SEED, Role.SCALE})
"""Roles of values that exist before the step and after it."""


class LayoutKind(StrEnum):
    """What a value of a sharded expert region is."""

    PARAMETER = "parameter"  # cut along dimension 0, the experts
    CAPACITY = "capacity"  # equally many tokens per expert: dimensions for the experts and for an expert's tokens
    ROWS = "rows"  # dimension 0: tokens, sorted by expert
    COUNTS = "counts"  # the numbers of tokens per expert


class ExpertLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """How a value is cut by experts.

    ``other`` is the value's spec on the other side of the region's border: inside the region of a
    value that enters it, outside of one that leaves it. For CAPACITY, ``sizes`` are the sizes
    outside, merged dimensions taken apart (-1: the tokens'). For ROWS, ``complete`` says that every
    row must belong to an expert: what the region makes of others is not known to be zero.
    """

    kind: LayoutKind
    other: TensorSpec
    sizes: tuple[int, ...] = ()
    expert_dim: int = 0
    token_dim: int = 0
    complete: bool = False


UNNUMBERED = ValueId(-1)
"""In place of the id of a value that is yet to be added to a DAG."""


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A named tensor.

    ``name`` is the parameter's, buffer's or batch leaf's; a contribution or total carries its
    parameter's. ``microbatch`` is, for an INPUT, the microbatch whose rows it holds (0 before any
    split). ``experts`` says how a value is cut that enters or leaves a sharded expert region, or a
    parameter of one.
    """

    id: ValueId
    spec: TensorSpec
    role: Role
    name: str = ""
    microbatch: int = 0
    experts: ExpertLayout | None = None


class Offloading(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """What an ``Offload`` asks for: the number of the directive, and the stream of the copies."""

    directive: int
    stream: Stream


def _brief_chunk(it: "Chunk") -> str:
    return f"{it.id}: {it.label!r} on {_devices(it.devices)}, {len(it.inputs)} values in, {len(it.outputs)} out"


@brief(_brief_chunk)
class Chunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False, tag="chunk"):
    """A compute node. ``devices`` is ``None`` until it is placed.

    ``tags`` is the region path, outermost first, followed by the split dimensions, for instance
    ``(("PP", 1), ("EP", 3), ("MB", 0))``. ``p2p_stream`` carries its values to other groups
    (``None``: the default). ``replication`` is the index of the :class:`Replication` that claims
    it, ``recompute`` the number of the directive that lets its region's backward recompute the
    forward, or ``None``. ``offload`` says where what its region's backward reads of the forward is
    kept in the meantime (``None``: on the device). ``sharding`` is the index of the
    :class:`Sharding` that shards its experts.
    """

    id: NodeId
    tags: Tags
    pass_: Pass
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    work: Work
    devices: DeviceGroup | None = None
    stream: Stream = COMPUTE
    p2p_stream: Stream | None = None
    replication: int | None = None
    derived: bool = False
    recompute: int | None = None
    offload: Offloading | None = None
    sharding: int | None = None

    @property
    def label(self) -> str:
        """For people: ``F PP=1 MB=0``."""
        return _label(self.pass_, self.work, self.tags)

    @property
    def participants(self) -> DeviceGroup:
        """The devices that execute the node."""
        return self.devices or ()


def _brief_comm(it: "Comm") -> str:
    return f"{it.id}: {it.label!r} among {_devices(it.participants)}, {len(it.inputs)} values in, {len(it.outputs)} out"


@brief(_brief_comm)
class Comm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False, tag="comm"):
    """A communication node: each of ``groups`` communicates among its members, independently.

    ``inputs`` may hold values of several producers; a member contributes those that live on it.
    """

    id: NodeId
    tags: Tags
    pass_: Pass
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    work: Work
    groups: tuple[DeviceGroup, ...]
    stream: Stream
    derived: bool = True

    @property
    def label(self) -> str:
        """For people: ``all_reduce UPDATE PP=1``."""
        return _label(self.pass_, self.work, self.tags)

    @property
    def participants(self) -> DeviceGroup:
        """All devices that take part."""
        return tuple(d for group in self.groups for d in group)


Node: TypeAlias = Chunk | Comm


def _devices(devices: DeviceGroup | None) -> str:
    """For people, a few of them."""
    if devices is None:
        return "no device yet"
    shown = ", ".join(map(str, devices[:8]))
    return f"devices [{shown}{', …' if len(devices) > 8 else ''}]"


def _label(pass_: Pass, work: Work, tags: Tags) -> str:
    words = [] if work.kind in ("call", "update") else [work.kind]
    return " ".join([*words, pass_.value, *(f"{k}={v}" for k, v in tags)])


class OrderEdge(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """``before`` runs before ``after``; ``directive`` is the number of the directive that said so
    (-1: none). ``halves``: they are the halves of one backward.
    """

    before: NodeId
    after: NodeId
    directive: int = -1
    halves: bool = False


class Overlap(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Chunks of one group of an ``Order`` on the same devices, of at least two of its members: they
    are to hide each other's communication. ``directive`` is the number of the directive that said
    so.
    """

    directive: int
    nodes: tuple[NodeId, ...]


class Parameter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A parameter by its first name; ``aliases`` are the other names of a tied one."""

    name: str
    spec: TensorSpec
    requires_grad: bool
    aliases: tuple[str, ...] = ()


class Buffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A buffer of the model, or a constant tensor that capture found (``persistent=False``)."""

    name: str
    spec: TensorSpec
    persistent: bool
    aliases: tuple[str, ...] = ()


class BatchLeaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of the batch.

    ``name`` is its path, for instance ``inputs[0]``, ``inputs.mask`` or ``targets``; ``index`` its
    position among the leaves of ``(inputs, targets)``; ``batch_dim`` the dimension that is split
    (``None``: given whole to each microbatch).
    """

    name: str
    index: int
    spec: TensorSpec
    batch_dim: int | None


class LossKind(StrEnum):
    """How microbatch losses combine into the step's loss."""

    MEAN = "mean"  # the mean of the microbatch losses
    WEIGHTED = "weighted"  # sum of losses over sum of weights


class Level(IntEnum):
    """What is sharded over the replicas: the ZeRO stages (Rajbhandari et al., 2020)."""

    NONE = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3


class Replication(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a ``Replicate`` asks for the parameters of the chunks that it claims.

    ``bucket_bytes`` bounds one message's payload (``None``: one bucket per region).
    ``shard_groups`` are the device lists within which is sharded (empty: the whole group of each
    node). ``buffers`` says which replica's buffers count after the step: ``"first"``, ``"mean"``,
    ``"sum"`` (of their changes) or ``None`` (refuse).
    """

    directive: int
    bucket_bytes: int | None
    reduce_stream: Stream
    gather_stream: Stream = Stream("gather")
    level: Level = Level.NONE
    shard_groups: tuple[DeviceGroup, ...] = ()
    buffers: str | None = None


class Sharding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a ``Shard`` asks for the expert regions that it claims: the device lists within which
    their experts are sharded (empty: the whole group of each node), and the stream of the
    all-to-all. ``sources`` is the number of replicas of the rest of the model whose tokens one list
    works on (0: one for each member).
    """

    directive: int
    stream: Stream
    groups: tuple[DeviceGroup, ...] = ()
    sources: int = 0


class Clip(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Clipping by the norm of all gradients together: they are scaled by ``min(1, max_norm / (norm
    + 1e-6))`` before the update. ``max_norm`` is ``None`` where the norm is only reported.
    """

    norm: Norm
    max_norm: float | None


class ElementTypes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mixed precision: floating-point parameters are read in ``compute``, their gradients summed in
    ``reduce``, they are updated in ``master``; the model's outputs reach the loss in ``output``.
    Complex numbers and integers stay as they are.
    """

    compute: DType
    reduce: DType
    master: DType
    output: DType

    def __str__(self) -> str:
        return (
            f"{self.compute} compute, {self.reduce} sums of gradients, {self.master} master weights"
        )


def master_dtype(parameter: Parameter, types: ElementTypes | None) -> DType:
    """The element type in which *parameter* is updated; chunks read it in that of its spec.

    One that is not trained is kept as it is read.
    """
    read = parameter.spec.dtype
    if types is None or not parameter.requires_grad or not read.is_real_floating:
        return read
    return types.master


class GradientUse(StrEnum):
    """What becomes of a step's gradients."""

    UPDATE = "update"  # they update the parameters
    KEEP = "keep"  # they are added to those that are kept
    ADD = "add"  # those that are kept are added to them, and they update the parameters


class SplitDim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A dimension made by ``Split``: its tag name and the number of pieces."""

    name: str
    count: int


def _brief_dag(it: "Dag") -> str:
    return f"{count(len(it.nodes), 'node')}, {count(len(it.parameters), 'parameter')}, {count(len(it.bodies), 'piece')} of code, a batch of {count(it.batch_size, 'row')}, {count(len(it.directives), 'directive')} applied"


@brief(_brief_dag)
@dataclass(frozen=True)
class Dag:
    """One training step. Every field is immutable by convention; change it through
    ``piper.ir.edit``.

    Attributes:
        nodes, values, bodies: what there is, by id.
        parameters, buffers: the model's state, by first name.
        batch: the tensors of the batch.
        batch_size: rows of the global batch.
        batch_symbol: the symbol of the microbatch size; ``None`` when captured at exactly
            ``captured_size`` rows.
        guards: conditions over the symbol under which the capture holds.
        losses, weights: one value per microbatch; weights only of a weighted loss.
        contributions: per parameter, the gradient contributions of all core chunks.
        buffer_updates: the final value of each buffer that the forward writes.
        order: edges that directives added.
        overlaps: groups of chunks that an order wants interleaved.
        splits: the dimensions of microbatches, outermost first.
        replications, shardings: what chunks refer to by index.
        shards: per sharded parameter, the device groups of which member i holds slice i.
        expert_groups: per parameter of a sharded expert region, the device groups of which member i
            holds the i-th part of the experts, of which ``shards`` then has the slices.
        directives: the history, as text.
        clip, gradient_use: what is done with the gradients.
        precision: in which types is computed, summed and updated, where these differ from the
            model's. A parameter that is updated in another type than it is read in has a *master
            copy*, of role SHARD: a slice, or, where the parameter is not sharded, all of it in a
            group of one device.
        loss_scaled: every seed is multiplied by the step's SCALE, gradients are divided by it, and
            nothing is updated unless their norm is finite.
    """

    nodes: Mapping[NodeId, Node]
    values: Mapping[ValueId, Value]
    bodies: Mapping[BodyId, Body]
    parameters: Mapping[str, Parameter]
    buffers: Mapping[str, Buffer]
    batch: tuple[BatchLeaf, ...]
    batch_size: int
    batch_symbol: str | None
    captured_size: int
    guards: tuple[str, ...]
    loss_kind: LossKind
    losses: tuple[ValueId, ...]
    weights: tuple[ValueId, ...]
    contributions: Mapping[str, tuple[ValueId, ...]]
    buffer_updates: Mapping[str, ValueId]
    order: tuple[OrderEdge, ...] = ()
    splits: tuple[SplitDim, ...] = ()
    replications: tuple[Replication, ...] = ()
    shards: Mapping[str, tuple[DeviceGroup, ...]] = field(default_factory=dict)
    shardings: tuple[Sharding, ...] = ()
    expert_groups: Mapping[str, tuple[DeviceGroup, ...]] = field(default_factory=dict)
    directives: tuple[str, ...] = field(default=())
    clip: Clip | None = None
    gradient_use: GradientUse = GradientUse.UPDATE
    precision: ElementTypes | None = None
    loss_scaled: bool = False
    overlaps: tuple[Overlap, ...] = ()

    @cached_property
    def producers(self) -> Mapping[ValueId, NodeId]:
        """The node that makes each produced value."""
        return {value: node.id for node in self.nodes.values() for value in node.outputs}

    @cached_property
    def consumers(self) -> Mapping[ValueId, tuple[NodeId, ...]]:
        """The nodes that read each value, in node order."""
        readers: dict[ValueId, list[NodeId]] = {}
        for node in self.nodes.values():
            for value in dict.fromkeys(node.inputs):
                readers.setdefault(value, []).append(node.id)
        return {value: tuple(nodes) for value, nodes in readers.items()}

    @cached_property
    def predecessors(self) -> Mapping[NodeId, tuple[NodeId, ...]]:
        """Nodes that must run before each node: along data edges, order edges, and from each reader
        of a parameter or buffer, or of what was gathered of it, to the node that overwrites it.
        """
        before: dict[NodeId, dict[NodeId, None]] = {n: {} for n in self.nodes}
        producers = self.producers
        for node in self.nodes.values():
            mine = before[node.id]
            for value in node.inputs:
                if (producer := producers.get(value)) is not None:
                    mine[producer] = None
        for edge in self.order:
            before[edge.after][edge.before] = None
        for writer, readers in self._overwrites():
            before[writer].update(dict.fromkeys(readers))
        return {n: tuple(ps) for n, ps in before.items()}

    def _overwrites(self) -> Iterator[tuple[NodeId, list[NodeId]]]:
        readers: dict[tuple[Role, str], list[NodeId]] = {}
        for value in self.values.values():
            if (
                value.role in (Role.PARAMETER, Role.SHARD, Role.BUFFER, Role.KEPT)
                and value.id not in self.producers
            ):
                mine = readers.setdefault((value.role, value.name), [])
                for reader in self.consumers.get(value.id, ()):
                    mine.append(reader)
                    mine.extend(self._delayed_by(self.nodes[reader]))
        writers: dict[tuple[Role, str], set[NodeId]] = {}
        for node in self.nodes.values():
            for role, name in node.work.overwrites():
                writers.setdefault((Role(role), name), set()).add(node.id)
        # Nodes that both read and overwrite it do so on different devices, each its own copy.
        for state, nodes in writers.items():
            others = [reader for reader in readers.get(state, ()) if reader not in nodes]
            yield from ((node, others) for node in nodes)

    def _delayed_by(self, reader: Node) -> Iterator[NodeId]:
        """The nodes for which *reader* may wait before it reads: a gather starts when what it
        brings is needed, not where an order puts it.
        """
        if isinstance(reader, Comm) and reader.work.early:
            for value in reader.outputs:
                yield from self.consumers.get(value, ())

    @cached_property
    def successors(self) -> Mapping[NodeId, tuple[NodeId, ...]]:
        """The inverse of :attr:`predecessors`."""
        after: dict[NodeId, list[NodeId]] = {n: [] for n in self.nodes}
        for node, before in self.predecessors.items():
            for predecessor in before:
                after[predecessor].append(node)
        return {n: tuple(s) for n, s in after.items()}

    @cached_property
    def grad_norm(self) -> tuple[ValueId, DeviceId] | None:
        """The norm of all gradients, and the device that reports it; ``None`` where none is asked
        for.
        """
        for chunk in self.chunks():
            if isinstance(chunk.work, NormRoot):
                return chunk.outputs[0], chunk.participants[0]
        return None

    def master_dtype(self, parameter: str) -> DType:
        """The element type in which a parameter is updated."""
        return master_dtype(self.parameters[parameter], self.precision)

    def has_master(self, parameter: str) -> bool:
        """Whether a parameter is updated in another type than it is read in, on a copy."""
        return self.master_dtype(parameter) is not self.parameters[parameter].spec.dtype

    @property
    def num_microbatches(self) -> int:
        """Microbatches per replica."""
        count = 1
        for split in self.splits:
            count *= split.count
        return count

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas: the common size of all device groups but those of sharded expert
        regions (1 before placement).
        """
        placed = [c for c in self.chunks() if not c.derived and c.devices]
        whole = [c for c in placed if c.sharding is None] or placed
        return max((len(c.participants) for c in whole), default=1)

    def expert_part(self, name: str, device: DeviceId) -> tuple[int, int] | None:
        """Which of how many parts of its experts *device* holds of parameter *name*; ``None`` where
        experts are not sharded.
        """
        for group in self.expert_groups.get(name, ()):
            if device in group:
                return group.index(device), len(group)
        return None

    def chunks(self) -> Iterator[Chunk]:
        """The compute nodes, in node order."""
        return (n for n in self.nodes.values() if isinstance(n, Chunk))

    def comms(self) -> Iterator[Comm]:
        """The communication nodes, in node order."""
        return (n for n in self.nodes.values() if isinstance(n, Comm))

    def region(self, tags: Tags) -> Tags:
        """The region path of *tags*: those that are not of splits."""
        splits = {split.name for split in self.splits}
        return tuple(tag for tag in tags if tag[0] not in splits)

    def is_split(self, tags: Tags) -> bool:
        """Whether *tags* name a microbatch."""
        return self.region(tags) != tags

    def microbatch(self, tags: Tags) -> int:
        """The microbatch number (within one replica) that *tags* name; 0 for an unsplit node."""
        number, named = 0, dict(tags)
        for split in self.splits:
            number = number * split.count + named.get(split.name, 0)
        return number

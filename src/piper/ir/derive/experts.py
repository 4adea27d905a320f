"""All-to-all: what enters and leaves a sharded expert region is exchanged among the devices that share the experts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from piper.dtypes import DType
from piper.errors import DirectiveError
from piper.ids import NodeId, ValueId
from piper.ir.body import TensorSpec
from piper.ir.dag import Chunk, DeviceGroup, ExpertLayout, LayoutKind, Role, Value
from piper.ir.derive.builder import Builder, communication
from piper.ir.experts import expert_groups
from piper.ops.all_to_all import AllToAll, AllToAllCounts, AllToAllRows
from piper.ops.base import Work


def find_experts(builder: Builder) -> dict[str, tuple[DeviceGroup, ...]]:
    """For each parameter whose experts are sharded the groups whose member i holds part i."""
    found: dict[str, dict[DeviceGroup, None]] = {}
    for chunk in builder.core():
        for value in chunk.inputs:
            info = builder.values[value]
            if info.role is Role.PARAMETER and info.experts is not None:
                groups = dict.fromkeys(sharing(builder, chunk))
                found.setdefault(info.name, {}).update(groups)
    return {name: tuple(groups) for name, groups in found.items()}


def sharing(builder: Builder, chunk: Chunk) -> tuple[DeviceGroup, ...]:
    """The groups within which *chunk* shares experts; none if it does not."""
    if chunk.sharding is None:
        return ()
    key = (chunk.sharding, chunk.devices)
    if (known := builder.sharing.get(key)) is None:
        lists = builder.dag.shardings[chunk.sharding].groups
        known = builder.sharing[key] = expert_groups(chunk, lists)
    return known


@dataclass
class Exchange:
    """Makes the all-to-all nodes, each once. *core* are the core chunks as they were, *move* brings a value to a chunk's devices."""

    builder: Builder
    core: Mapping[NodeId, Chunk]
    move: Callable[[ValueId, Chunk], ValueId]
    made: dict[tuple[ValueId, tuple[DeviceGroup, ...]], ValueId] = field(default_factory=dict)
    counted: dict[tuple[ValueId, tuple[DeviceGroup, ...]], ValueId] = field(default_factory=dict)

    def leave(self, value: ValueId, maker: Chunk) -> ValueId:
        """What *maker*, in a sharded region, made of the tokens of each device, on that device."""
        layout = self.builder.values[value].experts
        return value if layout is None else self._exchange(value, maker, layout, back=True)

    def enter(self, value: ValueId, reader: Chunk) -> ValueId:
        """The part of *value*, which is on the devices of *reader*, that is for the experts of each of them."""
        layout = self.builder.values[value].experts
        return value if layout is None else self._exchange(value, reader, layout, back=False)

    def _exchange(
        self, value: ValueId, chunk: Chunk, layout: ExpertLayout, *, back: bool
    ) -> ValueId:
        key = (value, sharing(self.builder, chunk))
        if key not in self.made:
            if layout.kind is LayoutKind.COUNTS:
                self._count(value, chunk)
            else:
                self.made[key] = self._tokens(value, chunk, layout, back=back)
        return self.made[key]

    def _tokens(self, value: ValueId, chunk: Chunk, layout: ExpertLayout, *, back: bool) -> ValueId:
        inputs: tuple[ValueId, ...] = (value,)
        work: Work = AllToAll(layout.sizes, layout.expert_dim, layout.token_dim, back)
        if layout.kind is LayoutKind.ROWS:
            counts = self._counts_of(chunk)
            self._exchange(counts, chunk, self._layout(counts), back=False)
            inputs = (value, counts, self.counted[counts, sharing(self.builder, chunk)])
            work = AllToAllRows(back, layout.complete)
        info = self.builder.values[value]
        result = replace(info, spec=layout.other, experts=None)
        return self._add(work, chunk, inputs, [result])[0]

    def _count(self, counts: ValueId, chunk: Chunk) -> None:
        """Tell each other how many tokens come."""
        groups, info = sharing(self.builder, chunk), self.builder.values[counts]
        (experts,) = info.spec.shape
        assert isinstance(experts, int)
        size = len(groups[0])
        matrix = TensorSpec((size, experts // size), DType.INT64)
        results = [
            replace(info, spec=spec, experts=None) for spec in (matrix, self._layout(counts).other)
        ]
        by_sender, mine = self._add(AllToAllCounts(), chunk, (counts,), results)
        self.counted[counts, groups], self.made[counts, groups] = by_sender, mine

    def _layout(self, value: ValueId) -> ExpertLayout:
        layout = self.builder.values[value].experts
        assert layout is not None
        return layout

    def _counts_of(self, chunk: Chunk) -> ValueId:
        """The counts, on *chunk*'s devices, that say which rows are for which expert."""
        for value in self.core[chunk.id].inputs:
            layout = self.builder.values[value].experts
            if layout is not None and layout.kind is LayoutKind.COUNTS:
                return self.move(value, chunk)
        raise DirectiveError(
            f"{chunk.label!r} exchanges rows but reads no counts of tokens per expert"
        )

    def _add(
        self, work: Work, chunk: Chunk, inputs: tuple[ValueId, ...], results: list[Value]
    ) -> tuple[ValueId, ...]:
        assert chunk.sharding is not None
        stream = self.builder.dag.shardings[chunk.sharding].stream
        groups = sharing(self.builder, chunk)
        node = communication(work, chunk.tags, inputs, groups, stream, chunk.pass_)
        return self.builder.add(node, results)

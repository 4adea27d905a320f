"""All-to-all: what enters and leaves a sharded expert region is exchanged among the devices that
share the experts, and with those that have tokens for them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from piper.dtypes import DType
from piper.errors import DirectiveError, PlacementError
from piper.ids import DeviceId, NodeId, ValueId
from piper.ir.body import TensorSpec
from piper.ir.dag import Chunk, DeviceGroup, ExpertLayout, LayoutKind, Role, Value
from piper.ir.derive.builder import Builder, communication
from piper.ir.experts import expert_groups
from piper.ops.all_to_all import AllToAll, AllToAllCounts, AllToAllRows, Ends
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


@dataclass(frozen=True, slots=True)
class _Way:
    """How a value gets from one side of a region's border to the other: the groups that exchange,
    who does what in each, and the devices on which the values of those outside are.
    """

    groups: tuple[DeviceGroup, ...]
    ends: Ends | None
    outside: DeviceGroup


@dataclass
class Exchange:
    """Makes the all-to-all nodes, each once. *core* are the core chunks as they were; *move* brings
    a value that lives where a chunk runs to a group of devices, for a reader.

    If those outside are on the region's own devices, or on as many others, then what they have is
    on the region's devices before it is exchanged within the groups that share experts, and
    afterwards. Else each such group and those for which it works exchange directly.
    """

    builder: Builder
    core: Mapping[NodeId, Chunk]
    move: Callable[[ValueId, Chunk, DeviceGroup, Chunk], ValueId]
    made: dict[tuple[ValueId, tuple[DeviceGroup, ...]], ValueId] = field(default_factory=dict)
    counted: dict[tuple[ValueId, tuple[DeviceGroup, ...]], ValueId] = field(default_factory=dict)

    def leave(self, value: ValueId, maker: Chunk, reader: Chunk) -> ValueId:
        """What *maker*, in a sharded region, made of the tokens of each device of *reader*,
        there.
        """
        layout = self.builder.values[value].experts
        assert reader.devices is not None
        if layout is None:
            return self.move(value, maker, reader.devices, reader)
        way = self._way(maker, reader.devices, layout)
        back = self._exchange(value, maker, way, layout, back=True)
        return self.move(back, maker, reader.devices, reader) if way.ends is None else back

    def enter(self, value: ValueId, maker: Chunk, reader: Chunk) -> ValueId:
        """The part of *value* that is for the experts of each device of *reader*, in a sharded
        region.
        """
        layout = self.builder.values[value].experts
        assert maker.devices is not None
        assert reader.devices is not None
        if layout is None:
            return self.move(value, maker, reader.devices, reader)
        way = self._way(reader, maker.devices, layout)
        here = self.move(value, maker, way.outside, reader)
        return self._exchange(here, reader, way, layout, back=False)

    def _way(self, chunk: Chunk, outside: DeviceGroup, layout: ExpertLayout) -> _Way:
        """The way for a value of *layout*: rows of others are exchanged within the region's groups
        only if their counts can be there too.
        """
        way = find_way(self.builder, chunk, outside)
        if layout.kind is not LayoutKind.ROWS or way.ends is not None or outside == chunk.devices:
            return way
        _, maker = self._counts_of(chunk)
        assert maker.devices is not None
        if find_way(self.builder, chunk, maker.devices).ends is None:
            return way
        return find_way(self.builder, chunk, outside, direct=True)

    def _exchange(
        self, value: ValueId, chunk: Chunk, way: _Way, layout: ExpertLayout, *, back: bool
    ) -> ValueId:
        key = (value, way.groups)
        if key not in self.made:
            if layout.kind is LayoutKind.COUNTS:
                self._count(value, chunk, way)
            else:
                self.made[key] = self._tokens(value, chunk, way, layout, back=back)
        return self.made[key]

    def _tokens(
        self, value: ValueId, chunk: Chunk, way: _Way, layout: ExpertLayout, *, back: bool
    ) -> ValueId:
        inputs: tuple[ValueId, ...] = (value,)
        work: Work = AllToAll(
            ends=way.ends,
            back=back,
            sizes=layout.sizes,
            expert_dim=layout.expert_dim,
            token_dim=layout.token_dim,
        )
        if layout.kind is LayoutKind.ROWS:
            inputs = (value, *self._counts_for(chunk, way))
            work = AllToAllRows(ends=way.ends, back=back, complete=layout.complete)
        info = self.builder.values[value]
        result = replace(info, spec=layout.other, experts=None)
        return self._add(work, chunk, way, inputs, [result])[0]

    def _counts_for(self, chunk: Chunk, way: _Way) -> tuple[ValueId, ValueId]:
        """The counts of those outside, and what those inside were told of them."""
        counts, maker = self._counts_of(chunk)
        assert maker.devices is not None
        first = find_way(self.builder, chunk, maker.devices)
        mine = self.move(counts, maker, way.outside, chunk)
        told = self.move(counts, maker, first.outside, chunk)
        if (told, first.groups) not in self.counted:
            self._count(told, chunk, first)
        return mine, self.counted[told, first.groups]

    def _count(self, counts: ValueId, chunk: Chunk, way: _Way) -> None:
        """Tell how many tokens come."""
        info, layout = self.builder.values[counts], self._layout(counts)
        (experts,) = info.spec.shape
        (mine,) = layout.other.shape
        assert isinstance(experts, int)
        assert isinstance(mine, int)
        senders = len(way.groups[0]) if way.ends is None else len(way.ends.sources)
        matrix = TensorSpec((senders, mine), DType.INT64)
        results = [replace(info, spec=spec, experts=None) for spec in (matrix, layout.other)]
        work = AllToAllCounts(ends=way.ends)
        by_sender, total = self._add(work, chunk, way, (counts,), results)
        self.counted[counts, way.groups], self.made[counts, way.groups] = by_sender, total

    def _layout(self, value: ValueId) -> ExpertLayout:
        layout = self.builder.values[value].experts
        assert layout is not None
        return layout

    def _counts_of(self, chunk: Chunk) -> tuple[ValueId, Chunk]:
        """The counts that say which rows are for which expert, and what made them."""
        for value in self.core[chunk.id].inputs:
            layout = self.builder.values[value].experts
            if layout is not None and layout.kind is LayoutKind.COUNTS:
                return value, self.builder.makers[value]
        raise DirectiveError(
            f"{chunk.label!r} exchanges rows but reads no counts of tokens per expert"
        )

    def _add(
        self,
        work: Work,
        chunk: Chunk,
        way: _Way,
        inputs: tuple[ValueId, ...],
        results: list[Value],
    ) -> tuple[ValueId, ...]:
        assert chunk.sharding is not None
        stream = self.builder.dag.shardings[chunk.sharding].stream
        node = communication(work, chunk.tags, inputs, way.groups, stream, chunk.pass_)
        return self.builder.add(node, results)


def find_way(builder: Builder, chunk: Chunk, outside: DeviceGroup, *, direct: bool = False) -> _Way:
    """How *chunk*, in a sharded region, and chunks on *outside* exchange values; *direct*: by a way
    that moves nothing before or after.

    Raises :class:`PlacementError` where they cannot.
    """
    assert chunk.sharding is not None
    assert chunk.devices is not None
    sharding, lists = builder.dag.shardings[chunk.sharding], sharing(builder, chunk)
    sources = sharding.sources or len(lists[0])
    where = f"{chunk.label!r} on devices {list(chunk.devices)} and a neighbour on devices {list(outside)}"
    if len(outside) != sources * len(lists):
        raise PlacementError(
            f"{where}: when its experts were sharded (directive {sharding.directive}) the rest of the model had {sources * len(lists)} replicas, or was to "
            f"have, here it has {len(outside)}; put the Shard after the directives that place the rest"
        )
    alike = len(outside) == len(chunk.devices) and set(outside).isdisjoint(chunk.devices)
    if outside == chunk.devices or (alike and not direct):
        return _Way(lists, None, chunk.devices)
    dealt = _dealt(chunk.devices, lists, outside)
    merged = [_merged(mine, theirs, where) for mine, theirs in zip(lists, dealt, strict=True)]
    ends = {
        Ends(tuple(map(group.index, mine)), tuple(map(group.index, theirs)))
        for group, mine, theirs in zip(merged, lists, dealt, strict=True)
    }
    everyone = [d for group in merged for d in group]
    if len(set(everyone)) < len(everyone) or len(ends) > 1:
        pairs = ", ".join(f"{list(m)} with {list(t)}" for m, t in zip(lists, dealt, strict=True))
        raise PlacementError(
            f"{where}: the experts on {pairs} would exchange tokens, but these groups share devices, or overlap in different ways; give each list "
            "devices apart from the tokens of the others (or all of them the same number), or share the experts within one list"
        )
    return _Way(tuple(merged), ends.pop(), outside)


def _dealt(
    devices: DeviceGroup, lists: tuple[DeviceGroup, ...], outside: DeviceGroup
) -> tuple[DeviceGroup, ...]:
    """The members of *outside* that each of *lists*, which partition *devices*, works for: as many
    replicas as there are devices are those at the same places, others equal runs.
    """
    if len(devices) == len(outside):
        return tuple(tuple(outside[devices.index(d)] for d in group) for group in lists)
    run = len(outside) // len(lists)
    return tuple(outside[i : i + run] for i in range(0, len(outside), run))


def _merged(mine: DeviceGroup, theirs: DeviceGroup, where: str) -> DeviceGroup:
    """The devices of both, in an order in which both are in their own."""
    found: list[DeviceId] = []
    left, right = list(mine), list(theirs)
    while left or right:
        if left and left[0] not in right:
            found.append(left.pop(0))
        elif right and right[0] not in left:
            found.append(right.pop(0))
        elif left[0] == right[0]:
            found.append(left.pop(0))
            right.pop(0)
        else:
            raise PlacementError(
                f"{where}: devices {left[0]} and {right[0]} are in both groups, but in different order; list them in the same order"
            )
    return tuple(found)

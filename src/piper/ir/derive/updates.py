"""Sums, reductions and updates: from gradient contributions to new parameters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from piper.dtypes import DType
from piper.errors import DirectiveError, PlacementError
from piper.ids import ValueId
from piper.ir.dag import (
    Chunk,
    Clip,
    DeviceGroup,
    GradientUse,
    Level,
    Replication,
    Role,
    Tags,
    Value,
)
from piper.ir.derive.builder import (
    P2P_STREAM,
    REDUCE_STREAM,
    Builder,
    Group,
    communication,
    update_chunk,
)
from piper.ir.derive.divisors import find_divisors
from piper.ir.derive.norm import combine, measure
from piper.ir.derive.sharding import has_master, level_of, shard_groups, shard_value
from piper.ir.derive.transfers import transfer
from piper.ops.accumulate import Sum
from piper.ops.all_gather import Refresh
from piper.ops.all_reduce import AllReduce
from piper.ops.keep import AddKept, Keep
from piper.ops.reduce_scatter import ReduceScatter
from piper.ops.round_masters import RoundMasters
from piper.ops.update import Update

ByGroup = Mapping[Group, Sequence[ValueId]]


@dataclass(frozen=True)
class Use:
    """How a parameter is trained: who makes contributions (and how many), who else reads it, under
    which replication of each of these groups and which level, for which region. Parameters with
    equal uses may share buckets.
    """

    holders: tuple[Group, ...]
    readers: tuple[DeviceGroup, ...]
    region: Tags
    claims: tuple[int | None, ...]
    level: Level
    counts: tuple[int, ...]
    dtype: DType
    experts: tuple[DeviceGroup, ...] | None


def synchronise(builder: Builder) -> None:
    """Sum every parameter's contributions, reduce the sums, update each copy.

    Of a step that keeps its gradients nothing is reduced that only the updating step needs: each
    device keeps what it has summed itself.
    """
    made: dict[str, ByGroup] = {}
    alike: dict[Use, list[str]] = {}
    readers = _readers(builder)
    for parameter, values in builder.dag.contributions.items():
        if values:
            made[parameter] = by_group = _by_group(builder, values)
            others = {g: r for g, r in readers.get(parameter, {}).items() if g not in by_group}
            use = _use(builder, parameter, values, by_group, others)
            alike.setdefault(use, []).append(parameter)
    at_once = builder.dag.gradient_use is GradientUse.UPDATE  # else divided where they are summed
    divisors = find_divisors(
        builder,
        dict.fromkeys(
            g for use in alike for g in (*use.holders, *(use.readers if at_once else ()))
        ),
    )
    buckets: list[_Bucket] = []
    for use, names in alike.items():
        replication = _replication(builder, use.claims[0])
        limit = None if replication is None else replication.bucket_bytes
        buckets += [
            _Bucket(builder, use, bucket, made) for bucket in builder.cut(names, limit, use.dtype)
        ]
    clip = builder.dag.clip
    if builder.dag.gradient_use is GradientUse.KEEP:
        for bucket in buckets:
            bucket.keep(divisors)
    elif clip is None or not buckets:
        for bucket in buckets:
            for final in bucket.finals(divisors):
                bucket.update(final)
    else:
        _clipped(builder, clip, [(bucket, list(bucket.finals(divisors))) for bucket in buckets])


def _clipped(
    builder: Builder, clip: Clip, ready: Sequence[tuple["_Bucket", list["_Final"]]]
) -> None:
    """Measure the norm of all gradients before the first update."""
    parts: dict[ValueId, Group] = {}
    for bucket, (first, *_) in ready:
        owners = bucket.owners()
        region = bucket.use.region
        parts[measure(builder, clip, first.gradients, first.scales, region, owners)] = owners
    homes = [final.devices for _, finals in ready for final in finals]
    everyone = None if None in homes else tuple(sorted({d for home in homes for d in home or ()}))
    norm = combine(builder, clip, parts, everyone)
    needed = clip.max_norm is not None or builder.dag.loss_scaled
    for bucket, finals in ready:
        for final in finals:
            bucket.update(final, norm if needed else None)


def _by_group(builder: Builder, values: Sequence[ValueId]) -> ByGroup:
    by_group: dict[Group, list[ValueId]] = {}
    for value in values:
        by_group.setdefault(builder.makers[value].devices, []).append(value)
    return by_group


def _replication(builder: Builder, claim: int | None) -> Replication | None:
    return None if claim is None else builder.dag.replications[claim]


def _readers(builder: Builder) -> Mapping[str, Mapping[DeviceGroup, int | None]]:
    """The device groups that read each parameter, whole or gathered, and the replication of the
    first that does on each.
    """
    readers: dict[str, dict[DeviceGroup, int | None]] = {}
    for chunk in builder.core():
        for value in chunk.inputs:
            info = builder.values[value]
            if info.role in (Role.PARAMETER, Role.GATHERED) and chunk.devices is not None:
                readers.setdefault(info.name, {}).setdefault(chunk.devices, chunk.replication)
    return readers


def _use(
    builder: Builder,
    parameter: str,
    values: Sequence[ValueId],
    by_group: ByGroup,
    readers: Mapping[DeviceGroup, int | None],
) -> Use:
    makers = [builder.makers[v] for v in values]
    _check_claims(builder, parameter, makers)
    _refuse_overlap(parameter, [*by_group, *readers])
    claims = [builder.makers[vs[0]].replication for vs in by_group.values()]
    return Use(
        holders=tuple(by_group),
        readers=tuple(readers),
        region=builder.region(makers[0]),
        claims=(*claims, *readers.values()),
        level=level_of(builder, parameter, builder.replication(makers[0])),
        counts=tuple(len(vs) for vs in by_group.values()),
        dtype=builder.values[values[0]].spec.dtype,
        experts=builder.experts.get(parameter),
    )


def _check_claims(builder: Builder, parameter: str, makers: Sequence[Chunk]) -> None:
    """The users of a parameter are reduced together: what they were replicated by says the same but
    for the devices.
    """
    first, *others = dict.fromkeys(m.replication for m in makers)
    for other in others:
        differing = _differing(_replication(builder, first), _replication(builder, other))
        if differing:
            labels = sorted({m.label for m in makers})
            raise DirectiveError(
                f"parameter {parameter!r} is used by nodes that Replicate directives with different options claim "
                f"({', '.join(labels[:4])}): {differing}; one Replicate must claim all users of a shared parameter, or several with equal options"
            )


def _differing(one: Replication | None, other: Replication | None) -> str:
    """In what two replications differ that matters to a parameter of both; empty if they do not."""
    if one is None or other is None:
        return "some are claimed by none"
    words = {
        "what is sharded": (one.level, other.level),
        "bucket_size": (one.bucket_bytes, other.bucket_bytes),
        "reduce_stream": (one.reduce_stream, other.reduce_stream),
        "gather_stream": (one.gather_stream, other.gather_stream),
    }
    return ", ".join(
        f"{word} differs between directives {one.directive} and {other.directive}"
        for word, (mine, its) in words.items()
        if mine != its
    )


def _refuse_overlap(parameter: str, groups: Sequence[Group]) -> None:
    seen: dict[int, Group] = {}
    for group in groups:
        for device in group or ():
            if device in seen:
                raise PlacementError(
                    f"parameter {parameter!r} is used on device groups {list(seen[device] or ())} and {list(group or ())}, which share "
                    f"device {device} but are not the same; place its users on equal or disjoint groups"
                )
            seen[device] = group


@dataclass(frozen=True)
class _Final:
    """The gradients of a bucket, reduced, on *devices*, which hold the parameters or slices;
    *holders* are the groups of these devices. On each device there is one of *scales*, which the
    gradients are to be divided by, or there is none.
    """

    gradients: Sequence[ValueId]
    scales: Sequence[ValueId]
    devices: Group
    holders: Sequence[Group]


class _Bucket:
    """The gradient path of one bucket of parameters."""

    def __init__(
        self,
        builder: Builder,
        use: Use,
        names: Sequence[str],
        made: Mapping[str, ByGroup],
    ) -> None:
        self.builder, self.use, self.names, self.made = builder, use, names, made
        homes = (*use.holders, *use.readers)
        self.replications = {
            home: _replication(builder, claim)
            for home, claim in zip(homes, use.claims, strict=True)
        }
        self.replication = _replication(builder, use.claims[0])
        self.stream = REDUCE_STREAM if self.replication is None else self.replication.reduce_stream

    def keep(self, divisors: Mapping[Group, ValueId]) -> None:
        """Add what each group has summed to what its devices keep."""
        for group, sums in self._accumulated().items():
            self.builder.add(self._with_kept(Keep, group, sums, divisors), [])

    def finals(self, divisors: Mapping[Group, ValueId]) -> Iterator[_Final]:
        """Sum and reduce; the gradients on the groups that make contributions, then on each that
        only reads the parameters.
        """
        builder, use = self.builder, self.use
        sums = self._accumulated()
        if builder.dag.gradient_use is GradientUse.ADD:
            sums = {
                group: builder.add(
                    self._with_kept(AddKept, group, mine, divisors), self._accumulators()
                )
                for group, mine in sums.items()
            }
            divisors = {}
        if use.level is Level.NONE:
            gradients = self._reduce_whole(sums)
        elif use.level is Level.OPTIMIZER:
            gradients = self._reduce_slices(self._scatter_sums(sums))
        else:
            gradients = self._reduce_slices(sums)
        scales = dict.fromkeys(divisors[g] for g in use.holders if g in divisors)
        yield _Final(gradients, tuple(scales), self._devices(), use.holders)
        if use.holders[0] is None:
            return
        source = update_chunk(Sum(), use.region, (), use.holders[0])
        maker = builder.makers[self.made[self.names[0]][use.holders[0]][0]]
        stream = maker.p2p_stream or P2P_STREAM
        for group in use.readers:
            sent = [transfer(builder, g, source, group, "update", stream) for g in gradients]
            scale = (divisors[group],) if divisors else ()
            yield _Final(sent, scale, group, (group,))

    def owners(self) -> Group:
        """The devices that hold each gradient once: one copy, or the slices of one group, of each
        part of the experts.
        """
        first = self.use.holders[0]
        if first is None:
            return None
        if self.use.level is Level.NONE:
            return tuple(same[0] for same in self._copies(first))
        inner = self._groups(first)
        return tuple(
            d
            for same in self._copies(first)
            for d in next(group for group in inner if group[0] in same)
        )

    def update(self, final: _Final, norm: ValueId | None = None) -> None:
        """Update the copies or slices on the devices of *final*, clipped by *norm* if given;
        refresh whole parameters of which only slices, or master copies, were updated.
        """
        builder, use = self.builder, self.use
        mastered = use.level is Level.NONE and has_master(builder, self.names[0])
        sharded = use.level is not Level.NONE or mastered
        shards = [builder.source(v) for v in self._slices(Role.SHARD)] if sharded else []
        clip = builder.dag.clip
        update = Update(
            parameters=tuple(self.names),
            scaled=bool(final.scales),
            sharded=sharded,
            max_norm=None if norm is None or clip is None else clip.max_norm,
            only_finite=norm is not None and builder.dag.loss_scaled,
        )
        norms = () if norm is None else (norm,)
        inputs = (*final.gradients, *final.scales, *norms, *shards)
        node = update_chunk(update, use.region, inputs, final.devices)
        updated = builder.add(node, self._slices(Role.SHARD) if sharded else [])
        if use.level in (Level.OPTIMIZER, Level.GRADIENTS):
            self._refresh(updated, final.holders)
        if mastered:
            work = RoundMasters(tuple(self.names))
            builder.add(update_chunk(work, use.region, updated, final.devices), [])

    def _accumulated(self) -> dict[Group, tuple[ValueId, ...]]:
        """What each group of devices adds up by itself in a step: whole gradients, or where no
        device has these, slices of them.
        """
        if self._sums_slices:
            return self._sums(self._scattered(), self._accumulators())
        return self._sums(self.made, self._accumulators())

    def _with_kept(
        self,
        kind: type[Keep | AddKept],
        group: Group,
        sums: Sequence[ValueId],
        divisors: Mapping[Group, ValueId],
    ) -> Chunk:
        """A node of *kind* for the *sums* of *group*, to be added."""
        scale = (divisors[group],) if group in divisors else ()
        kept = [self.builder.source(replace(v, role=Role.KEPT)) for v in self._accumulators()]
        work = kind(tuple(self.names), scaled=bool(scale))
        return update_chunk(work, self.use.region, (*sums, *scale, *kept), group)

    @property
    def _sums_slices(self) -> bool:
        return self.use.level in (Level.GRADIENTS, Level.PARAMETERS)

    def _accumulators(self) -> list[Value]:
        """Values like those that a group adds up."""
        return self._slices(Role.TOTAL) if self._sums_slices else self._whole()

    def _whole(self) -> list[Value]:
        """Values like the whole gradients."""
        values = self.builder.values
        first = [next(iter(self.made[name].values()))[0] for name in self.names]
        return [replace(values[value], role=Role.TOTAL) for value in first]

    def _slices(self, role: Role) -> list[Value]:
        return [shard_value(self.builder, name, role) for name in self.names]

    def _devices(self) -> Group:
        if None in self.use.holders:
            return None
        return tuple(d for group in self.use.holders for d in group or ())

    def _sums(
        self, made: Mapping[str, ByGroup], totals: list[Value]
    ) -> dict[Group, tuple[ValueId, ...]]:
        """One sum per holder group."""
        return {
            group: self.builder.add(
                update_chunk(
                    Sum(), self.use.region, [v for n in self.names for v in made[n][group]], group
                ),
                totals,
            )
            for group in self.use.holders
        }

    def _reduce_whole(self, sums: Mapping[Group, tuple[ValueId, ...]]) -> Sequence[ValueId]:
        """Add the sums of all devices that hold the parameters, or the same experts of them."""
        values = tuple(v for group in sums.values() for v in group)
        copies = [self._copies(group) for group in self.use.holders if group is not None]
        members = tuple(
            tuple(d for group in same for d in group) for same in zip(*copies, strict=True)
        )
        if not members or len(members[0]) <= 1:
            return values
        node = communication(AllReduce(), self.use.region, values, members, self.stream)
        return self.builder.add(node, self._whole())

    def _copies(self, devices: DeviceGroup) -> tuple[DeviceGroup, ...]:
        """*devices* in groups of those that hold the same."""
        return self.builder.copies(self.names[0], devices)

    def _scatter_sums(
        self, sums: Mapping[Group, tuple[ValueId, ...]]
    ) -> dict[Group, tuple[ValueId, ...]]:
        """Reduce whole sums to slices, once per step."""
        return {
            group: self.builder.add(
                communication(
                    ReduceScatter(), self.use.region, values, self._groups(group), self.stream
                ),
                self._slices(Role.TOTAL),
            )
            for group, values in sums.items()
        }

    def _scattered(self) -> dict[str, dict[Group, list[ValueId]]]:
        """Reduce each chunk's contributions to slices as they are made."""
        builder = self.builder
        by_chunk: dict[int, list[tuple[str, ValueId]]] = {}
        for name in self.names:
            for values in self.made[name].values():
                for value in values:
                    by_chunk.setdefault(builder.makers[value].id, []).append((name, value))
        found: dict[str, dict[Group, list[ValueId]]] = {n: {} for n in self.names}
        for contributions in by_chunk.values():
            maker = builder.makers[contributions[0][1]]
            node = communication(
                ReduceScatter(),
                maker.tags,
                [value for _, value in contributions],
                self._groups(maker.devices),
                self.stream,
                maker.pass_,
            )
            results = [shard_value(builder, n, Role.CONTRIBUTION) for n, _ in contributions]
            outputs = builder.add(node, results)
            for (name, _), output in zip(contributions, outputs, strict=True):
                found[name].setdefault(maker.devices, []).append(output)
        return found

    def _groups(self, devices: Group) -> tuple[DeviceGroup, ...]:
        """The groups within which the holders or readers *devices* shard the parameters."""
        replication = self.replications[devices]
        assert devices is not None
        assert replication is not None
        return shard_groups(self.builder, self.names[0], replication, devices)

    def _reduce_slices(self, sums: Mapping[Group, tuple[ValueId, ...]]) -> Sequence[ValueId]:
        """Add the slices of all groups that shard the parameters, slice by slice."""
        values = tuple(v for group in sums.values() for v in group)
        groups: dict[int, list[DeviceGroup]] = {}  # by the part of the experts
        for group in self.use.holders:
            assert group is not None
            copies = self._copies(group)
            for inner in self._groups(group):
                part = next(i for i, same in enumerate(copies) if inner[0] in same)
                groups.setdefault(part, []).append(inner)
        if len(groups[0]) <= 1:
            return values
        members = tuple(slices for alike in groups.values() for slices in zip(*alike, strict=True))
        node = communication(AllReduce(), self.use.region, values, members, self.stream)
        return self.builder.add(node, self._slices(Role.TOTAL))

    def _refresh(self, updated: Sequence[ValueId], holders: Sequence[Group]) -> None:
        assert self.replication is not None
        groups = [inner for group in holders for inner in self._groups(group)]
        node = communication(
            Refresh(tuple(self.names)),
            self.use.region,
            updated,
            groups,
            self.replication.gather_stream,
        )
        self.builder.add(node, [])

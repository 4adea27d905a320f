"""Which parameters are sharded, within which device groups; which have a master copy."""

from piper.errors import DirectiveError, PlacementError
from piper.ir.body import TensorSpec
from piper.ir.dag import UNNUMBERED, Chunk, DeviceGroup, Level, Replication, Role, Value
from piper.ir.derive.builder import Builder, Group
from piper.ops.base import shard_length


def find_shards(builder: Builder) -> dict[str, tuple[DeviceGroup, ...]]:
    """For each sharded parameter the groups whose member i holds slice i; for each other one that
    has a master copy groups of one device, which holds all of it.

    Raises :class:`DirectiveError` if users of one parameter shard it differently.
    """
    found: dict[str, dict[DeviceGroup, Replication]] = {}
    users = users_of_parameters(builder)
    for name, chunks in users.items():
        for chunk in chunks:
            replication = builder.replication(chunk)
            if replication is None or chunk.devices is None or not replication.level:
                continue
            for group in shard_groups(builder, name, replication, chunk.devices):
                if len(group) > 1 and _sharded(builder, name, replication):
                    found.setdefault(name, {})[group] = replication
    shards = {name: tuple(groups) for name, groups in found.items()}
    for name, groups in shards.items():
        _check_equal(builder, name, groups, users[name])
    for name, chunks in users.items():
        if name not in shards and has_master(builder, name):
            holders = dict.fromkeys(d for chunk in chunks for d in chunk.participants)
            shards[name] = tuple((device,) for device in holders)
    return shards


def users_of_parameters(builder: Builder) -> dict[str, list[Chunk]]:
    """The core chunks that read each parameter."""
    users: dict[str, list[Chunk]] = {}
    for chunk in builder.core():
        for value in chunk.inputs:
            info = builder.values[value]
            if info.role is Role.PARAMETER:
                users.setdefault(info.name, []).append(chunk)
    return users


def has_master(builder: Builder, name: str) -> bool:
    """Whether the parameter is updated, and in another type than it is read in."""
    return builder.dag.has_master(name) and bool(builder.dag.contributions.get(name))


def _sharded(builder: Builder, name: str, replication: Replication) -> bool:
    """Frozen parameters are sharded only where whole ones are not kept."""
    return replication.level is Level.PARAMETERS or bool(builder.dag.contributions.get(name))


def shard_groups(
    builder: Builder, name: str, replication: Replication, devices: DeviceGroup
) -> tuple[DeviceGroup, ...]:
    """The groups within which parameter *name* of a node on *devices* is sharded: the replication's
    lists, of which each is cut into those devices that hold the same experts if experts are
    sharded.
    """
    copies = builder.copies(name, devices)
    key = (id(replication), devices, copies)
    if (known := builder.shard_groups.get(key)) is None:
        lists = _lists(replication, devices)
        known = builder.shard_groups[key] = tuple(
            mine
            for same in map(frozenset, copies)
            for inner in lists
            if (mine := tuple(d for d in inner if d in same))
        )
    return known


def _lists(replication: Replication, devices: DeviceGroup) -> tuple[DeviceGroup, ...]:
    if not replication.shard_groups:
        return (devices,)
    inside = tuple(g for g in replication.shard_groups if set(g) <= set(devices))
    if sorted(d for g in inside for d in g) != sorted(devices):
        raise PlacementError(
            f"the lists {[list(g) for g in replication.shard_groups]} of directive {replication.directive} do not partition "
            f"the group {list(devices)} that it claims"
        )
    return inside


def _check_equal(
    builder: Builder, name: str, groups: tuple[DeviceGroup, ...], users: list[Chunk]
) -> None:
    sizes = {len(g) for g in groups}
    homes: set[Group] = {u.devices for u in users}
    levels = {r.level for u in users if (r := builder.replication(u)) is not None}
    covered = {d for g in groups for d in g}
    holders = {d for home in homes for d in home or ()}
    apart = sum(len(g) for g in groups) == len(covered)
    if len(sizes) > 1 or len(levels) > 1 or covered != holders or None in homes or not apart:
        raise DirectiveError(
            f"parameter {name!r} is shared by nodes that shard it differently "
            f"({', '.join(sorted({u.label for u in users})[:4])}); one Replicate must claim all of them, on groups of equal size"
        )


def shard_spec(builder: Builder, name: str, role: Role) -> TensorSpec:
    """Spec of one slice of a parameter, or of its gradient, padding included. The only slice is the
    whole tensor, in its own shape.
    """
    dag = builder.dag
    spec = builder.held_spec(name)
    if role is Role.SHARD:
        dtype = dag.master_dtype(name)
    else:
        dtype = builder.values[dag.contributions[name][0]].spec.dtype
    count = shard_count(builder, name)
    if count == 1:
        return TensorSpec(spec.shape, dtype)
    shape = tuple(int(str(d)) for d in spec.shape)
    return TensorSpec((shard_length(shape, count),), dtype)


def shard_count(builder: Builder, name: str) -> int:
    """Slices of a parameter."""
    groups = builder.shards.get(name)
    return len(groups[0]) if groups else 1


def shard_value(builder: Builder, name: str, role: Role = Role.SHARD) -> Value:
    """A value that holds a slice of the parameter, or of its gradient."""
    return Value(UNNUMBERED, shard_spec(builder, name, role), role, name)


def level_of(builder: Builder, name: str, replication: Replication | None) -> Level:
    """What is sharded of a parameter."""
    if replication is None or shard_count(builder, name) == 1:
        return Level.NONE
    return replication.level

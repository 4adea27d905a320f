"""Devices that do the same: what lets thousands of replicas be planned, verified and simulated once.

A renaming of replicas (a permutation of their numbers, applied to all device groups alike) that maps every node's groups onto
themselves is a symmetry of the training DAG. The planner treats devices alike but for where they stand in a node's groups, so a
symmetry maps the program of each device onto that of another, with devices, communicators, replicas and slices renamed. Devices that
symmetries map onto each other have one *role*. The program of one device stands for those of all: there is an execution in
which all devices of a role go in step, and since completion never disables anything (see :mod:`piper.verify.deadlock`), it shows
what every execution comes to.

Tried are exchanges of two replicas, which plain replication allows, and, where groups shard within smaller groups, shifts of the grid
whose rows these are.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from piper.ids import DeviceId
from piper.ir.dag import Chunk, Comm, Dag, DeviceGroup
from piper.ops.broadcast import Broadcast
from piper.ops.p2p import Transfer

Stage: TypeAlias = int
"""A device group of core chunks; all have one replica per member."""

Spot: TypeAlias = tuple[Stage, int]
"""A device: its stage and its replica."""

Renaming: TypeAlias = Sequence[int]
"""The new number of each replica."""

Image: TypeAlias = tuple[Spot | None, frozenset[Spot]]
"""A group of a node: the member that its place sets apart from the others (a sender, a root), and all members."""


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of a DAG's devices, by first device, which is of the same replicas in every stage.

    ``renamings`` has, for each replica that others stand for, the symmetry that maps the standing one onto it; ``spots`` and ``stages`` say
    where devices are.
    """

    roles: tuple[tuple[DeviceId, ...], ...]
    stages: tuple[DeviceGroup, ...] = ()
    spots: Mapping[DeviceId, Spot] = field(default_factory=dict)
    stands_for: Mapping[int, int] = field(default_factory=dict)
    renamings: Mapping[int, Renaming] = field(default_factory=dict)

    @property
    def folded(self) -> bool:
        """Whether some device stands for another."""
        return bool(self.renamings)

    def first(self, device: DeviceId) -> DeviceId:
        """The device that stands for *device*."""
        if device not in self.spots:
            return device
        stage, replica = self.spots[device]
        return self.stages[stage][self.stands_for[replica]]

    def moved(self, device: DeviceId, to: DeviceId) -> DeviceId:
        """What *device* becomes under the symmetry that maps ``first(to)`` onto *to*."""
        _, replica = self.spots[to]
        if (renaming := self.renamings.get(replica)) is None:
            return device
        stage, mine = self.spots[device]
        return self.stages[stage][renaming[mine]]


def find_roles(dag: Dag, num_devices: int) -> Roles:
    """The roles of *dag*'s devices; all of one device each where nothing is alike."""
    alone = Roles(tuple((DeviceId(d),) for d in range(num_devices)))
    stages = tuple(dict.fromkeys(c.devices for c in dag.chunks() if not c.derived and c.devices))
    spots: dict[DeviceId, Spot] = {}
    for number, group in enumerate(stages):
        for replica, device in enumerate(group):
            if device in spots:
                return alone  # two groups share a device without being equal
            spots[device] = (number, replica)
    count = dag.num_replicas
    if count < 2 or len(spots) < num_devices or any(len(g) != count for g in stages):
        return alone
    structures, widths = _structures(dag, spots)
    stands_for: dict[int, int] = {}
    renamings: dict[int, Renaming] = {}
    for replica in range(count):
        found = (
            (first, renaming)
            for first in dict.fromkeys(stands_for.values())
            for renaming in _candidates(count, first, replica, widths)
            if _is_symmetry(renaming, structures)
        )
        stands_for[replica], renaming = next(found, (replica, ()))
        if renaming:
            renamings[replica] = renaming
    classes: dict[int, list[int]] = {}
    for replica, first in stands_for.items():
        classes.setdefault(first, []).append(replica)
    roles = sorted(tuple(group[r] for r in mine) for group in stages for mine in classes.values())
    return Roles(tuple(roles), stages, spots, stands_for, renamings)


def _structures(
    dag: Dag, spots: Mapping[DeviceId, Spot]
) -> tuple[list[frozenset[Image]], list[int]]:
    """The distinct sets of groups that a symmetry must preserve, and the sizes of groups that the replicas divide into."""
    found: dict[tuple[bool, tuple[DeviceGroup, ...]], None] = {}
    for node in dag.nodes.values():
        if isinstance(node, Comm):
            found[isinstance(node.work, (Transfer, Broadcast)), node.groups] = None
        elif isinstance(node, Chunk):
            found[False, (node.participants,)] = None
    for groups in dag.shards.values():
        found[False, groups] = None
    if dag.grad_norm is not None:
        found[False, ((dag.grad_norm[1],),)] = None
    structures = dict.fromkeys(
        frozenset(
            (spots[g[0]] if marked else None, frozenset(spots[d] for d in g)) for g in groups if g
        )
        for marked, groups in found
    )
    sizes = {len(g) for _, groups in found for g in groups}
    count = dag.num_replicas
    return list(structures), sorted(s for s in sizes if 1 < s < count and count % s == 0)


def _candidates(count: int, one: int, other: int, widths: Iterable[int]) -> Iterator[Renaming]:
    """Renamings that map replica *one* onto *other*: their exchange; shifts of grids with rows of *widths*."""
    exchange = list(range(count))
    exchange[one], exchange[other] = other, one
    yield exchange
    for width in widths:
        down, right = other // width - one // width, other % width - one % width
        yield [(r // width + down) * width % count + (r + right) % width for r in range(count)]


def _is_symmetry(renaming: Renaming, structures: Iterable[frozenset[Image]]) -> bool:
    moved = {replica for replica, new in enumerate(renaming) if replica != new}
    return all(_preserves(groups, renaming, moved) for groups in structures)


def _preserves(groups: frozenset[Image], renaming: Renaming, moved: set[int]) -> bool:
    def image(spot: Spot) -> Spot:
        return spot[0], renaming[spot[1]]

    for first, members in groups:
        # Most groups are large and map onto themselves: only spots that move can leave one.
        if all(image(spot) in members for spot in members if spot[1] in moved) and (
            first is None or first[1] not in moved
        ):
            continue
        mapped = (None if first is None else image(first), frozenset(map(image, members)))
        if mapped not in groups:
            return False
    return True

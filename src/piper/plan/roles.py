"""Devices that do the same: what lets thousands of replicas be planned, verified and simulated
once.

A renaming of replicas (a permutation of their numbers, applied to all device groups alike) that
maps every node's groups onto themselves is a symmetry of the training DAG. The planner treats
devices alike but for where they stand in a node's groups, so a symmetry maps the program of each
device onto that of another, with devices, communicators, replicas and slices renamed. Devices that
symmetries map onto each other have one *role*. The program of one device stands for those of all:
there is an execution in which all devices of a role go in step, and since completion never disables
anything (see :mod:`piper.verify.deadlock`), it shows what every execution comes to.

Tried are exchanges of two replicas, which plain replication allows, and, where groups are rows or
columns of a grid of the replicas (slices or experts shared within smaller groups), exchanges of two
rows, and of two columns.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
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
"""A group of a node: the member that its place sets apart from the others (a sender, a root), and
all members.
"""


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of a DAG's devices, by first device, which is of the same replicas in every stage.

    ``renamings`` has, for each replica that others stand for, the symmetry that maps the standing
    one onto it; ``spots`` and ``stages`` say where devices are.
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
    symmetries = _Symmetries(count, structures, widths)
    stands_for: dict[int, int] = {}
    renamings: dict[int, Renaming] = {}
    for replica in range(count):
        stands_for[replica] = replica
        for first in dict.fromkeys(stands_for.values()):
            renaming = None if first == replica else symmetries.mapping(first, replica)
            if renaming is not None:
                stands_for[replica], renamings[replica] = first, renaming
                break
    classes: dict[int, list[int]] = {}
    for replica, first in stands_for.items():
        classes.setdefault(first, []).append(replica)
    roles = sorted(tuple(group[r] for r in mine) for group in stages for mine in classes.values())
    return Roles(tuple(roles), stages, spots, stands_for, renamings)


def _structures(dag: Dag, spots: Mapping[DeviceId, Spot]) -> tuple[list["_Structure"], list[int]]:
    """The distinct sets of groups that a symmetry must preserve, and the sizes of groups that the
    replicas divide into.
    """
    found: dict[tuple[bool, tuple[DeviceGroup, ...]], None] = {}
    for node in dag.nodes.values():
        if isinstance(node, Comm):
            found[isinstance(node.work, (Transfer, Broadcast)), node.groups] = None
        elif isinstance(node, Chunk):
            found[False, (node.participants,)] = None
    for groups in (*dag.shards.values(), *dag.expert_groups.values()):
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
    widths = sorted(s for s in sizes if 1 < s < count and count % s == 0)
    return list(map(_Structure, structures)), widths


class _Structure:
    """A set of groups, and which of them each replica is in."""

    def __init__(self, groups: frozenset[Image]) -> None:
        self._groups = groups
        self._of_replica: dict[int, list[tuple[Image, Spot]]] = {}
        for group in groups:
            for spot in group[1]:
                self._of_replica.setdefault(spot[1], []).append((group, spot))

    def preserved(self, renaming: Renaming, moved: Sequence[int]) -> bool:
        """Whether *renaming*, which changes the replicas *moved*, maps every group onto one."""
        leaving: dict[Image, None] = {}
        for replica in moved:
            new = renaming[replica]
            for group, spot in self._of_replica.get(replica, ()):
                first, members = group
                # Most groups are large and map onto themselves.
                if (spot[0], new) not in members or first == spot:
                    leaving[group] = None
        return all(self._image(group, renaming) in self._groups for group in leaving)

    @staticmethod
    def _image(group: Image, renaming: Renaming) -> Image:
        first, members = group
        return (
            None if first is None else (first[0], renaming[first[1]]),
            frozenset((stage, renaming[replica]) for stage, replica in members),
        )


class _Symmetries:
    """The symmetries of *count* replicas, among those that are tried; *widths* are the sizes of
    smaller groups.
    """

    def __init__(self, count: int, structures: Sequence[_Structure], widths: Sequence[int]) -> None:
        self._count, self._structures = count, structures
        self._grids = list(_grids(count, widths))
        self._known: dict[tuple[_Digit, int, int], bool] = {}

    def mapping(self, one: int, other: int) -> Renaming | None:
        """A symmetry that maps replica *one* onto *other*: their exchange, or of the rows, columns
        and so on of a grid in which they differ.
        """
        exchange = list(range(self._count))
        exchange[one], exchange[other] = other, one
        if self._is_symmetry(exchange):
            return exchange
        for grid in self._grids:
            swaps = [
                (digit, a, b) for digit in grid if (a := digit.of(one)) != (b := digit.of(other))
            ]
            if all(self._may_swap(*swap) for swap in swaps):
                renaming = list(range(self._count))
                for digit, a, b in swaps:
                    renaming = [digit.swapped(replica, a, b) for replica in renaming]
                return renaming
        return None

    def _may_swap(self, digit: "_Digit", a: int, b: int) -> bool:
        key = (digit, min(a, b), max(a, b))
        if (known := self._known.get(key)) is None:
            renaming = [digit.swapped(replica, a, b) for replica in range(self._count)]
            known = self._known[key] = self._is_symmetry(renaming)
        return known

    def _is_symmetry(self, renaming: Renaming) -> bool:
        moved = [replica for replica, new in enumerate(renaming) if replica != new]
        return all(groups.preserved(renaming, moved) for groups in self._structures)


@dataclass(frozen=True, slots=True)
class _Digit:
    """A digit of a replica's number, of *base* values, worth *weight*: its column or row in a
    grid.
    """

    weight: int
    base: int

    def of(self, replica: int) -> int:
        """The digit of *replica*."""
        return replica // self.weight % self.base

    def swapped(self, replica: int, a: int, b: int) -> int:
        """*replica* with *a* in place of *b* there, and *b* in place of *a*."""
        mine = self.of(replica)
        return replica + {a: b - a, b: a - b}.get(mine, 0) * self.weight


def _grids(count: int, widths: Sequence[int]) -> Iterator[tuple[_Digit, ...]]:
    """How numbers below *count* are written as digits: as rows of each of *widths*, and of all at
    once that divide each other.
    """
    nested: list[int] = []
    for width in widths:
        yield _digits(count, (width,))
        if not nested or width % nested[-1] == 0:
            nested.append(width)
    if len(nested) > 1:
        yield _digits(count, nested)


def _digits(count: int, weights: Sequence[int]) -> tuple[_Digit, ...]:
    bounds = [1, *weights, count]
    return tuple(_Digit(low, high // low) for low, high in pairwise(bounds))

"""Placements: which device group each stage of a pipeline is on.

A *group* is a list of devices, all of them replicas or shards of one another; a pipeline of R
groups has R ranks. Groups have equally many devices and share none: a group that holds several
stages appears once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from piper.boundary import public
from piper.directives.place import Place
from piper.errors import PlacementError

Groups: TypeAlias = Sequence[Sequence[int]]


@public
def chain(groups: Groups, *, stage_tag: str = "PP") -> list[Place]:
    """Stage s on group s: R stages. For GPipe and 1F1B.

    Raises :class:`~piper.errors.PlacementError` for groups of unequal size or a device that is
    named twice.
    """
    return looped(groups, 1, stage_tag=stage_tag)


@public
def looped(groups: Groups, num_virtual_stages: int, *, stage_tag: str = "PP") -> list[Place]:
    """Stage s on group s mod R: V·R stages, ``num_virtual_stages`` = V of them *per group*.

    For interleaved 1F1B and looped BFS. Raises as :func:`chain`, and for ``num_virtual_stages``
    below 1.
    """
    check_groups(groups)
    _require_integer("num_virtual_stages", num_virtual_stages)
    if num_virtual_stages < 1:
        raise PlacementError(
            f"num_virtual_stages (stages per group) must be at least 1, found {num_virtual_stages}"
        )
    return [
        Place({stage_tag: stage}, devices=list(groups[stage % len(groups)]))
        for stage in range(num_virtual_stages * len(groups))
    ]


@public
def v_shape(groups: Groups, *, stage_tag: str = "PP") -> list[Place]:
    """Stages s and 2·R − 1 − s on group s: 2·R stages that go down the groups and come back up.

    The first and the last stage share a group, and so do the two stages in the middle. For ZB-V and
    DualPipeV. Raises as :func:`chain`.
    """
    check_groups(groups)
    there_and_back = [*groups, *reversed(groups)]
    return [
        Place({stage_tag: stage}, devices=list(group)) for stage, group in enumerate(there_and_back)
    ]


@public
def two_way(
    groups: Groups, num_microbatches: int, *, stage_tag: str = "PP", microbatch_tag: str = "MB"
) -> list[Place]:
    """The first half of the microbatches flows from group 0 to R − 1, the second half back.

    R stages. For microbatches below M/2, stage s is on group s; for the others it is on group
    R − 1 − s. A group thus holds two stages, and each stage's parameters live on two groups. For
    DualPipe. Apply it after the ``Split`` that makes the microbatches.

    Raises as :func:`chain`, and unless ``num_microbatches`` is even and at least 2.
    """
    check_groups(groups)
    _require_integer("num_microbatches", num_microbatches)
    if num_microbatches < 2 or num_microbatches % 2:
        legal = sorted({max(2, num_microbatches - 1), max(2, num_microbatches + 1)})
        raise PlacementError(
            "two_way: half of the microbatches flows each way, so num_microbatches must be even "
            f"and at least 2; found {num_microbatches}; nearest: {' or '.join(map(str, legal))}"
        )
    half = num_microbatches // 2
    down, up = list(range(half)), list(range(half, num_microbatches))
    return [
        Place({stage_tag: stage, microbatch_tag: microbatches}, devices=list(group))
        for microbatches, direction in ((down, list(groups)), (up, list(reversed(groups))))
        for stage, group in enumerate(direction)
    ]


def _require_integer(name: str, count: object) -> None:
    if not isinstance(count, int) or isinstance(count, bool):
        raise PlacementError(f"{name} is an integer, found {type(count).__name__}: {count!r}")


def check_groups(groups: Groups) -> None:
    """Raise :class:`~piper.errors.PlacementError` for groups that cannot be a pipeline's ranks."""
    if not isinstance(groups, Sequence) or any(
        not isinstance(group, Sequence) or isinstance(group, str) for group in groups
    ):
        raise PlacementError(
            f"groups is a list with a list of devices for each rank, such as [[0], [1]], found {groups!r}"
        )
    if not groups:
        raise PlacementError("expected at least one device group, found none")
    size = len(groups[0])
    owner: dict[int, int] = {}
    for number, group in enumerate(groups):
        if not group:
            raise PlacementError(f"group {number} has no device; give each group at least one")
        if len(group) != size:
            raise PlacementError(
                f"groups must have equally many devices (one per replica): group 0 has {size}, "
                f"group {number} has {len(group)}: {[list(g) for g in groups]}"
            )
        for device in group:
            if not isinstance(device, int) or isinstance(device, bool):
                raise PlacementError(
                    f"device {device!r} in group {number}: devices are numbers, counted from 0 over all machines, found "
                    f"{type(device).__name__} (which processor each is, is the backend's matter)"
                )
            if device < 0:
                raise PlacementError(f"device {device} in group {number}: devices count from 0")
            if device in owner:
                raise PlacementError(
                    f"device {device} is in group {owner[device]} and in group {number}; name it "
                    "once (`looped`, `v_shape` and `two_way` put several stages on one group)"
                    if owner[device] != number
                    else f"device {device} is named twice in group {number}; name it once"
                )
            owner[device] = number


@dataclass(frozen=True, slots=True)
class Placement:
    """How a schedule wants its stages placed.

    ``place(groups, num_virtual_stages, num_microbatches, stage_tag, microbatch_tag)`` puts them
    there. Each rank has ``stages_per_rank`` stages, or any number if ``virtual_stages``.
    ``by_microbatch``: where a stage is depends on the microbatch, so that the placement must come
    after the ``Split``.
    """

    place: Callable[[Groups, int, int, str, str], list[Place]]
    stages_per_rank: int = 1
    virtual_stages: bool = False
    by_microbatch: bool = False


CHAIN = Placement(lambda groups, _virtual, _count, stage, _tag: chain(groups, stage_tag=stage))
LOOPED = Placement(
    lambda groups, virtual, _count, stage, _tag: looped(groups, virtual, stage_tag=stage),
    virtual_stages=True,
)
V_SHAPE = Placement(
    lambda groups, _virtual, _count, stage, _tag: v_shape(groups, stage_tag=stage),
    stages_per_rank=2,
)
TWO_WAY = Placement(
    lambda groups, _virtual, count, stage, tag: two_way(
        groups, count, stage_tag=stage, microbatch_tag=tag
    ),
    by_microbatch=True,
)

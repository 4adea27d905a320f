"""Whole strategies for the common cases, so that nobody repeats stage and microbatch counts."""

from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from piper.boundary import public
from piper.directives.base import Directive
from piper.directives.replicate import Replicate
from piper.directives.split import Split
from piper.errors import DirectiveError, ScheduleError
from piper.schedules import SCHEDULES


@public
def pipeline(
    schedule: str,
    groups: Sequence[Sequence[int]],
    num_microbatches: int,
    *,
    num_virtual_stages: int | None = None,
    zero: int = 0,
    bucket_size: float | None = None,
    gather_stream: str | None = None,
    replicated_buffers: Literal["first", "mean", "sum"] | None = None,
    stage_tag: str = "PP",
    microbatch_tag: str = "MB",
) -> list[Directive]:
    """Pipeline parallelism, with data parallelism where the groups have more than one device.

    ``groups`` lists the pipeline's ranks; each is the list of devices that hold that rank's stages,
    one per replica. The model must have ``len(groups) * num_virtual_stages`` regions tagged
    ``stage_tag``, numbered from 0; ``num_virtual_stages`` counts stages *per group*: any number for
    the schedules with virtual stages (``None``: 1), 2 for those in a V (``zbv``, ``dualpipev``), 1
    for the others. Each replica runs ``num_microbatches`` microbatches per
    step. ``zero`` is what each group shards over its replicas: nothing (0), optimizer state (1),
    gradients too (2), parameters too (3). ``bucket_size`` (MiB), ``gather_stream`` (``None``: a
    stream of its own) and ``replicated_buffers`` are those of
    :class:`~piper.directives.replicate.Replicate`. All these say nothing when there is one replica.

    ``pipeline("1f1b", [[0, 1], [2, 3]], 8)`` is::

        [Place({"PP": 0}, devices=[0, 1]), Place({"PP": 1}, devices=[2, 3]),
         Replicate({}, devices="placed"),
         Split({}, dim_name="MB", num_microbatches=8),
         *one_f_one_b(num_stages=2, num_microbatches=8)]

    Where the placement depends on the microbatch (``dualpipe``), the ``Split`` comes first.

    Raises :class:`~piper.errors.ScheduleError` for an unknown schedule, a count below 1, virtual
    stages that the schedule does not have, or tags that clash;
    :class:`~piper.errors.PlacementError` for groups of unequal size or a device named twice;
    :class:`~piper.errors.DirectiveError` for a ``bucket_size`` that is not positive, or a ``zero``
    that is none of 0 to 3.
    """
    chosen = SCHEDULES[schedule]
    virtual_stages = stages_per_group(schedule, num_virtual_stages)
    if bucket_size is not None and bucket_size <= 0:
        raise DirectiveError(f"bucket_size is in MiB and positive, found {bucket_size}")
    if zero not in range(4):
        raise DirectiveError(
            f"zero is 0 (nothing sharded), 1 (optimizer state), 2 (gradients too) or 3 (parameters "
            f"too), found {zero!r}"
        )
    place = chosen.place(groups, virtual_stages, num_microbatches, stage_tag, microbatch_tag)
    order = chosen.order(len(groups), virtual_stages, num_microbatches, stage_tag, microbatch_tag)
    replicate = Replicate(
        {},
        shard_optimizer=zero == 1,
        shard_grads=zero == 2,
        shard_params=zero == 3,
        bucket_size=bucket_size,
        replicated_buffers=replicated_buffers,
    )
    if gather_stream is not None:
        replicate = replace(replicate, gather_stream=gather_stream)
    split = Split({}, dim_name=microbatch_tag, num_microbatches=num_microbatches)
    replicates = [replicate] if len(groups[0]) > 1 else []
    if chosen.placement.by_microbatch:
        return [split, *place, *replicates, *order]
    return [*place, *replicates, split, *order]


def stages_per_group(schedule: str, num_virtual_stages: int | None = None) -> int:
    """How many stages each group holds under *schedule*, where the user asks for
    *num_virtual_stages*.

    Raises :class:`~piper.errors.ScheduleError` for a number that the schedule does not have.
    """
    chosen = SCHEDULES[schedule]
    if num_virtual_stages in (None, chosen.placement.stages_per_rank):
        return chosen.placement.stages_per_rank
    if not chosen.placement.virtual_stages:
        number = {1: "one stage", 2: "two stages"}[chosen.placement.stages_per_rank]
        with_virtual = ", ".join(
            sorted(s.name for s in SCHEDULES.values() if s.placement.virtual_stages)
        )
        raise ScheduleError(
            f"schedule {schedule!r} has {number} per group, found "
            f"num_virtual_stages={num_virtual_stages}; leave it at {chosen.placement.stages_per_rank} or "
            f"choose one of: {with_virtual}"
        )
    assert num_virtual_stages is not None
    return num_virtual_stages

"""Looped BFS: several stages per rank, earlier stages first."""

from piper.directives.order import Order
from piper.schedules.base import (
    Step,
    backward,
    forward,
    order_ranks,
    require_positive,
    schedule,
)
from piper.schedules.placements import LOOPED


@schedule("looped_bfs", LOOPED)
def looped_bfs(
    num_ranks: int,
    num_virtual_stages: int,
    num_microbatches: int,
    *,
    stage_tag: str = "PP",
    microbatch_tag: str = "MB",
) -> list[Order]:
    """GPipe over V·R stages on R ranks, stage s on rank s mod R; earlier stages go first.

    ``num_virtual_stages`` is V, the number of stages *per rank*.

    A rank runs its first stage on all microbatches, then its second stage on all, and so on; then
    the backwards from its last stage to its first, last microbatch first. A stage's parameters are
    thus used in one stretch per pass: with ZeRO-3 they are gathered at most twice per step,
    whatever M is.

    With M ≥ R microbatches of equal cost the bubble is (R − 1) / (V·M + R − 1) of the time; with
    M < R the step takes V·R + M − 1 forwards and backwards of one stage. Each rank keeps all V·M
    activations. Any M ≥ 1 is legal.

    Source: Lamy-Poirier, *Breadth-First Pipeline Parallelism*, 2023 (arXiv 2211.05953).

    Raises :class:`~piper.errors.ScheduleError` for a count below 1.
    """
    require_positive(
        "looped_bfs",
        num_ranks=num_ranks,
        num_virtual_stages=num_virtual_stages,
        num_microbatches=num_microbatches,
    )
    ranks = (
        _rank(range(rank, num_ranks * num_virtual_stages, num_ranks), range(num_microbatches))
        for rank in range(num_ranks)
    )
    return order_ranks(ranks, stage_tag, microbatch_tag)


def _rank(stages: range, microbatches: range) -> list[Step]:
    forwards = [forward(stage, m) for stage in stages for m in microbatches]
    backwards = [backward(stage, m) for stage in reversed(stages) for m in reversed(microbatches)]
    return forwards + backwards

"""Interleaved 1F1B: several stages per rank, earlier microbatches first."""

from collections.abc import Iterator

from piper.directives.order import Order
from piper.schedules.base import (
    Step,
    backward,
    forward,
    order_ranks,
    require_positive,
    schedule,
    warm_up_then_alternate,
)
from piper.schedules.placements import LOOPED


@schedule("interleaved_1f1b", LOOPED)
def interleaved_one_f_one_b(
    num_ranks: int,
    num_virtual_stages: int,
    num_microbatches: int,
    *,
    stage_tag: str = "PP",
    microbatch_tag: str = "MB",
) -> list[Order]:
    """1F1B over V·R stages on R ranks, stage s on rank s mod R; earlier microbatches go first.

    ``num_virtual_stages`` is V, the number of stages *per rank*.

    Microbatches go in rounds. In a round, a rank runs its first stage on all microbatches of the
    round, then its second stage, and so on; backwards likewise from the last stage. Forwards run
    ahead of backwards by V − 1 stages of one round and by two for each rank between this one and
    the last. Rounds have R microbatches, more where R does not divide M (the larger rounds first:
    then no later round outruns the warm-up), so any M ≥ 1 is legal; if M < R there is one
    round of M.

    With M ≥ R microbatches of equal cost the bubble is (R − 1) / (V·M + R − 1) of the time, V times
    smaller than 1F1B's; with M < R the step takes V·R + M − 1 forwards and backwards of one stage.
    Rank r keeps at most min(V·M, (V − 1)·K + 2·(R − 1 − r) + 1) activations of one stage, K = the
    largest round.

    Source: Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM*, 2021 (arXiv 2104.04473), which asks for M a multiple of R; longer rounds of equal
    size are PyTorch's.

    Raises :class:`~piper.errors.ScheduleError` for a count below 1.
    """
    require_positive(
        "interleaved_1f1b",
        num_ranks=num_ranks,
        num_virtual_stages=num_virtual_stages,
        num_microbatches=num_microbatches,
    )
    rounds = list(rounds_of(num_ranks, num_microbatches))
    ranks = (
        _rank(range(rank, num_ranks * num_virtual_stages, num_ranks), num_ranks - 1 - rank, rounds)
        for rank in range(num_ranks)
    )
    return order_ranks(ranks, stage_tag, microbatch_tag)


def rounds_of(num_ranks: int, num_microbatches: int) -> Iterator[range]:
    """Rounds of at least *num_ranks* microbatches (one round of fewer if need be), larger first."""
    count = max(1, num_microbatches // num_ranks)
    size, larger = divmod(num_microbatches, count)
    start = 0
    for number in range(count):
        stop = start + size + (number < larger)
        yield range(start, stop)
        start = stop


def _rank(stages: range, ranks_to_last: int, rounds: list[range]) -> list[Step]:
    return warm_up_then_alternate(
        [forward(stage, m) for round_ in rounds for stage in stages for m in round_],
        [backward(stage, m) for round_ in rounds for stage in reversed(stages) for m in round_],
        warmup=(len(stages) - 1) * len(rounds[0]) + 2 * ranks_to_last,
    )

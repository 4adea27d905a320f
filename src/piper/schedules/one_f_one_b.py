"""1F1B: one forward, one backward, as early as the last stage allows."""

from piper.directives.order import Order
from piper.schedules.base import (
    backward,
    forward,
    order_ranks,
    require_positive,
    schedule,
    warm_up_then_alternate,
)
from piper.schedules.placements import CHAIN


@schedule("1f1b", CHAIN)
def one_f_one_b(
    num_stages: int, num_microbatches: int, *, stage_tag: str = "PP", microbatch_tag: str = "MB"
) -> list[Order]:
    """Stage s of P: P − 1 − s forwards, then one of each in turn, then the remaining backwards.

    With M microbatches of equal cost the bubble is (P − 1) / (M + P − 1) of the time, as GPipe's,
    but stage s keeps the activations of at most min(M, P − s) microbatches. Stage s is meant for
    rank s (:func:`~piper.schedules.placements.chain`); any M ≥ 1 is legal, also M < P (then the
    first stages run all their forwards first).

    Source: Narayanan et al., *PipeDream*, 2019 (arXiv 1806.03377), with a flush at the end of the
    step as in Narayanan et al., *Memory-Efficient Pipeline-Parallel DNN Training*, 2021
    (arXiv 2006.09503).

    Raises :class:`~piper.errors.ScheduleError` for a count below 1.
    """
    require_positive("1f1b", num_stages=num_stages, num_microbatches=num_microbatches)
    microbatches = range(num_microbatches)
    ranks = (
        warm_up_then_alternate(
            [forward(stage, m) for m in microbatches],
            [backward(stage, m) for m in microbatches],
            warmup=num_stages - 1 - stage,
        )
        for stage in range(num_stages)
    )
    return order_ranks(ranks, stage_tag, microbatch_tag)

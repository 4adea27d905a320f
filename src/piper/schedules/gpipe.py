"""GPipe: all forwards, then all backwards."""

from piper.directives.order import Order
from piper.schedules.base import (
    backward,
    forward,
    order_ranks,
    require_positive,
    schedule,
)
from piper.schedules.placements import CHAIN


@schedule("gpipe", CHAIN)
def gpipe(
    num_stages: int, num_microbatches: int, *, stage_tag: str = "PP", microbatch_tag: str = "MB"
) -> list[Order]:
    """Each stage runs the forward of every microbatch, then the backward of every microbatch.

    With P stages and M microbatches of equal cost the bubble is (P − 1) / (M + P − 1) of the time.
    Each stage keeps the activations of all M microbatches. Stage s is meant for rank s
    (:func:`~piper.schedules.placements.chain`); any M ≥ 1 is legal.

    Source: Huang et al., *GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism*, 2019 (arXiv 1811.06965). Microbatches come back in the order in which they went,
    as in PyTorch.

    Raises :class:`~piper.errors.ScheduleError` for a count below 1.
    """
    require_positive("gpipe", num_stages=num_stages, num_microbatches=num_microbatches)
    microbatches = range(num_microbatches)
    ranks = (
        [forward(stage, m) for m in microbatches] + [backward(stage, m) for m in microbatches]
        for stage in range(num_stages)
    )
    return order_ranks(ranks, stage_tag, microbatch_tag)

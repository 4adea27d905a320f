"""Zero bubble: the backward is split, and its weight halves fill what would be bubbles.

Source of all three: Qi et al., *Zero Bubble Pipeline Parallelism*, 2023 (arXiv 2401.10241), and,
for ZB-V, Qi et al., *Pipeline Parallelism with Controllable Memory*, 2024 (arXiv 2405.15362).
``F``, ``BI`` and ``BW`` below are the times of a forward, of the input half and of the weight half
of a backward.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from piper.directives.order import Order
from piper.ir.dag import Pass
from piper.schedules.base import (
    Step,
    backward_input,
    backward_weight,
    forward,
    order_ranks,
    require_positive,
    schedule,
    warm_up_then_alternate,
)
from piper.schedules.interleaved import rounds_of
from piper.schedules.placements import CHAIN, LOOPED, V_SHAPE


@schedule("zb_h1", CHAIN)
def zb_h1(
    num_stages: int, num_microbatches: int, *, stage_tag: str = "PP", microbatch_tag: str = "MB"
) -> list[Order]:
    """1F1B with split backwards: stage s runs each weight half s input halves later.

    With P stages and M ≥ P microbatches the bubble of every stage is (P − 1)·(F + BI − BW), a third
    of 1F1B's when the three are equal. Each stage keeps the activations of at most min(M, P)
    microbatches: what 1F1B's first stage keeps. Stage s is meant for rank s
    (:func:`~piper.schedules.placements.chain`); any M ≥ 1 is legal.

    Raises :class:`~piper.errors.ScheduleError` for a count below 1.
    """
    require_positive("zb_h1", num_stages=num_stages, num_microbatches=num_microbatches)
    microbatches = range(num_microbatches)
    ranks = (
        _weights_behind(
            warm_up_then_alternate(
                [forward(stage, m) for m in microbatches],
                [backward_input(stage, m) for m in microbatches],
                warmup=num_stages - 1 - stage,
            ),
            lag=stage,
        )
        for stage in range(num_stages)
    )
    return order_ranks(ranks, stage_tag, microbatch_tag)


@schedule("interleaved_zero_bubble", LOOPED)
def interleaved_zero_bubble(
    num_ranks: int,
    num_virtual_stages: int,
    num_microbatches: int,
    *,
    stage_tag: str = "PP",
    microbatch_tag: str = "MB",
) -> list[Order]:
    """ZB-H1 over V·R stages on R ranks, stage s on rank s mod R; earlier microbatches go first.

    ``num_virtual_stages`` is V, the number of stages *per rank*. Microbatches go in rounds, as in
    :func:`~piper.schedules.interleaved.interleaved_one_f_one_b`; forwards run ahead of backwards by
    V − 1 stages of one round and by one for each rank between this one and the last; weight halves
    follow their input halves r later on rank r. With V = 1 it is :func:`zb_h1`.

    With M ≥ R microbatches and F = BI = BW the bubble is (R − 1)·F, of one stage's F: V times
    smaller than ZB-H1's. Each rank keeps at most min(V·M, (V − 1)·K + R) activations of one stage,
    K = the largest round.

    PyTorch's schedule of that name; it asks for rounds of equal size, here the larger go first, so
    any M ≥ 1 is legal.

    Raises :class:`~piper.errors.ScheduleError` for a count below 1.
    """
    require_positive(
        "interleaved_zero_bubble",
        num_ranks=num_ranks,
        num_virtual_stages=num_virtual_stages,
        num_microbatches=num_microbatches,
    )
    rounds = list(rounds_of(num_ranks, num_microbatches))

    def rank_steps(rank: int) -> list[Step]:
        stages = range(rank, num_ranks * num_virtual_stages, num_ranks)
        alternating = warm_up_then_alternate(
            [forward(s, m) for round_ in rounds for s in stages for m in round_],
            [backward_input(s, m) for round_ in rounds for s in reversed(stages) for m in round_],
            warmup=(num_virtual_stages - 1) * len(rounds[0]) + num_ranks - 1 - rank,
        )
        return _weights_behind(alternating, lag=rank)

    return order_ranks(map(rank_steps, range(num_ranks)), stage_tag, microbatch_tag)


def _weights_behind(steps: Iterable[Step], lag: int) -> list[Step]:
    """*steps* and, for each input half among them, its weight half *lag* input halves later."""
    with_weights: list[Step] = []
    waiting: deque[Step] = deque()
    for step in steps:
        with_weights.append(step)
        if step.pass_ is Pass.BACKWARD_INPUT:
            waiting.append(backward_weight(step.stage, step.microbatch))
            if len(waiting) > lag:
                with_weights.append(waiting.popleft())
    return [*with_weights, *waiting]


@schedule("zbv", V_SHAPE)
def zbv(
    num_ranks: int, num_microbatches: int, *, stage_tag: str = "PP", microbatch_tag: str = "MB"
) -> list[Order]:
    """ZB-V: 2·R stages in a V over R ranks, so that the first and the last stage share a rank.

    With M ≥ 2·R − 1 microbatches and F = BI = BW no rank is ever idle between its first and its
    last step: the step takes 6·M + R − 1 times F. Each rank keeps at most min(2·M, 2·R) activations
    of one stage, as many parameters' worth as 1F1B's first rank. Stages s and 2·R − 1 − s are meant
    for rank s (:func:`~piper.schedules.placements.v_shape`). Any M ≥ 1 is legal: with fewer, the
    schedule of 2·R − 1 microbatches is run without those that are not there.

    Raises :class:`~piper.errors.ScheduleError` for a count below 1.
    """
    require_positive("zbv", num_ranks=num_ranks, num_microbatches=num_microbatches)
    full = max(num_microbatches, 2 * num_ranks - 1)
    ranks = (
        [
            step
            for step in _numbered(
                _zbv_rank(rank, num_ranks, full), (rank, 2 * num_ranks - 1 - rank)
            )
            if step.microbatch < num_microbatches
        ]
        for rank in range(num_ranks)
    )
    return order_ranks(ranks, stage_tag, microbatch_tag)


def _zbv_rank(rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """Passes in order; ``0`` is the rank's stage on the way down, ``1`` the one on the way up."""
    to_last = num_ranks - 1 - rank
    return [
        *["F0"] * (2 * to_last + 1),
        *["F1", "F0"] * rank,
        *["F1", "BI1", "BW1"] * (to_last + 1),
        *["F0", "BI0", "BW0", "F1", "BI1", "BW1"] * (num_microbatches - 2 * num_ranks + rank + 1),
        *["BI0", "BW0", "F1", "BI1", "BW1"] * to_last,
        *["BI0", "BI1"] * rank,
        *["BI0", "BW0"] * (to_last + 1),
        *["BW1"] * rank,
        *["BW0"] * rank,
    ]


def _numbered(passes: Iterable[str], stages: tuple[int, int]) -> Iterator[Step]:
    """Each pass of each stage takes the microbatches in turn."""
    done: Counter[str] = Counter()
    for name in passes:
        yield Step(Pass(name[:-1]), stages[int(name[-1])], done[name])
        done[name] += 1

"""DualPipe and DualPipeV: two flows per rank, a forward of one overlaps a backward of the other.

In an expert-parallel model the all-to-all of either hides behind the compute of the other.

Source: DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024 (arXiv 2412.19437), section 3.2.1, and
their repository DualPipe for the order in full. DualPipeV is one half of it, on its own: Qi et al.,
*DualPipe could be better without the Dual*, 2025, call that "cut in half". ``F``, ``B``, ``BI`` and
``BW`` below are the times of a forward, a backward, and a backward's input and weight half.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from piper.directives.order import Order
from piper.errors import ScheduleError
from piper.schedules.base import (
    Step,
    backward,
    backward_input,
    backward_weight,
    forward,
    order_groups,
    require_positive,
    schedule,
)
from piper.schedules.placements import TWO_WAY, V_SHAPE


@schedule("dualpipe", TWO_WAY)
def dualpipe(
    num_ranks: int, num_microbatches: int, *, stage_tag: str = "PP", microbatch_tag: str = "MB"
) -> list[Order]:
    """Microbatches flow through the R stages from both ends: the first half down, the others up.

    Rank r holds stage r for those that flow down and stage R − 1 − r for the others
    (:func:`~piper.schedules.placements.two_way`), so each stage's parameters are on two ranks. The
    bubble of every rank is (R/2 − 1)·(F&B + B − 3·BW) where F = BI, F&B being the time of an
    overlapped pair; each rank keeps the activations of at most R + 1 microbatches.

    The ranks of each half of the pipeline do what :func:`dualpipev` has R/2 ranks do, on M/2
    microbatches of either flow. R and M must be even, and M ≥ 2·R: else
    :class:`~piper.errors.ScheduleError`.
    """
    require_positive("dualpipe", num_ranks=num_ranks, num_microbatches=num_microbatches)
    _require_even("dualpipe", "num_ranks", num_ranks)
    _require_even("dualpipe", "num_microbatches", num_microbatches)
    _require_full("dualpipe", num_microbatches, at_least=2 * num_ranks, each="rank")
    half, last = num_microbatches // 2, num_ranks - 1

    def rank_groups(rank: int) -> list[list[Step]]:
        flows = (_Flow(rank, 0), _Flow(last - rank, half))  # down, up
        from_end = min(rank, last - rank)
        near_first = flows if rank == from_end else flows[::-1]
        return _steps(_rank(from_end, num_ranks // 2, half), near_first)

    return order_groups(map(rank_groups, range(num_ranks)), stage_tag, microbatch_tag)


@schedule("dualpipev", V_SHAPE)
def dualpipev(
    num_ranks: int, num_microbatches: int, *, stage_tag: str = "PP", microbatch_tag: str = "MB"
) -> list[Order]:
    """2·R stages in a V over R ranks; the flows of a rank are its two stages.

    Rank r holds stages r and 2·R − 1 − r (:func:`~piper.schedules.placements.v_shape`), and no
    parameter twice. The bubble of every rank is (R − 1)·(F&B + B − 3·BW) where F = BI, F&B being
    the time of an overlapped pair; each rank keeps at most 2·R + 1 activations of one stage.

    M ≥ 2·R: else :class:`~piper.errors.ScheduleError`.
    """
    require_positive("dualpipev", num_ranks=num_ranks, num_microbatches=num_microbatches)
    _require_full("dualpipev", num_microbatches, at_least=2 * num_ranks, each="rank")

    def rank_groups(rank: int) -> list[list[Step]]:
        flows = (_Flow(rank, 0), _Flow(2 * num_ranks - 1 - rank, 0))
        return _steps(_rank(rank, num_ranks, num_microbatches), flows)

    return order_groups(map(rank_groups, range(num_ranks)), stage_tag, microbatch_tag)


def _rank(rank: int, num_ranks: int, count: int) -> list[str]:
    """What a rank does on *count* microbatches of each flow.

    ``0`` is the flow whose first stage is nearer to this rank, ``1`` the other. ``BW`` is the
    weight half that has waited longest.
    """
    to_turn = num_ranks - 1 - rank
    main = ["F0+B1", "F1+B0"] * (count - 2 * num_ranks + rank + 1)
    if to_turn == 0:
        main[:1] = ["F0", "B1"]  # the turning rank does not wait to overlap these: a smaller bubble
    return [
        *["F0"] * (2 * to_turn),
        *["F0", "F1"] * (rank + 1),
        *["BI1", "BW", "F1"] * to_turn,
        *main,
        *["B1", "F1+B0"] * to_turn,
        *(["B1", "B0"] * (rank + 1))[: rank + 1],
        *(["BI1", "BI0"] * (rank + 1))[rank + 1 :],
        *["BW", "BI0"] * to_turn,
        *["BW"] * (rank + 1),
    ]


class _Flow(NamedTuple):
    """The stage that a rank runs for a flow, and the flow's first microbatch."""

    stage: int
    first: int


def _steps(groups: Iterable[str], flows: tuple[_Flow, _Flow]) -> list[list[Step]]:
    """The steps of *groups*; forwards and backwards of each flow take its microbatches in turn."""
    microbatches = {(kind, flow): flows[flow].first for kind in ("F", "B") for flow in range(2)}
    waiting: deque[Step] = deque()

    def step(name: str) -> Step:
        if name == "BW":
            return waiting.popleft()
        kind, flow = name[0], int(name[-1])
        stage, microbatch = flows[flow].stage, microbatches[kind, flow]
        microbatches[kind, flow] += 1
        if kind == "F":
            return forward(stage, microbatch)
        if name.startswith("BI"):
            waiting.append(backward_weight(stage, microbatch))
            return backward_input(stage, microbatch)
        return backward(stage, microbatch)

    return [[step(name) for name in group.split("+")] for group in groups]


def _require_even(schedule: str, name: str, count: int) -> None:
    if count % 2:
        nearest: Sequence[int] = [n for n in (count - 1, count + 1) if n > 0]
        raise ScheduleError(
            f"{schedule}: half of the microbatches flows each way, and the halves of the pipeline "
            f"mirror each other, so {name} must be even; found {count}; nearest: "
            f"{' or '.join(map(str, nearest))}"
        )


def _require_full(schedule: str, num_microbatches: int, at_least: int, each: str) -> None:
    if num_microbatches < at_least:
        raise ScheduleError(
            f"{schedule}: num_microbatches must be at least two for each {each}, {at_least} here; "
            f"found {num_microbatches}; nearest: {at_least}"
        )

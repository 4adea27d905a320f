"""ZB-H1, written down by hand, and other orders of half backwards, for tests."""

from collections.abc import Sequence

import piper


def zb_h1(num_stages: int, num_microbatches: int) -> list[piper.Order]:
    """One order per stage: as 1F1B, but with the backward's halves apart: BW comes as much later as
    the stage is late in the pipeline (Qi et al., "Zero Bubble Pipeline Parallelism", 2023).
    """
    orders: list[piper.Order] = []
    for stage in range(num_stages):
        warm = min(num_stages - stage, num_microbatches)
        steps = [("F", m) for m in range(warm)]
        weights = 0
        for m in range(num_microbatches):
            steps.append(("BI", m))
            if warm + m < num_microbatches:
                steps.append(("F", warm + m))
            if m >= stage:
                steps.append(("BW", weights))
                weights += 1
        steps += [("BW", m) for m in range(weights, num_microbatches)]
        orders.append(order(stage, steps))
    return orders


def order(stage: int, steps: Sequence[tuple[str, int]]) -> piper.Order:
    """The order of one stage's *steps*: pass and microbatch."""
    return piper.Order([[{"PP": stage, "MB": m, "PASS": p}] for p, m in steps])

"""Runs orders by data flow alone, one unit of time per chunk, independent of the planner."""

from collections.abc import Sequence
from dataclasses import dataclass

from piper.directives.order import Order

Chunk = tuple[str, int, int]  # pass, stage, microbatch


@dataclass(frozen=True)
class Timeline:
    start: dict[Chunk, int]
    total: int


class DeadlockError(Exception):
    pass


def chunks(order: Order, stage_tag: str = "PP", microbatch_tag: str = "MB") -> list[Chunk]:
    """The rank's sequence; every group of these schedules is one filter that names one chunk."""
    sequence = []
    for group in order.filters:
        (filter_,) = group
        assert set(filter_) == {"PASS", stage_tag, microbatch_tag}
        sequence.append((filter_["PASS"], filter_[stage_tag], filter_[microbatch_tag]))
    return sequence


def needs(chunk: Chunk, num_stages: int) -> list[Chunk]:
    pass_, stage, microbatch = chunk
    if pass_ == "F":
        return [("F", stage - 1, microbatch)] if stage else []
    above = [("B", stage + 1, microbatch)] if stage + 1 < num_stages else []
    return [("F", stage, microbatch), *above]


def run(ranks: Sequence[Sequence[Chunk]], num_stages: int) -> Timeline:
    """Each rank starts its next chunk once it is free and the data is there; transfers are free."""
    start: dict[Chunk, int] = {}
    position, free = [0] * len(ranks), [0] * len(ranks)
    while len(start) < sum(map(len, ranks)):
        before = len(start)
        for rank, sequence in enumerate(ranks):
            while position[rank] < len(sequence):
                chunk = sequence[position[rank]]
                needed = needs(chunk, num_stages)
                if any(n not in start for n in needed):
                    break
                start[chunk] = max([free[rank], *(start[n] + 1 for n in needed)])
                free[rank] = start[chunk] + 1
                position[rank] += 1
        if len(start) == before:
            raise DeadlockError([s[p] for s, p in zip(ranks, position, strict=True) if p < len(s)])
    return Timeline(start, max(free))


def peak_live(sequence: Sequence[Chunk]) -> int:
    """Most activations that the rank holds at once: made by a forward, freed by its backward."""
    live = peak = 0
    for pass_, _, _ in sequence:
        live += 1 if pass_ == "F" else -1
        peak = max(peak, live)
    return peak

"""Runs orders by data flow alone, in units of time, independent of the planner."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from piper.directives.order import Order

Chunk = tuple[str, int, int]  # pass, stage, microbatch
Group = Sequence[Chunk]

EQUAL = {"F": 1, "BI": 1, "BW": 1, "B": 2}
"""Durations that the papers on zero bubble draw."""


@dataclass(frozen=True)
class Timeline:
    """When chunks start (in a group: when the group does) and, per rank, first start and last
    end.
    """

    start: dict[Chunk, int]
    spans: tuple[tuple[int, int], ...]

    @property
    def total(self) -> int:
        return max(end for _, end in self.spans)


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


def groups(order: Order, stage_tag: str = "PP", microbatch_tag: str = "MB") -> list[list[Chunk]]:
    """The rank's sequence of groups; every filter names one chunk."""
    return [
        [chunk for f in group for chunk in chunks(Order([[f]]), stage_tag, microbatch_tag)]
        for group in order.filters
    ]


def needs(chunk: Chunk, num_stages: int) -> list[set[Chunk]]:
    """What must be complete before *chunk*: of each set, one."""
    pass_, stage, microbatch = chunk
    if pass_ == "F":
        return [{("F", stage - 1, microbatch)}] if stage else []
    if pass_ == "BW":
        return [{("BI", stage, microbatch)}]
    above = {(half, stage + 1, microbatch) for half in ("B", "BI")}
    return [{("F", stage, microbatch)}, *([above] if stage + 1 < num_stages else [])]


def run(ranks: Sequence[Sequence[Chunk]], num_stages: int) -> Timeline:
    """:func:`run_groups` of single chunks that take one unit each."""
    return run_groups(
        [[[chunk] for chunk in rank] for rank in ranks], num_stages, dict.fromkeys(EQUAL, 1)
    )


def run_groups(
    ranks: Sequence[Sequence[Group]], num_stages: int, seconds: Mapping[str, int] = EQUAL
) -> Timeline:
    """Each rank starts its next group once it is free and the data of all members is there;
    transfers are free.

    A group takes as long as its members together, and what they make is there at its end.
    """
    start: dict[Chunk, int] = {}
    end: dict[Chunk, int] = {}
    position, free = [0] * len(ranks), [0] * len(ranks)
    begin: list[int | None] = [None] * len(ranks)
    while any(p < len(rank) for p, rank in zip(position, ranks, strict=True)):
        before = sum(position)
        for number, rank in enumerate(ranks):
            while position[number] < len(rank):
                group = rank[position[number]]
                needed = [options for c in group for options in needs(c, num_stages)]
                there = [end[c] for options in needed for c in options if c in end]
                if len(there) < len(needed):
                    break
                at = max([free[number], *there])
                free[number] = at + sum(seconds[pass_] for pass_, _, _ in group)
                for chunk in group:
                    assert chunk not in end, f"{chunk} runs twice"
                    start[chunk], end[chunk] = at, free[number]
                begin[number] = at if begin[number] is None else begin[number]
                position[number] += 1
        if sum(position) == before:
            raise DeadlockError([r[p] for r, p in zip(ranks, position, strict=True) if p < len(r)])
    return Timeline(start, tuple(zip([b or 0 for b in begin], free, strict=True)))


def busy(rank: Sequence[Group], seconds: Mapping[str, int] = EQUAL) -> int:
    """How long the rank works."""
    return sum(seconds[pass_] for group in rank for pass_, _, _ in group)


def peak_live(sequence: Sequence[Chunk]) -> int:
    """Most activations that the rank holds at once: made by a forward, freed by its backward or the
    weight half of it.
    """
    live = peak = 0
    for pass_, _, _ in sequence:
        live += {"F": 1, "BI": 0, "BW": -1, "B": -1}[pass_]
        peak = max(peak, live)
    return peak

"""Small parts of a matrix of cases in which every pair of values of any two factors occurs."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Protocol, TypeVar


class Paired(Protocol):
    """A case of a matrix."""

    @property
    def pairs(self) -> frozenset[object]:
        """All pairs of factor values that occur in it."""


C = TypeVar("C", bound=Paired)


def all_pairs(cases: Iterable[Paired]) -> set[object]:
    """The pairs that occur in any of *cases*."""
    return set().union(*(case.pairs for case in cases))


def every_pair(factors: Mapping[str, Sequence[object]]) -> set[object]:
    """All pairs of values of any two *factors*, as ((number of the factor, value), ...)."""
    return {
        ((i, x), (j, y))
        for (i, a), (j, b) in combinations(enumerate(factors), 2)
        for x, y in product(factors[a], factors[b])
    }


def cover(*parts: Sequence[C], wanted: Iterable[object] | None = None) -> list[C]:
    """Cases in which every pair occurs that occurs in the first of *parts*, and does so among its
    cases; then the same of the next.

    Greedy, deterministic: always the case with most pairs that are still missing; of equals the one
    that comes first. *wanted*: these pairs instead of those of a part.
    """
    chosen: list[C] = []
    for part in parts:
        missing = (set(wanted) if wanted is not None else all_pairs(part)) - all_pairs(chosen)
        while missing:
            best = max(part, key=lambda case: len(case.pairs & missing))
            assert best.pairs & missing, f"no case has {missing}"
            chosen.append(best)
            missing -= best.pairs
    return chosen

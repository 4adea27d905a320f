"""Numbers as symbols: what a sum is the sum of, what a norm counts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

WHOLE = -1
"""The slice number of a sum that was not cut into slices."""


@dataclass(frozen=True, slots=True)
class Total:
    """A symbolic sum: what it is for (a parameter's name), the multiset of contributions, how it
    was added up, and which slice of it is meant (``WHOLE``: all of it). ``kept``: how often what
    each device kept from earlier steps is in it, eight bits per device. ``scaled``: of a loss's
    weight, that it is multiplied by the scale of the loss. ``part``: which part of the experts it
    is for, if these are sharded.

    The multiset is the integer ``counts``, with eight bits per contribution. Of it are stored the
    ``digits`` from number ``start`` on, all before being zero: most sums are of one microbatch, of
    very many.
    """

    name: str
    digits: int
    history: int
    shard: int = WHOLE
    kept: int = 0
    scaled: bool = False
    part: int = WHOLE
    start: int = 0

    @property
    def counts(self) -> int:
        """How often each contribution is in it."""
        return self.digits << (8 * self.start)

    @property
    def target(self) -> tuple[str, int]:
        """What it is for."""
        return self.name, self.part

    @property
    def final(self) -> bool:
        """Whether it contains what was kept, and so is divided already."""
        return self.kept != 0

    @property
    def kind(self) -> tuple[tuple[str, int], int, bool]:
        """What totals that are added must have in common: what they are for, the slice, whether
        they are divided already.
        """
        return self.target, self.shard, self.final

    def plus(self, other: "Total") -> "Total":
        """The sum of two; addition of two numbers commutes bitwise."""
        one, two = sorted((self.history, other.history))
        return together((self, other), hash((one, two)))


def together(totals: Sequence[Total], history: int) -> Total:
    """The sum of *totals*, which are of one kind; *history* says how it was made."""
    first = totals[0]
    start = min(total.start for total in totals)
    digits = sum(total.digits << (8 * (total.start - start)) for total in totals)
    scaled = all(total.scaled for total in totals)
    kept = sum(total.kept for total in totals)
    return replace(first, digits=digits, history=history, kept=kept, scaled=scaled, start=start)


@dataclass(frozen=True, slots=True)
class Measured:
    """A symbolic norm: the gradients that it counts, with the part of the experts and the slice of
    each, in order; how they were put together; whether the root is taken.
    """

    counted: tuple[tuple[str, int, int], ...]
    history: int
    finished: bool = False

    @classmethod
    def together(cls, parts: Sequence["Measured"]) -> "Measured":
        """What *parts*, in this order, are together."""
        counted = tuple(sorted(pair for part in parts for pair in part.counted))
        return cls(counted, hash(tuple(part.history for part in parts)))

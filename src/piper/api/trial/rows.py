"""How many rows a microbatch will have, read off a strategy before there is anything to plan."""

from collections.abc import Sequence
from math import prod

from piper.directives.base import Directive
from piper.directives.place import Place
from piper.directives.replicate import Replicate
from piper.directives.split import Split


def likely_rows(strategy: Sequence[Directive], rows: int) -> int:
    """Rows of one microbatch of a batch of *rows* under *strategy*, at least 1.

    Where devices are replicas, all groups have equally many of them: as many as a ``Place`` lists.
    (Without one, ``Replicate`` lists them itself.) Where the batch does not divide, which planning
    refuses, what is left over is left out.
    """
    return max(1, rows // max(1, _replicas(strategy) * _microbatches(strategy)))


def _microbatches(strategy: Sequence[Directive]) -> int:
    return prod(d.num_microbatches for d in strategy if isinstance(d, Split))


def _replicas(strategy: Sequence[Directive]) -> int:
    claims = [d for d in strategy if isinstance(d, Replicate)]
    placed = [len(d.devices) for d in strategy if isinstance(d, Place)]
    if not claims:
        return 1
    listed = [_members(d) for d in claims if d.devices != "placed"]
    return max(placed or listed, default=1)


def _members(directive: Replicate) -> int:
    return sum(1 if isinstance(d, int) else len(d) for d in directive.devices)

"""Orders that speak of some microbatches and not of others."""

from collections.abc import Sequence

from piper.boundary import warn
from piper.directives.base import Directive
from piper.directives.order import left_out
from piper.ir.dag import Dag

_SHOWN = 4


def warn_of_left_out(dag: Dag, strategy: Sequence[Directive]) -> None:
    """One warning of the chunks of *dag* that no ``Order`` of *strategy* names, though some name
    others of the same region and pass: the planner puts them where it likes.
    """
    chunks = left_out(dag, strategy)
    if not chunks:
        return
    shown = ", ".join(chunk.label for chunk in chunks[:_SHOWN])
    shown += ", …" if len(chunks) > _SHOWN else ""
    warn(
        f"the strategy's Orders name some microbatches of a region and pass and leave out others ({shown}; {len(chunks)} chunks in "
        "all), which run where the planner puts them; name all, for instance by a schedule made for as many microbatches as Split makes"
    )

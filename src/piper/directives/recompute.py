"""Recompute: activation checkpointing."""

from msgspec import field

from piper.directives.base import Directive, directive, matching_chunks
from piper.errors import DirectiveError, nearest
from piper.ir.dag import Dag
from piper.ir.edit import Edit
from piper.ir.recompute import forward_operators, recompute
from piper.ir.select import FilterValue, Selector
from piper.ir.split_backward import join_halves, split_again

_ATTENTION = "_scaled_dot_product_"

ALIASES: dict[str, tuple[str, ...]] = {
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"),
    "scaled_dot_product_attention": (
        f"{_ATTENTION}flash_attention",
        f"{_ATTENTION}flash_attention_for_cpu",
        f"{_ATTENTION}efficient_attention",
        f"{_ATTENTION}cudnn_attention",
        f"{_ATTENTION}fused_attention_overrideable",
    ),
}
"""What some names of ``save`` stand for besides the operator of that very name."""


@directive
class Recompute(Directive, frozen=True):
    """The backward of each matched region computes its forward again, from what the forward read,
    instead of keeping what the forward made for it.

    ``save`` lists operators whose results are kept all the same, by their names in ATen (``"mm"``
    for ``aten.mm.default``); the rest is recomputed from these and from what the forward read.
    ``"matmul"`` stands for all matrix products, ``"scaled_dot_product_attention"`` for whichever
    fused kernel was captured.

    A region of several chunks recomputes each from what that chunk read; so nested regions
    recompute each on its own, and what passes between them is kept. Matching some chunks of a
    region (one pass) matches the region. Random numbers are bitwise those of the forward; buffers
    that it wrote are not written again, and read as they were before. A parameter that is sharded
    is gathered for the recomputation.

    Before ``Recompute({"PP": 0})``, a and b being what the forward saves::

        x, W ──▶ F PP=0 ──h──▶ F PP=1
                   └──a, b──▶ B PP=0 ──dW──▶ sum

    After::

        x, W ──▶ F PP=0 ──h──▶ F PP=1
        x, W ──▶ F' + B PP=0 ──dW──▶ sum

    Raises :class:`DirectiveError` for a region that is recomputed already, or a name in ``save``
    that no matched forward calls.
    """

    filter: dict[str, FilterValue]
    save: list[str] = field(default_factory=list)

    def apply(self, dag: Dag, number: int, selector: Selector) -> Edit:
        matched = matching_chunks(dag, selector, self.filter)
        for chunk in matched:
            if chunk.recompute is not None:
                raise DirectiveError(
                    f"node {chunk.label!r} is recomputed twice: by directive {chunk.recompute} and by this one; "
                    "make the filters disjoint"
                )
        regions = {chunk.tags for chunk in matched}
        save = self._operators(forward_operators(dag, regions))
        # What both halves of a split backward need is to be computed once.
        whole, halves = join_halves(dag, regions)
        edit = recompute(whole, regions, number, save)
        return Edit(split_again(edit.dag, halves), edit.remap)

    def _operators(self, known: frozenset[str]) -> set[str]:
        """The operators that ``save`` names, of those that the matched forwards call."""
        found: set[str] = set()
        for name in self.save:
            mine = known.intersection((name, *ALIASES.get(name, ())))
            if known and not mine:  # nothing is known where there is no backward
                raise DirectiveError(
                    f"save names operator {name!r}, which no matched forward calls{nearest(name, [*ALIASES, *known])}; they call: "
                    f"{', '.join(sorted(known))}"
                )
            found |= mine
        return found

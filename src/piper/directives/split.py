"""Split: microbatches."""

from piper.directives.base import Directive, directive, matching_chunks
from piper.errors import SplitError
from piper.ir.dag import Dag
from piper.ir.edit import Edit, split_nodes
from piper.ir.select import COMM, PASS, FilterValue, Selector
from piper.limits import MAX_MICROBATCHES


@directive
class Split(Directive, frozen=True):
    """``num_microbatches`` copies of the matched nodes, each on its part of the batch; gradients
    are accumulated.

    ``dim_name`` becomes a tag of the copies. ``Split`` and ``Replicate`` commute: microbatch m of
    replica r is number r·M + m of the global batch. The filter must match every chunk.

    Before ``Split({}, num_microbatches=2)``::

        F ──▶ B ──dW──▶ sum ──▶ UPDATE

    After::

        F MB=0 ──▶ B MB=0 ──dW──▶ sum ──▶ UPDATE
        F MB=1 ──▶ B MB=1 ──dW──▶

    Raises :class:`SplitError` if the batch does not divide, or a chunk is left out.
    """

    filter: dict[str, FilterValue]
    dim_name: str = "MB"
    num_microbatches: int = 1

    def tags_made(self) -> tuple[str, ...]:
        return (self.dim_name,)

    def apply(self, dag: Dag, number: int, selector: Selector) -> Edit:  # noqa: ARG002
        if self.num_microbatches < 1:
            raise SplitError(f"num_microbatches is at least 1, found {self.num_microbatches!r:.40}")
        if dag.num_microbatches * self.num_microbatches > MAX_MICROBATCHES:
            raise SplitError(
                f"num_microbatches: expected at most {MAX_MICROBATCHES} over all splits, found {self.num_microbatches!r:.40}"
            )
        if self.dim_name in (PASS, COMM):
            raise SplitError(f"dim_name {self.dim_name!r} is reserved; choose another")
        taken = {name for node in dag.nodes.values() for name, _ in node.tags}
        if self.dim_name in taken:
            raise SplitError(
                f"dim_name {self.dim_name!r} is a tag of the DAG already; choose another"
            )
        pieces = dag.num_microbatches * self.num_microbatches
        if dag.batch_size % pieces:
            raise SplitError(
                f"the batch of {dag.batch_size} rows does not divide into {pieces} microbatches; "
                f"choose a batch size that is a multiple of {pieces} or another num_microbatches"
            )
        chosen = {chunk.id for chunk in matching_chunks(dag, selector, self.filter)}
        left = [c for c in dag.chunks() if not c.derived and c.id not in chosen]
        if left:
            raise SplitError(
                f"the filter leaves out {len(left)} chunks, {left[0].label!r} for one; every chunk works on the batch that "
                "is divided: use Split({}, ...)"
            )
        return split_nodes(dag, self.dim_name, self.num_microbatches)

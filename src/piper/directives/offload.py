"""Offload: what the forward saves waits in host memory."""

from msgspec.structs import replace

from piper.directives.base import Directive, directive, matching_chunks
from piper.errors import DirectiveError
from piper.ids import NodeId, Stream
from piper.ir.core import core_chunks
from piper.ir.dag import Dag, Node, Offloading, Pass
from piper.ir.derive.offload import find_saved
from piper.ir.edit import Edit, replace_nodes
from piper.ir.select import FilterValue, Selector


@directive
class Offload(Directive, frozen=True):
    """What the forward of each matched region saves for its backward is copied to host memory when
    the forward is done with it, given up on the device, and copied back before the backward.

    That is what the region's forward makes, and what came from other regions and only backwards
    still need. Parameters, batch inputs, views of them, and what the backward of a region that is
    not offloaded reads too stay on the device: moving them would free nothing. Tensors that share
    memory are moved once. No number changes.

    Matching some chunks of a region (one pass) matches the region. The copies run on streams
    ``{stream}:out`` and ``{stream}:in``, beside compute; they are communication named ``offload``
    and ``fetch``, so an ``Order`` may speak of them: ``{"COMM": "fetch", "MB": 1}``. The planner
    fetches early, within its ``fetch_bytes``. With ``Recompute`` of the same region, before or
    after, what that still keeps is moved.

    Before ``Offload({"PP": 0})``, a being what the forward saves::

        F PP=0 ──a──▶ B PP=0

    After, a' being its copy in host memory::

        F PP=0 ──a──▶ offload ──a'──▶ fetch ──a──▶ B PP=0

    Raises :class:`DirectiveError` for a region that is offloaded already, or if the matched regions
    save nothing that could be moved.
    """

    filter: dict[str, FilterValue]
    stream: str = "offload"

    def apply(self, dag: Dag, number: int, selector: Selector) -> Edit:
        matched = matching_chunks(dag, selector, self.filter)
        for chunk in matched:
            if chunk.offload is not None:
                raise DirectiveError(
                    f"node {chunk.label!r} is offloaded twice: by directive {chunk.offload.directive} and by this one; "
                    "make the filters disjoint"
                )
        regions = {chunk.tags for chunk in matched}
        mark = Offloading(number, Stream(self.stream))
        chosen = [c for c in dag.chunks() if not c.derived and c.tags in regions]
        edit = replace_nodes(dag, {c.id: replace(c, offload=mark) for c in chosen})
        self._require_saved(edit.dag, number)
        return edit

    def _require_saved(self, dag: Dag, number: int) -> None:
        nodes: dict[NodeId, Node] = {**core_chunks(dag)}
        if all(node.pass_ is Pass.FORWARD for node in nodes.values()):
            return  # evaluation: nothing is saved anywhere
        for saved in find_saved(dag, nodes, dag.values):
            if any(c.offload is not None and c.offload.directive == number for c in saved.readers):
                return
        raise DirectiveError(
            f"filter {dict(self.filter)} matches no region that saves anything which could be moved: what the backwards of the matched "
            "regions read of the forward is nothing, or parameters, batch inputs and views of them, or read by the backward of "
            "another region too (match that as well). Remove this Offload, or match other regions"
        )

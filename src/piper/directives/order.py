"""Order: what runs before what."""

from collections.abc import Iterable

from piper.directives.base import Directive, directive
from piper.errors import DirectiveError
from piper.ids import DeviceId, NodeId
from piper.ir.dag import Comm, Dag, Node, OrderEdge, Pass
from piper.ir.edit import Edit, add_order
from piper.ir.select import PASS, FilterValue, Selector
from piper.ops.update import Update


@directive
class Order(Directive, frozen=True):
    """A list of groups, each a list of filters: on each device, the chunks of one group run before those of the
    next group; the members of one group may overlap.

    Communication follows its data; a filter that names it (``{"COMM": "all_reduce"}``) orders it too.
    A filter whose pass a region does not have is empty.

    Before ``Order([[{"MB": 1, "PASS": "F"}], [{"MB": 0, "PASS": "B"}]])``, on one device::

        F MB=0 ──▶ B MB=0
        F MB=1 ──▶ B MB=1

    After, with the new edge ``F MB=1 ⇢ B MB=0``.
    """

    filters: list[list[dict[str, FilterValue]]]

    def apply(self, dag: Dag, number: int, selector: Selector) -> Edit:
        last: dict[DeviceId | None, list[NodeId]] = {}
        edges: dict[tuple[NodeId, NodeId], None] = {}
        for group in self.filters:
            current: dict[DeviceId | None, dict[NodeId, None]] = {}
            for filter_ in group:
                _refuse_halves(filter_)
                for node in selector.find(filter_, _orderable):
                    for device in dag.nodes[node].participants or (None,):
                        current.setdefault(device, {})[node] = None
            for device, nodes in current.items():
                first, final = _ends(dag, nodes)
                for before in last.get(device, ()):
                    edges.update({(before, after): None for after in first if after != before})
                last[device] = final
        return add_order(dag, [OrderEdge(a, b, number) for a, b in edges])


def _orderable(node: Node) -> bool:
    """Sums are made as contributions come and buffers stored at the end: an order does not speak of them."""
    return isinstance(node, Comm) or not node.derived or isinstance(node.work, Update)


def _ends(dag: Dag, nodes: Iterable[NodeId]) -> tuple[list[NodeId], list[NodeId]]:
    """Those of *nodes* that read nothing of the others, and those that the others read nothing of: edges to the first and
    from the second order all of them.
    """
    group = [dag.nodes[n] for n in nodes]
    makers = {value: node.id for node in group for value in node.outputs}
    read = {v for node in group for v in node.inputs if v in makers}
    first = [node.id for node in group if not read.intersection(node.inputs)]
    final = [node.id for node in group if not read.intersection(node.outputs)]
    return first, final


def _refuse_halves(filter_: dict[str, FilterValue]) -> None:
    value = filter_.get(PASS)
    words = value if isinstance(value, (list, tuple)) else [value]
    if Pass.BACKWARD_INPUT.value in words or Pass.BACKWARD_WEIGHT.value in words:
        raise DirectiveError(
            f"filter {filter_} orders half a backward; splitting the backward is not available yet: use PASS 'B'"
        )

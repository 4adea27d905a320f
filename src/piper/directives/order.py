"""Order: what runs before what."""

from collections.abc import Callable

from piper.directives.base import Directive, directive
from piper.errors import DirectiveError
from piper.ids import DeviceId, NodeId
from piper.ir.dag import Comm, Dag, Node, OrderEdge, Pass
from piper.ir.edit import Edit, add_order
from piper.ir.select import COMM, PASS, FilterValue, Selector


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
                for node in selector.find(filter_, _orderable(COMM in filter_)):
                    for device in dag.nodes[node].participants or (None,):
                        current.setdefault(device, {})[node] = None
            for device, nodes in current.items():
                for before in last.get(device, ()):
                    edges.update({(before, after): None for after in nodes if after != before})
                last[device] = list(nodes)
        return add_order(dag, [OrderEdge(a, b, number) for a, b in edges])


def _orderable(comms: bool) -> Callable[[Node], bool]:
    def test(node: Node) -> bool:
        if isinstance(node, Comm):
            return comms
        return not node.derived or node.work.kind == "update"

    return test


def _refuse_halves(filter_: dict[str, FilterValue]) -> None:
    value = filter_.get(PASS)
    if value in (Pass.BACKWARD_INPUT.value, Pass.BACKWARD_WEIGHT.value):
        raise DirectiveError(
            f"filter {filter_} orders half a backward; splitting the backward is not available yet: use PASS 'B'"
        )

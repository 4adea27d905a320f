"""Order: what runs before what."""

from collections.abc import Iterable, Sequence

from piper.directives.base import Directive, directive
from piper.errors import OrderError
from piper.ids import DeviceId, NodeId
from piper.ir.dag import Chunk, Comm, Dag, Node, OrderEdge, Overlap, Pass, Tags
from piper.ir.derive import derive
from piper.ir.edit import Edit, add_order, add_overlaps
from piper.ir.overlap import overlapping
from piper.ir.select import COMM, PASS, FilterValue, Selector
from piper.ir.split_backward import split_backward
from piper.ops.update import Update

_HALVES = (Pass.BACKWARD_INPUT, Pass.BACKWARD_WEIGHT)


@directive
class Order(Directive, frozen=True):
    """A list of groups, each a list of filters: on each device, the chunks of one group run before
    those of the next group; the members of one group may overlap: the planner interleaves their
    chunks so that communication of one hides behind compute of another.

    Communication follows its data; a filter that names it (``{"COMM": "all_reduce"}``) orders it
    too. A filter whose pass a region does not have is empty.

    Passes ``BI`` and ``BW`` split the backward of the chunks that they match: ``BI`` makes the
    gradients that other chunks read, ``BW`` those of parameters; ``B`` means both. ``BI`` always
    comes first. A backward that makes only one kind is not cut: it is ``BI`` or ``BW``, and the
    filter for the other half is empty. Where a ``BI`` is ordered, its ``BW`` must be, too.

    What each device runs is ordered, nothing across devices: a list of groups that no device shares
    would say nothing, and is refused. (Some groups may be alone on their devices: one list may hold
    the orders of several.)

    Raises :class:`OrderError` for a ``BI`` without its ``BW``, for members of a group of which one
    needs what another makes, and for groups of which no two share a device.

    Before ``Order([[{"MB": 1, "PASS": "F"}], [{"MB": 0, "PASS": "B"}]])``, on one device::

        F MB=0 ──▶ B MB=0
        F MB=1 ──▶ B MB=1

    After, with the new edge ``F MB=1 ⇢ B MB=0``.
    """

    filters: list[list[dict[str, FilterValue]]]

    def apply(self, dag: Dag, number: int, selector: Selector) -> Edit:
        split = split_backward(dag, self._to_split(dag, selector))
        if not split.remap:
            return self._ordered(dag, number, selector)
        dag = split.dag
        if any(filter_.get(COMM) is not None for group in self.filters for filter_ in group):
            dag = derive(dag)  # so that it is the halves' communication that is found
        return Edit(self._ordered(dag, number, Selector(dag)).dag, split.remap)

    def _to_split(self, dag: Dag, selector: Selector) -> set[NodeId]:
        """The backward chunks of which a filter names a half."""
        found: set[NodeId] = set()
        for group in self.filters:
            for filter_ in group:
                if filter_.get(COMM) is None and any(_names(filter_, half) for half in _HALVES):
                    whole = {**filter_, PASS: Pass.BACKWARD.value}
                    nodes = (dag.nodes[n] for n in selector.find(whole))
                    found.update(n.id for n in nodes if n.pass_ is Pass.BACKWARD and not n.derived)
        return found

    @classmethod
    def check_together(cls, dag: Dag, given: Sequence[tuple[int, Directive]]) -> None:
        """Raise :class:`OrderError` for a ``BI`` that is ordered though its ``BW`` is not."""
        filters = [
            (number, filter_)
            for number, order in given
            if isinstance(order, Order)
            for group in order.filters
            for filter_ in group
            if filter_.get(COMM) is None
        ]
        if not any(_names(filter_, Pass.BACKWARD_INPUT) for _, filter_ in filters):
            return
        selector = Selector(dag)
        ordered = {node for _, filter_ in filters for node in selector.find(filter_)}
        seconds: dict[Tags, list[Node]] = {}
        for chunk in dag.chunks():
            if chunk.pass_ is Pass.BACKWARD_WEIGHT and not chunk.derived:
                seconds.setdefault(chunk.tags, []).append(chunk)
        for number, filter_ in filters:
            if not _names(filter_, Pass.BACKWARD_INPUT):
                continue
            for node in selector.find({**filter_, PASS: Pass.BACKWARD.value}):
                for second in seconds.get(dag.nodes[node].tags, ()):
                    if second.id not in ordered:
                        raise OrderError(
                            f"directive {number} orders {filter_}, but no Order of the strategy says when {second.label!r}, the other "
                            "half of that backward, runs; add it after its BI, or order PASS 'B' whole"
                        )

    def _ordered(self, dag: Dag, number: int, selector: Selector) -> Edit:
        last: dict[DeviceId | None, tuple[NodeId, ...]] = {}
        edges: dict[tuple[NodeId, NodeId], None] = {}
        overlaps: list[tuple[NodeId, ...]] = []
        shown: list[tuple[int, Node]] = []  # a node of each group that has some
        shared = False
        for index, group in enumerate(self.filters):
            members = [selector.find(filter_, _orderable) for filter_ in group]
            current: dict[DeviceId | None, dict[NodeId, None]] = {}
            for member in members:
                for node in member:
                    for device in dag.nodes[node].participants or (None,):
                        current.setdefault(device, {})[node] = None
            overlaps += overlapping(dag, members)
            shown += [(index, dag.nodes[node]) for member in members for node in member[:1]][:1]
            shared = shared or not last.keys().isdisjoint(current)
            # Devices of one group have the same nodes; there may be thousands.
            ends: dict[tuple[NodeId, ...], tuple[tuple[NodeId, ...], tuple[NodeId, ...]]] = {}
            joined: dict[tuple[tuple[NodeId, ...], tuple[NodeId, ...]], None] = {}
            for device, mine in current.items():
                nodes = tuple(mine)
                if nodes not in ends:
                    ends[nodes] = _ends(dag, nodes)
                first, final = ends[nodes]
                joined[last.get(device, ()), first] = None
                last[device] = final
            for finals, firsts in joined:
                edges.update({(a, b): None for a in finals for b in firsts if a != b})
        if len(shown) > 1 and not shared and not overlaps:
            raise OrderError(_nothing_shared(shown))
        dag = add_order(dag, [OrderEdge(a, b, number) for a, b in edges]).dag
        return add_overlaps(dag, [Overlap(number, nodes) for nodes in overlaps])


def left_out(dag: Dag, strategy: Iterable[Directive]) -> list[Chunk]:
    """Chunks of *dag* that no ``Order`` of *strategy* names, though some name the same region and
    pass on other microbatches: the planner puts them where it likes, which may be meant, or not.
    """
    filters = [f for d in strategy if isinstance(d, Order) for group in d.filters for f in group]
    selector = Selector(dag)
    ordered = {node for f in filters if f.get(COMM) is None for node in selector.find(f)}
    alike: dict[tuple[Tags, Pass], list[Chunk]] = {}
    for chunk in dag.chunks():
        if not chunk.derived:
            alike.setdefault((dag.region(chunk.tags), chunk.pass_), []).append(chunk)
    partly = (c for c in alike.values() if len({chunk.id in ordered for chunk in c}) == 2)
    return [chunk for chunks in partly for chunk in chunks if chunk.id not in ordered]


def _orderable(node: Node) -> bool:
    """Sums are made as contributions come and buffers stored at the end: an order does not speak of
    them.
    """
    return isinstance(node, Comm) or not node.derived or isinstance(node.work, Update)


def _nothing_shared(shown: Sequence[tuple[int, Node]]) -> str:
    where = ", ".join(
        f"group {index} ({node.label!r} …) on {list(node.participants)}"
        for index, node in shown[:4]
    )
    more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
    return (
        f"no two of its groups share a device, so it orders nothing: {where}{more}. An Order says what each device runs first; what "
        "different devices do follows from the data. Write an Order for each device, with the chunks that are on it"
    )


def _ends(dag: Dag, nodes: Iterable[NodeId]) -> tuple[tuple[NodeId, ...], tuple[NodeId, ...]]:
    """Those of *nodes* that read nothing of the others, and those that the others read nothing of:
    edges to the first and from the second order all of them.
    """
    group = [dag.nodes[n] for n in nodes]
    makers = {value: node.id for node in group for value in node.outputs}
    read = {v for node in group for v in node.inputs if v in makers}
    first = tuple(node.id for node in group if not read.intersection(node.inputs))
    final = tuple(node.id for node in group if not read.intersection(node.outputs))
    return first, final


def _names(filter_: dict[str, FilterValue], pass_: Pass) -> bool:
    """Whether a filter names *pass_* itself."""
    value = filter_.get(PASS)
    return pass_.value in (value if isinstance(value, (list, tuple)) else [value])

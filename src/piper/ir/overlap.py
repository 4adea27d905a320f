"""Groups of chunks that are to overlap."""

from collections.abc import Iterator, Sequence

from piper.errors import OrderError
from piper.ids import NodeId
from piper.ir.dag import Chunk, Dag, DeviceGroup
from piper.ir.split_backward import halves_of


def overlapping(dag: Dag, members: Sequence[Sequence[NodeId]]) -> Iterator[tuple[NodeId, ...]]:
    """The chunks of *members* that share devices with chunks of another member, one tuple for each
    group of devices.

    Raises :class:`OrderError` if one of them needs, directly or not, what another member's makes of
    the same microbatch. (A buffer passes from microbatch to microbatch, which orders them, but need
    not keep the rest from overlapping.)
    """
    by_devices: dict[DeviceGroup | None, dict[NodeId, set[int]]] = {}
    for number, member in enumerate(members):
        for node in member:
            chunk = dag.nodes[node]
            if isinstance(chunk, Chunk) and not chunk.derived:
                found = by_devices.setdefault(chunk.devices, {})
                found.setdefault(node, set()).add(number)
    for nodes in by_devices.values():
        if len(set().union(*nodes.values())) < 2:
            continue
        _check_independent(dag, nodes)
        yield tuple(sorted(nodes))


def _check_independent(dag: Dag, nodes: dict[NodeId, set[int]]) -> None:
    """*nodes* have the numbers of the members that they belong to."""
    by_microbatch: dict[int, list[NodeId]] = {}
    for node in nodes:
        by_microbatch.setdefault(dag.microbatch(dag.nodes[node].tags), []).append(node)
    for mine in by_microbatch.values():
        if len(set().union(*(nodes[n] for n in mine))) < 2:
            continue
        for node in mine:
            for later in sorted(_needing(dag, node).intersection(mine)):
                if nodes[later].isdisjoint(nodes[node]):
                    raise OrderError(
                        f"members of one group overlap, but {dag.nodes[later].label!r} needs what {dag.nodes[node].label!r} makes; "
                        "put it into a later group"
                    )


def _needing(dag: Dag, start: NodeId) -> set[NodeId]:
    """The nodes of the microbatch of *start* that data flows to from it, and its second half."""
    microbatch = dag.microbatch(dag.nodes[start].tags)
    second = halves_of(dag).get(start)
    found = set[NodeId]() if second is None else {second}
    waiting = [start]
    while waiting:
        for value in dag.nodes[waiting.pop()].outputs:
            for reader in dag.consumers.get(value, ()):
                node = dag.nodes[reader]
                updates = isinstance(node, Chunk) and node.derived
                if reader in found or updates or dag.microbatch(node.tags) != microbatch:
                    continue
                found.add(reader)
                waiting.append(reader)
    return found

"""One total order of all nodes, from which every stream of every device takes its own.

Critical-path list scheduling (Graham, 1969; priority: the longest remaining path): simulated time
advances from completion to completion; whenever a device's compute stream is free it takes, among
its ready chunks, the one with the longest path still ahead. Communication starts when its data is
ready. The order of start times respects every edge, and since each device's program is a
restriction of this one order, programs cannot wait for each other in a circle.

Chunks of one overlap group come by the longest path that is left to the end of the group instead,
what lies between them on other devices and links included: so a chunk whose result has far to
travel goes first, and what does not depend on it hides the way.
"""

import heapq
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from piper.ids import DeviceId, NodeId
from piper.ir.check import topological_order
from piper.ir.dag import Chunk, Dag, DeviceGroup, Pass

Lane: TypeAlias = int
"""A set of devices that run the same chunks, and so the same order."""


def total_order(dag: Dag, seconds: Mapping[NodeId, float]) -> Sequence[NodeId]:
    """All nodes, by start time in a list-scheduled simulation with the given durations.
    Deterministic.
    """
    return _Simulation(dag, seconds).run()


class _Simulation:
    def __init__(self, dag: Dag, seconds: Mapping[NodeId, float]) -> None:
        self.dag = dag
        self.seconds = seconds
        self.rank = {node: i for i, node in enumerate(topological_order(dag))}
        self.lane_of = _lanes(dag)
        self.ahead = _longest_paths(dag, seconds, list(self.rank))
        self.priority = dict(self.ahead)
        for overlap in dag.overlaps:
            self._prefer_inside(overlap.nodes)
        self.waiting = {node: len(before) for node, before in dag.predecessors.items()}
        self.ready: dict[Lane, list[tuple[bool, float, int, NodeId]]] = {}
        self.updates = 0  # that became ready so far
        self.busy: set[Lane] = set()
        self.completions: list[tuple[float, int, NodeId]] = []
        self.order: list[NodeId] = []

    def run(self) -> Sequence[NodeId]:
        released = [node for node in self.rank if not self.waiting[node]]
        self._release(released, 0.0)
        while self.completions:
            now = self.completions[0][0]
            done: list[NodeId] = []
            while self.completions and self.completions[0][0] == now:
                done.append(heapq.heappop(self.completions)[2])
            self._complete(done, now)
        return self.order

    def _complete(self, done: Sequence[NodeId], now: float) -> None:
        released: list[NodeId] = []
        for node in done:
            lane = self.lane_of.get(node)
            if lane is not None:
                self.busy.discard(lane)
            released += self._satisfied(node)
        freed = {lane for node in done if (lane := self.lane_of.get(node)) is not None}
        self._release(released, now, freed)

    def _release(self, nodes: Sequence[NodeId], now: float, freed: set[Lane] | None = None) -> None:
        lanes = set(freed or ())
        waiting = [(self._instant(node), self.rank[node], node) for node in nodes]
        heapq.heapify(waiting)
        while waiting:
            instant, _, node = heapq.heappop(waiting)
            lane = self.lane_of.get(node)
            if instant:
                # Done with the last contribution, so that a reduction of the sum starts before the
                # next chunk does.
                self.order.append(node)
                for after in self._satisfied(node):
                    heapq.heappush(waiting, (self._instant(after), self.rank[after], after))
            elif lane is None:
                self._start(node, now)
            else:
                entry = (*self._urgency(node), self.rank[node], node)
                heapq.heappush(self.ready.setdefault(lane, []), entry)
                lanes.add(lane)
        for lane in sorted(lanes):
            if lane not in self.busy and self.ready.get(lane):
                node = heapq.heappop(self.ready[lane])[3]
                self.busy.add(lane)
                self._start(node, now)

    def _satisfied(self, node: NodeId) -> list[NodeId]:
        """The nodes that waited for *node* last."""
        released: list[NodeId] = []
        for after in self.dag.successors[node]:
            self.waiting[after] -= 1
            if not self.waiting[after]:
                released.append(after)
        return released

    def _instant(self, node: NodeId) -> bool:
        return self.dag.nodes[node].work.instant

    def _urgency(self, node: NodeId) -> tuple[bool, float]:
        """Smaller is sooner."""
        if self.dag.nodes[node].pass_ is not Pass.UPDATE:
            return False, -self.priority[node]
        self.updates += 1
        return True, float(self.updates)

    def _prefer_inside(self, nodes: Collection[NodeId]) -> None:
        """Let the chunks *nodes* of a group come by the longest path to the end of the group, on
        each lane.

        Among others, the group as a whole counts as much as the most urgent of its chunks.
        """
        by_lane: dict[Lane, set[NodeId]] = {}
        for node in nodes:
            if (lane := self.lane_of.get(node)) is not None:
                by_lane.setdefault(lane, set()).add(node)
        for group in by_lane.values():
            inside = self._paths_inside(group)
            base = max(self.ahead[n] - inside[n] for n in group)
            self.priority.update({n: base + inside[n] for n in group})

    def _paths_inside(self, group: Collection[NodeId]) -> Mapping[NodeId, float]:
        """The longest path from each node of *group* to its end, over its nodes and what lies
        between them: communication, and chunks of other devices.
        """
        between = self._reached(group)
        inside: dict[NodeId, float] = {}
        for node in sorted(between.union(group), key=self.rank.__getitem__, reverse=True):
            ways = [inside[n] for n in self.dag.successors[node] if n in inside]
            if ways or node in group:
                inside[node] = self.seconds[node] + max(ways, default=0.0)
        return {node: inside[node] for node in group}

    def _reached(self, group: Collection[NodeId]) -> set[NodeId]:
        """Nodes of the same microbatches that *group* leads to, none later than its last."""
        dag, last = self.dag, max(self.rank[n] for n in group)
        found: set[NodeId] = set()
        waiting = list(group)
        while waiting:
            node = waiting.pop()
            microbatch = dag.microbatch(dag.nodes[node].tags)
            for after in dag.successors[node]:
                late = self.rank[after] >= last or dag.nodes[after].pass_ is Pass.UPDATE
                if late or after in found or dag.microbatch(dag.nodes[after].tags) != microbatch:
                    continue
                found.add(after)
                waiting.append(after)
        return found

    def _start(self, node: NodeId, now: float) -> None:
        self.order.append(node)
        heapq.heappush(self.completions, (now + self.seconds[node], self.rank[node], node))


def _longest_paths(
    dag: Dag, seconds: Mapping[NodeId, float], order: Sequence[NodeId]
) -> dict[NodeId, float]:
    ahead: dict[NodeId, float] = {}
    for node in reversed(order):
        longest = max((ahead[after] for after in dag.successors[node]), default=0.0)
        ahead[node] = longest + seconds[node]
    return ahead


def _lanes(dag: Dag) -> dict[NodeId, Lane]:
    """The lane of every chunk; a chunk that spans several lanes (the update of a tied parameter)
    occupies none.
    """
    root: dict[DeviceId, DeviceId] = {}

    def find(device: DeviceId) -> DeviceId:
        while root.setdefault(device, device) != device:
            root[device] = root[root[device]]
            device = root[device]
        return device

    groups = {c.devices for c in dag.chunks() if not c.derived and c.devices}
    for group in sorted(groups):
        for device in group[1:]:
            root[find(device)] = find(group[0])
    lanes: dict[NodeId, Lane] = {}
    lanes_of: dict[DeviceGroup, set[DeviceId]] = {}  # there are few groups, and they may be large
    for node in dag.nodes.values():
        if not isinstance(node, Chunk):
            continue
        if (found := lanes_of.get(node.participants)) is None:
            found = lanes_of[node.participants] = {find(d) for d in node.participants}
        if len(found) == 1:
            (lanes[node.id],) = found
    return lanes

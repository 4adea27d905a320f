"""One total order of all nodes, from which every stream of every device takes its own.

Critical-path list scheduling (Graham, 1969; priority: the longest remaining path): simulated time advances from completion to completion;
whenever a device's compute stream is free it takes, among its ready chunks, the one with the longest path still ahead. Communication starts
when its data is ready. The order of start times respects every edge, and since each device's program is a
restriction of this one order, programs cannot wait for each other in a circle.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from piper.ids import DeviceId, NodeId
from piper.ir.check import topological_order
from piper.ir.dag import Chunk, Dag, DeviceGroup

Lane: TypeAlias = int
"""A set of devices that run the same chunks, and so the same order."""


def total_order(dag: Dag, seconds: Mapping[NodeId, float]) -> Sequence[NodeId]:
    """All nodes, by start time in a list-scheduled simulation with the given durations. Deterministic."""
    return _Simulation(dag, seconds).run()


class _Simulation:
    def __init__(self, dag: Dag, seconds: Mapping[NodeId, float]) -> None:
        self.dag = dag
        self.seconds = seconds
        self.rank = {node: i for i, node in enumerate(topological_order(dag))}
        self.ahead = _longest_paths(dag, seconds, list(self.rank))
        self.lane_of = _lanes(dag)
        self.waiting = {node: len(before) for node, before in dag.predecessors.items()}
        self.ready: dict[Lane, list[tuple[float, int, NodeId]]] = {}
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
            for after in self.dag.successors[node]:
                self.waiting[after] -= 1
                if not self.waiting[after]:
                    released.append(after)
        freed = {lane for node in done if (lane := self.lane_of.get(node)) is not None}
        self._release(released, now, freed)

    def _release(self, nodes: Sequence[NodeId], now: float, freed: set[Lane] | None = None) -> None:
        lanes = set(freed or ())
        for node in sorted(nodes, key=self.rank.__getitem__):
            lane = self.lane_of.get(node)
            if lane is None:
                self._start(node, now)
            else:
                entry = (-self.ahead[node], self.rank[node], node)
                heapq.heappush(self.ready.setdefault(lane, []), entry)
                lanes.add(lane)
        for lane in sorted(lanes):
            if lane not in self.busy and self.ready.get(lane):
                node = heapq.heappop(self.ready[lane])[2]
                self.busy.add(lane)
                self._start(node, now)

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
    """The lane of every chunk; a chunk that spans several lanes (the update of a tied parameter) occupies none."""
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

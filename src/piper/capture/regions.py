"""Which region and pass each node of the joint graph belongs to, and which nodes are sunk.

A *sunk* node belongs to no chunk: every chunk that reads it computes it again from what it reads.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.fx

from piper.capture.annotate import RegionPath
from piper.capture.joint import (
    BufferInput,
    Joint,
    ParameterInput,
    SeedInput,
    is_accumulation,
    is_backward,
    is_random,
    region,
    sequence_number,
)
from piper.capture.operators import (
    CASTS,
    PARTS,
    RESHAPES,
    is_getitem,
    is_size,
    name,
    tensor_inputs,
)
from piper.ir.dag import Pass

Node: TypeAlias = torch.fx.Node
Key: TypeAlias = tuple[RegionPath, Pass]


@dataclass(frozen=True, slots=True)
class Layout:
    """The result: ``keys`` of the nodes that belong to chunks, in graph order, and the ``sunk``
    nodes.
    """

    keys: dict[Node, Key]
    sunk: frozenset[Node]

    def producers(self, node: Node) -> list[Node]:
        """The chunk nodes that *node* reads, looking through sunk nodes."""
        return _through(tensor_inputs(node), self.sunk, self.keys)


def lay_out(joint: Joint, outputs: frozenset[Node], cut: frozenset[Node]) -> Layout:
    """Assign every node that computes a tensor.

    *outputs* are nodes whose value leaves the graph: they are never sunk. *cut* nodes are left out.
    """
    nodes = [
        n
        for n in joint.module.graph.nodes
        if n.op in ("call_function", "get_attr") and not is_size(n) and n not in cut
    ]
    always = _always_sunk(joint, nodes, outputs)
    tables = _batch_tables(joint, nodes, always, outputs)
    placed = [n for n in nodes if n not in always and n not in tables]
    regions = _Regions(placed, always | tables, joint.loss).assigned()
    sunk_tables = _several_consumers(nodes, tables, always, regions)
    passes = {n: _pass(n) for n in nodes}
    kept = [n for n in nodes if n in regions]
    return Layout({n: (regions[n], passes[n]) for n in kept}, frozenset(always | sunk_tables))


def _pass(node: Node) -> Pass:
    return Pass.BACKWARD if is_backward(node) else Pass.FORWARD


def _always_sunk(joint: Joint, nodes: Iterable[Node], outputs: frozenset[Node]) -> set[Node]:
    """Constants and what is computed from them alone, views, casts of state and batch inputs."""
    sunk: set[Node] = set()
    constant: set[Node] = set()
    rooted = {n for n, i in joint.inputs.items() if not isinstance(i, SeedInput)}
    for node in nodes:
        sources = tensor_inputs(node)
        if is_random(node):
            continue
        if all(s in constant for s in sources):
            constant.add(node)
        on_root = all(s in rooted or s in constant for s in sources)
        operation = name(node)
        if is_getitem(node):
            cheap = sources[0] in sunk
        else:
            cheap = (
                node in constant
                or operation in RESHAPES
                or (on_root and (operation in PARTS or operation in CASTS))
            )
        if node in outputs or not cheap:
            constant.discard(node)
            continue
        sunk.add(node)
        if on_root and node not in constant:
            rooted.add(node)
    return sunk


def _batch_tables(
    joint: Joint, nodes: Iterable[Node], always: set[Node], outputs: frozenset[Node]
) -> set[Node]:
    """Nodes outside all regions computed from batch inputs and unwritten buffers alone.

    Position ids, rotary tables, masks: nothing in them is trained or random.
    """
    written = {buffer for buffer, _ in joint.buffer_updates}
    clean = {
        n
        for n, i in joint.inputs.items()
        if not isinstance(i, (SeedInput, ParameterInput))
        and not (isinstance(i, BufferInput) and i.name in written)
    }
    tables: set[Node] = set()
    for node in nodes:
        if is_random(node) or not all(s in clean for s in tensor_inputs(node)):
            continue
        if node in always:
            clean.add(node)
        elif region(node) is None and not is_backward(node) and node not in outputs:
            clean.add(node)
            tables.add(node)
    return tables


def _several_consumers(
    nodes: list[Node], tables: set[Node], always: set[Node], regions: dict[Node, RegionPath]
) -> set[Node]:
    """The tables that several regions read; a table of one region is given to it (in *regions*)."""
    readers: dict[Node, set[RegionPath]] = {n: set() for n in nodes}
    sunk: set[Node] = set()
    for node in reversed(nodes):
        if node in tables:
            if len(readers[node]) == 1:
                regions[node] = next(iter(readers[node]))
            else:
                sunk.add(node)
        mine = {regions[node]} if node in regions else readers[node]
        for source in tensor_inputs(node):
            if source in readers:
                readers[source] |= mine
    for node in tables:
        source = tensor_inputs(node)[0]
        if (
            is_getitem(node) and source in regions
        ):  # a multi-result call and its results stay together
            sunk.discard(node)
            regions[node] = regions[source]
    assert not (sunk & always)
    return sunk


class _Regions:
    """Gives nodes outside all regions the region of a neighbour in the same pass."""

    def __init__(self, nodes: list[Node], transparent: set[Node], loss: Node) -> None:
        self._nodes = nodes
        self._loss = loss
        inside = dict.fromkeys(nodes)
        self._reads = {n: _through(tensor_inputs(n), transparent, inside) for n in nodes}
        self._readers: dict[Node, list[Node]] = {n: [] for n in nodes}
        for node, sources in self._reads.items():
            for source in sources:
                self._readers[source].append(node)
        self._region: dict[Node, RegionPath] = {}

    def assigned(self) -> dict[Node, RegionPath]:
        for node in self._nodes:
            if (path := region(node)) is not None:
                self._region[node] = path
        self._settle([n for n in self._nodes if not is_backward(n)])
        self._mirror()
        self._settle([n for n in self._nodes if is_backward(n)])
        for node in self._nodes:
            if is_getitem(node) and self._reads[node]:
                self._region[node] = self._region[self._reads[node][0]]
        return self._region

    def _mirror(self) -> None:
        """Backward nodes outside all regions follow the forward node whose gradient they
        compute.
        """
        forward: dict[int, Node] = {}
        for node in self._nodes:
            number = sequence_number(node)
            if number is not None and not is_backward(node):
                forward.setdefault(number, node)
        for node in self._nodes:
            if node in self._region or not is_backward(node) or is_accumulation(node):
                continue
            number = sequence_number(node)
            if number is not None and number in forward:
                self._region[node] = self._region[forward[number]]

    def _settle(self, nodes: list[Node]) -> None:
        """Assign all of *nodes* (one pass), the clearest cases first."""
        group = set(nodes)
        steps = (
            self._follow_producers,
            self._follow_consumers,
            self._stay_between,
            self._follow_any,
            self._choose,
        )
        while unsettled := [n for n in nodes if n not in self._region]:
            if any(step(unsettled, group) for step in steps):
                continue
            for node in unsettled:
                self._region[node] = self._fallback(node)

    def _follow_producers(self, unsettled: list[Node], group: set[Node]) -> bool:
        """Nodes whose producers are all in one region."""
        return self._follow(unsettled, self._reads, group)

    def _follow_consumers(self, unsettled: list[Node], group: set[Node]) -> bool:
        """Nodes whose consumers are all in one region, where the producers have had their say.

        The sum of gradients that come from several regions belongs to the region that wants the
        sum.
        """
        ready = [
            n for n in unsettled if all(m in self._region for m in self._reads[n] if m in group)
        ]
        return self._follow(ready[::-1], self._readers, group)

    def _stay_between(self, unsettled: list[Node], group: set[Node]) -> bool:
        """The first node with a producer and a consumer in one region, its producers all settled.

        Sums of gradients along a residual stream: each reads the sum before it and its own region.
        """
        for node in unsettled:
            reads = [m for m in self._reads[node] if m in group]
            if not all(m in self._region for m in reads):
                continue
            sources = {self._region[m] for m in reads}
            for reader in self._readers[node]:
                if reader in group and (path := self._region.get(reader)) in sources:
                    assert path is not None
                    self._region[node] = path
                    return True
        return False

    def _follow_any(self, unsettled: list[Node], group: set[Node]) -> bool:
        """The last node whose consumers are all in one region, whatever its producers."""
        return any(self._follow([n], self._readers, group) for n in reversed(unsettled))

    def _follow(
        self, nodes: list[Node], neighbours: Mapping[Node, list[Node]], group: set[Node]
    ) -> bool:
        before = len(self._region)
        for node in nodes:
            found = {self._region.get(m) for m in neighbours[node] if m in group}
            if len(found) == 1 and (path := found.pop()) is not None:
                self._region[node] = path
        return len(self._region) > before

    def _choose(self, unsettled: list[Node], group: set[Node]) -> bool:
        """Settle one node whose neighbours disagree.

        Of several producers, the one behind the most changes of region (it finishes last); of
        several consumers, the one before the most.
        """
        for node in unsettled:
            near = [m for m in self._reads[node] if m in group and m in self._region]
            if near:
                depth = self._depths(self._nodes, self._reads)
                self._region[node] = self._region[max(near, key=lambda m: depth[m])]
                return True
        for node in unsettled:
            near = [m for m in self._readers[node] if m in group and m in self._region]
            if near:
                height = self._depths(self._nodes[::-1], self._readers)
                self._region[node] = self._region[max(near, key=lambda m: height[m])]
                return True
        return False

    def _depths(self, nodes: list[Node], neighbours: Mapping[Node, list[Node]]) -> dict[Node, int]:
        """Changes of region on the worst path that ends in each node."""
        depth: dict[Node, int] = {}
        for node in nodes:
            mine = self._region.get(node)
            depth[node] = max(
                (depth[m] + (self._region.get(m) != mine) for m in neighbours[node]), default=0
            )
        return depth

    def _fallback(self, node: Node) -> RegionPath:
        """The region of any consumer, else of the loss, else none."""
        readers = [m for m in self._readers[node] if m in self._region]
        if readers:
            return self._region[readers[0]]
        return self._region.get(self._loss, ())


def _through(
    start: Iterable[Node], transparent: Container[Node], inside: Container[Node]
) -> list[Node]:
    """The nodes of *inside* that are reached from *start*, passing through *transparent* nodes
    only.
    """
    found: dict[Node, None] = {}
    seen: set[Node] = set()
    stack = list(start)[::-1]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in transparent:
            stack += tensor_inputs(node)[::-1]
        elif node in inside:
            found[node] = None
    return list(found)

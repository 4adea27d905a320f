"""Cutting a dataflow graph into convex pieces of one colour. Free of torch.

Items are numbered in topological order; each has a key (its colour). A chunk is a set of items of
one key such that the chunk graph is acyclic: every path between two of its items stays inside it.
"""

import heapq
from collections.abc import Hashable, Sequence

_OTHERS_TRIED = 8


def segment(keys: Sequence[Hashable], producers: Sequence[Sequence[int]]) -> list[int]:
    """The chunk of each item, chunks numbered in a topological order of the chunk graph.

    ``producers[i]`` lists the items (all below ``i``) that item ``i`` reads.

    First cut: ``level = max(level of same-key producers, 1 + level of others)``, which never puts
    two items of one key and level on both sides of another key. That splits off items that merely
    come early (a mask computed from the batch, a saved value prepared for the backward), so pieces
    of one key are then merged wherever no path between them leaves the key.
    """
    levels = _levels(keys, producers)
    graph = _Quotient(keys, _connected_pieces(keys, levels, producers), producers)
    graph.merge_all()
    return graph.numbered()


def _levels(keys: Sequence[Hashable], producers: Sequence[Sequence[int]]) -> list[int]:
    levels: list[int] = []
    for item, reads in enumerate(producers):
        levels.append(
            max((levels[p] + (keys[p] != keys[item]) for p in reads), default=0),
        )
    return levels


def _connected_pieces(
    keys: Sequence[Hashable], levels: Sequence[int], producers: Sequence[Sequence[int]]
) -> list[int]:
    """Representative (the smallest item) of each item's piece: connected items of one key and
    level.
    """
    parent = list(range(len(keys)))

    def find(item: int) -> int:
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    for item, reads in enumerate(producers):
        for producer in reads:
            if keys[producer] == keys[item] and levels[producer] == levels[item]:
                a, b = find(producer), find(item)
                parent[max(a, b)] = min(a, b)
    return [find(item) for item in range(len(keys))]


class _Quotient:
    """The graph of pieces; merging keeps it acyclic."""

    def __init__(
        self,
        keys: Sequence[Hashable],
        pieces: Sequence[int],
        producers: Sequence[Sequence[int]],
    ) -> None:
        self._keys = keys
        self._piece_of = list(pieces)
        self._members: dict[int, list[int]] = {}
        self._after: dict[int, set[int]] = {}
        self._before: dict[int, set[int]] = {}
        self._same_key: dict[Hashable, set[int]] = {}
        for item, piece in enumerate(pieces):
            self._members.setdefault(piece, []).append(item)
            self._after.setdefault(piece, set())
            self._before.setdefault(piece, set())
            self._same_key.setdefault(keys[item], set()).add(piece)
            for producer in producers[item]:
                if pieces[producer] != piece:
                    self._after[pieces[producer]].add(piece)
                    self._before[piece].add(pieces[producer])

    def merge_all(self) -> None:
        """Merge pieces of one key until no more can be merged."""
        changed = True
        while changed:
            changed = False
            for piece in sorted(self._members, reverse=True):
                if piece in self._members and self._merge_somewhere(piece):
                    changed = True

    def numbered(self) -> list[int]:
        """The chunk number of each item, in topological order, the earliest item first among
        equals.
        """
        waiting = {piece: len(before) for piece, before in self._before.items()}
        ready = [piece for piece, count in waiting.items() if count == 0]
        heapq.heapify(ready)
        number: dict[int, int] = {}
        while ready:
            piece = heapq.heappop(ready)
            number[piece] = len(number)
            for later in self._after[piece]:
                waiting[later] -= 1
                if waiting[later] == 0:
                    heapq.heappush(ready, later)
        assert len(number) == len(self._members), "the chunk graph has a cycle"
        return [number[piece] for piece in self._piece_of]

    def _merge_somewhere(self, piece: int) -> bool:
        for other in self._candidates(piece):
            if self._mergeable(piece, other):
                self._merge(min(piece, other), max(piece, other))
                return True
        return False

    def _candidates(self, piece: int) -> list[int]:
        """Pieces of the same key: direct consumers, direct producers, then the largest others."""
        same = self._same_key[self._keys[piece]] - {piece}
        after, before = self._after[piece] & same, self._before[piece] & same
        others = sorted(same - after - before, key=lambda p: (-len(self._members[p]), p))
        return [*sorted(after), *sorted(before, reverse=True), *others[:_OTHERS_TRIED]]

    def _mergeable(self, a: int, b: int) -> bool:
        return not self._detour(a, b) and not self._detour(b, a)

    def _detour(self, start: int, end: int) -> bool:
        """Whether a path from *start* to *end* passes through another piece."""
        stack = [piece for piece in self._after[start] if piece != end]
        seen = set(stack)
        while stack:
            for later in self._after[stack.pop()]:
                if later == end:
                    return True
                if later not in seen:
                    seen.add(later)
                    stack.append(later)
        return False

    def _merge(self, kept: int, gone: int) -> None:
        for item in self._members[gone]:
            self._piece_of[item] = kept
        self._members[kept] += self._members.pop(gone)
        self._same_key[self._keys[kept]].discard(gone)
        for mine, theirs in ((self._after, self._before), (self._before, self._after)):
            for neighbour in mine.pop(gone):
                theirs[neighbour].discard(gone)
                if neighbour != kept:
                    theirs[neighbour].add(kept)
                    mine[kept].add(neighbour)
            mine[kept].discard(gone)

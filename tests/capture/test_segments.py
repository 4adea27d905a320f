"""Convex chunks of a coloured graph."""

from hypothesis import given
from hypothesis import strategies as st

from piper.capture.segments import segment


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[str], list[list[int]]]:
    size = draw(st.integers(1, 20))
    keys = draw(st.lists(st.sampled_from("abc"), min_size=size, max_size=size))
    producers = [
        sorted(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else [] for i in range(size)
    ]
    return keys, producers


@given(graphs())
def test_chunks_are_coloured_acyclic_and_maximal(graph: tuple[list[str], list[list[int]]]) -> None:
    keys, producers = graph
    chunks = segment(keys, producers)
    count = max(chunks) + 1
    assert set(chunks) == set(range(count))
    colour = dict(zip(chunks, keys, strict=True))
    assert all(colour[c] == k for c, k in zip(chunks, keys, strict=True))
    after: list[set[int]] = [set() for _ in range(count)]
    for item, reads in enumerate(producers):
        for producer in reads:
            assert chunks[producer] <= chunks[item], "numbers follow a topological order"
            if chunks[producer] != chunks[item]:
                after[chunks[producer]].add(chunks[item])
    reach: list[set[int]] = [set() for _ in range(count)]
    for chunk in reversed(range(count)):
        reach[chunk] = after[chunk].union(*(reach[c] for c in after[chunk]))
    for a in range(count):
        for b in range(a + 1, count):
            if colour[a] == colour[b]:
                assert any(b in reach[c] for c in after[a] if c != b), "these two could be one"


def test_early_items_join_their_region() -> None:
    #     0a ─ 1b(early) , 2a ─ 3b reads 1b and 2a
    assert segment("abab", [[], [], [0], [1, 2]]) == [0, 1, 0, 1]


def test_nested_region_splits_its_parent() -> None:
    assert segment("aba", [[], [0], [1]]) == [0, 1, 2]
    assert segment("abaa", [[], [0], [1], [0]]) == [0, 1, 2, 0] or segment(
        "abaa", [[], [0], [1], [0]]
    ) == [0, 1, 2, 2]

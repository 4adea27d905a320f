"""What the docstrings of the schedules with split backwards promise, against the papers'
formulas.
"""

from collections import Counter
from itertools import groupby, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedules.unit_time import EQUAL, busy, groups, needs, peak_live, run_groups

from piper.errors import ScheduleError
from piper.schedules import (
    SCHEDULES,
    dualpipe,
    dualpipev,
    interleaved_zero_bubble,
    one_f_one_b,
    zb_h1,
    zbv,
)

UNEQUAL = [
    EQUAL,
    {"F": 3, "BI": 4, "BW": 2, "B": 6},
    {"F": 10, "BI": 12, "BW": 9, "B": 21},
]
FORWARD_LIKE_BI = [EQUAL, {"F": 2, "BI": 2, "BW": 1, "B": 3}, {"F": 7, "BI": 7, "BW": 4, "B": 11}]
RANKS = [2, 3, 4, 8, 16]


def flat(rank):
    return [chunk for group in rank for chunk in group]


def play(orders, num_stages, seconds=EQUAL):
    """Each rank's groups, and its idle time while the step lasts."""
    ranks = [groups(order) for order in orders]
    total = run_groups(ranks, num_stages, seconds).total
    return ranks, [total - busy(rank, seconds) for rank in ranks]


# --- bubbles and memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", UNEQUAL, ids=str)
@pytest.mark.parametrize("num_stages", RANKS)
@pytest.mark.parametrize("times", [1, 2, 4])
def test_zb_h1(num_stages, times, seconds):
    ranks, bubbles = play(zb_h1(num_stages, num_stages * times), num_stages, seconds)
    formula = (num_stages - 1) * (seconds["F"] + seconds["BI"] - seconds["BW"])
    assert bubbles == [formula] * num_stages
    assert [peak_live(flat(rank)) for rank in ranks] == [num_stages] * num_stages


def test_the_bubble_of_zb_h1_is_a_third_of_that_of_1f1b():
    _, ours = play(zb_h1(8, 16), 8)
    _, theirs = play(one_f_one_b(8, 16), 8)
    assert [3 * bubble for bubble in ours] == theirs


@pytest.mark.parametrize("num_virtual", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("more", ["1", "2", "4", "2 and one", "2 and a half"])
def test_interleaved_zero_bubble(num_ranks, num_virtual, more):
    count = {
        "1": num_ranks,
        "2": 2 * num_ranks,
        "4": 4 * num_ranks,
        "2 and one": 2 * num_ranks + 1,
        "2 and a half": 2 * num_ranks + num_ranks // 2,
    }[more]
    orders = interleaved_zero_bubble(num_ranks, num_virtual, count)
    ranks, bubbles = play(orders, num_ranks * num_virtual)
    assert bubbles == [num_ranks - 1] * num_ranks
    largest = -(-count // (count // num_ranks))
    expected = min(num_virtual * count, (num_virtual - 1) * largest + num_ranks)
    assert [peak_live(flat(rank)) for rank in ranks] == [expected] * num_ranks


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("more", [-1, 0, 1, 7])
def test_zbv(num_ranks, more):
    count = 2 * num_ranks + more
    ranks = [groups(order) for order in zbv(num_ranks, count)]
    line = run_groups(ranks, 2 * num_ranks)
    # No idle time at all between a rank's first and last step; rank r starts r later.
    assert [end - begin for begin, end in line.spans] == [6 * count] * num_ranks
    assert line.total == 6 * count + num_ranks - 1
    assert [peak_live(flat(rank)) for rank in ranks] == [2 * num_ranks] * num_ranks


@pytest.mark.parametrize("seconds", FORWARD_LIKE_BI, ids=str)
@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("more", [0, 2, 12])
def test_dualpipe(num_ranks, more, seconds):
    ranks, bubbles = play(dualpipe(num_ranks, 2 * num_ranks + more), num_ranks, seconds)
    pair = seconds["F"] + seconds["B"]
    formula = (num_ranks // 2 - 1) * (pair + seconds["B"] - 3 * seconds["BW"])
    assert bubbles == [formula] * num_ranks
    assert [peak_live(flat(rank)) for rank in ranks] == [num_ranks + 1] * num_ranks


@pytest.mark.parametrize("seconds", FORWARD_LIKE_BI, ids=str)
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("more", [0, 1, 12])
def test_dualpipev(num_ranks, more, seconds):
    ranks, bubbles = play(dualpipev(num_ranks, 2 * num_ranks + more), 2 * num_ranks, seconds)
    pair = seconds["F"] + seconds["B"]
    formula = (num_ranks - 1) * (pair + seconds["B"] - 3 * seconds["BW"])
    assert bubbles == [formula] * num_ranks
    assert [peak_live(flat(rank)) for rank in ranks] == [2 * num_ranks + 1] * num_ranks


# --- the published figure of DualPipe: 8 ranks, 20 microbatches -----------------------------------


def phases(rank):
    """Runs of alike groups: what is in a group, as a picture shows it, and how many follow each
    other.
    """
    kinds = ["".join("&" * bool(i) + p for i, (p, _, _) in enumerate(group)) for group in rank]
    return [(kind, len(list(run))) for kind, run in groupby(kinds)]


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, "8F BI BW F BI BW F BI BW F 6F&B B F&B B F&B B F&B B BI BW BI BW BI BW BI BW"),
        (1, "8F BI BW F BI BW F 8F&B B F&B B F&B 2B 2BI BW BI BW BI 2BW"),
        (2, "8F BI BW F 10F&B B F&B 3B 3BI BW BI 3BW"),
        (3, "9F B 11F&B 4B 4BI 4BW"),
    ],
)
def test_dualpipe_is_that_of_the_figure(rank, expected):
    ranks = [groups(order) for order in dualpipe(8, 20)]
    for mirror in (rank, 7 - rank):
        found = [f"{n if n > 1 else ''}{kind}" for kind, n in phases(ranks[mirror])]
        assert " ".join(found) == expected


def test_directions_of_dualpipe_mirror_each_other():
    ranks = [groups(order) for order in dualpipe(8, 20)]
    for rank in range(8):
        mirrored = [[(p, s, (m + 10) % 20) for p, s, m in group] for group in ranks[rank]]
        assert mirrored == ranks[7 - rank]


def test_dualpipe_is_dualpipev_twice():
    """Ranks of the first half, their stage for the flow up renamed, do what DualPipeV's ranks do on
    the halves.
    """
    for rank, order in enumerate(dualpipev(4, 10)):
        renamed = [
            [(p, rank, m) if s == rank else (p, 7 - rank, m + 10) for p, s, m in group]
            for group in groups(order)
        ]
        assert renamed == groups(dualpipe(8, 20)[rank])


# --- legality for any counts ----------------------------------------------------------------------

SPLIT = ["zb_h1", "interleaved_zero_bubble", "zbv", "dualpipe", "dualpipev"]


@pytest.mark.parametrize("name", SPLIT)
@settings(deadline=None, max_examples=60)  # other tests share the cores
@given(num_ranks=st.integers(1, 9), virtual=st.integers(1, 4), num_microbatches=st.integers(1, 30))
def test_legal(name, num_ranks, virtual, num_microbatches):
    schedule = SCHEDULES[name]
    virtual = virtual if schedule.placement.virtual_stages else schedule.placement.stages_per_rank
    if name == "dualpipe":
        num_ranks, num_microbatches = 2 * num_ranks, 4 * num_ranks + 2 * (num_microbatches - 1)
    if name == "dualpipev":
        num_microbatches += 2 * num_ranks - 1
    orders = schedule.order(num_ranks, virtual, num_microbatches, "PP", "MB")
    ranks, num_stages = [groups(order) for order in orders], num_ranks * virtual
    done = run_groups(ranks, num_stages).start  # raises on a deadlock
    count = Counter(pass_ for pass_, _, _ in done)
    for stage, m in product(range(num_stages), range(num_microbatches)):
        whole, halves = ("B", stage, m) in done, [(p, stage, m) in done for p in ("BI", "BW")]
        assert ("F", stage, m) in done
        assert halves == [not whole] * 2
    assert count["F"] == num_stages * num_microbatches == count["B"] + count["BI"]
    for rank in ranks:
        for group in rank:
            assert len(group) == 1 or [p for p, _, _ in group] == ["F", "B"]
            for chunk in group:  # members of a group need nothing of each other
                assert not any(set(group) & options for options in needs(chunk, num_stages))


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "counts", "message"),
    [
        (zb_h1, (0, 4), "zb_h1: num_stages must be at least 1, found 0"),
        (interleaved_zero_bubble, (2, 0, 4), "num_virtual_stages must be at least 1, found 0"),
        (zbv, (2, 0), "zbv: num_microbatches must be at least 1, found 0"),
        (dualpipe, (3, 12), r"num_ranks must be even; found 3; nearest: 2 or 4$"),
        (dualpipe, (1, 12), r"num_ranks must be even; found 1; nearest: 2$"),
        (dualpipe, (4, 9), r"num_microbatches must be even; found 9; nearest: 8 or 10$"),
        (dualpipe, (4, 6), r"at least two for each rank, 8 here; found 6; nearest: 8$"),
        (dualpipev, (3, 5), r"at least two for each rank, 6 here; found 5; nearest: 6$"),
    ],
)
def test_counts_that_cannot_be_are_refused(build, counts, message):
    with pytest.raises(ScheduleError, match=message):
        build(*counts)


@pytest.mark.parametrize("name", SPLIT)
def test_tags(name):
    orders = SCHEDULES[name].order(
        2, SCHEDULES[name].placement.stages_per_rank, 4, "LAYER", "SAMPLE"
    )
    names = {frozenset(f) for order in orders for group in order.filters for f in group}
    assert names == {frozenset({"LAYER", "SAMPLE", "PASS"})}
    with pytest.raises(ScheduleError, match="must differ"):
        SCHEDULES[name].order(2, SCHEDULES[name].placement.stages_per_rank, 4, "PP", "PASS")

"""What each schedule's docstring promises, for any counts."""

from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedules.unit_time import DeadlockError, chunks, peak_live, run

from piper.errors import ScheduleError
from piper.schedules import (
    SCHEDULES,
    gpipe,
    interleaved_one_f_one_b,
    looped_bfs,
    one_f_one_b,
)

NAMES = ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"]
LOOPED = {"interleaved_1f1b", "looped_bfs"}

ranks_ = st.integers(1, 8)
virtual_ = st.integers(1, 4)
microbatches_ = st.integers(1, 24)


def sequences(name, num_ranks, num_virtual, num_microbatches):
    orders = SCHEDULES[name].order(num_ranks, num_virtual, num_microbatches, "PP", "MB")
    return [chunks(order) for order in orders]


def virtual_stages(name, drawn):
    return drawn if name in LOOPED else 1


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)  # other tests share the cores
@given(num_ranks=ranks_, drawn=virtual_, num_microbatches=microbatches_)
def test_every_chunk_once_on_its_rank(name, num_ranks, drawn, num_microbatches):
    num_virtual = virtual_stages(name, drawn)
    ranks = sequences(name, num_ranks, num_virtual, num_microbatches)
    assert len(ranks) == num_ranks
    for rank, sequence in enumerate(ranks):
        own = range(rank, num_ranks * num_virtual, num_ranks)
        assert sorted(sequence) == sorted(product("FB", own, range(num_microbatches)))


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)  # other tests share the cores
@given(num_ranks=ranks_, drawn=virtual_, num_microbatches=microbatches_)
def test_no_deadlock_and_the_stated_time(name, num_ranks, drawn, num_microbatches):
    num_virtual = virtual_stages(name, drawn)
    ranks = sequences(name, num_ranks, num_virtual, num_microbatches)
    total = run(ranks, num_ranks * num_virtual).total
    busy = 2 * num_virtual * num_microbatches
    if num_microbatches >= num_ranks or num_virtual == 1:
        # bubble = (R − 1) / (V·M + R − 1), in integers
        assert (total - busy) * (num_virtual * num_microbatches + num_ranks - 1) == total * (
            num_ranks - 1
        )
    else:
        assert total == 2 * (num_virtual * num_ranks + num_microbatches - 1)


@settings(deadline=None)  # other tests share the cores
@given(num_stages=ranks_, num_microbatches=microbatches_)
def test_peak_of_gpipe_and_1f1b(num_stages, num_microbatches):
    for order in gpipe(num_stages, num_microbatches):
        assert peak_live(chunks(order)) == num_microbatches
    for stage, order in enumerate(one_f_one_b(num_stages, num_microbatches)):
        assert peak_live(chunks(order)) == min(num_microbatches, num_stages - stage)


@settings(deadline=None)  # other tests share the cores
@given(num_ranks=ranks_, num_virtual=virtual_, num_microbatches=microbatches_)
def test_peak_of_looped_schedules(num_ranks, num_virtual, num_microbatches):
    everything = num_virtual * num_microbatches
    for order in looped_bfs(num_ranks, num_virtual, num_microbatches):
        assert peak_live(chunks(order)) == everything
    number_of_rounds = max(1, num_microbatches // num_ranks)
    largest = -(-num_microbatches // number_of_rounds)
    for rank, order in enumerate(interleaved_one_f_one_b(num_ranks, num_virtual, num_microbatches)):
        ahead = (num_virtual - 1) * largest + 2 * (num_ranks - 1 - rank)
        assert peak_live(chunks(order)) == min(everything, ahead + 1)


def test_one_f_one_b_by_hand():
    first, last = (chunks(order) for order in one_f_one_b(2, 3))
    assert first == [("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("F", 0, 2), ("B", 0, 1), ("B", 0, 2)]
    assert last == [("F", 1, 0), ("B", 1, 0), ("F", 1, 1), ("B", 1, 1), ("F", 1, 2), ("B", 1, 2)]


def test_stages_of_a_round_take_turns_in_the_interleaved_schedule():
    """Five microbatches on two ranks, two stages each: rounds of three and two."""
    first = [c for c in chunks(interleaved_one_f_one_b(2, 2, 5)[0]) if c[0] == "F"]
    assert [(stage, microbatch) for _, stage, microbatch in first] == [
        *((0, 0), (0, 1), (0, 2)),
        *((2, 0), (2, 1), (2, 2)),
        *((0, 3), (0, 4)),
        *((2, 3), (2, 4)),
    ]


def test_looped_bfs_uses_a_stage_in_one_stretch_per_pass():
    for order in looped_bfs(num_ranks=3, num_virtual_stages=2, num_microbatches=7):
        stages = [(pass_, stage) for pass_, stage, _ in chunks(order)]
        changes = sum(a != b for a, b in pairwise(stages))
        assert changes == 3


def test_the_unit_time_check_sees_a_deadlock():
    crossed = [[("B", 0, 0), ("F", 0, 0)], [("F", 1, 0), ("B", 1, 0)]]
    with pytest.raises(DeadlockError):
        run(crossed, num_stages=2)


def test_other_tags():
    (order,) = gpipe(1, 1, stage_tag="LAYER", microbatch_tag="SAMPLE")
    assert order.filters == [
        [{"LAYER": 0, "SAMPLE": 0, "PASS": "F"}],
        [{"LAYER": 0, "SAMPLE": 0, "PASS": "B"}],
    ]


@pytest.mark.parametrize("tags", [("PP", "PP"), ("PASS", "MB"), ("PP", "COMM")])
@pytest.mark.parametrize("name", NAMES)
def test_tags_that_clash_are_refused(name, tags):
    with pytest.raises(ScheduleError, match="must differ"):
        SCHEDULES[name].order(2, 1, 2, *tags)


@pytest.mark.parametrize(
    ("build", "counts", "bad"),
    [
        (gpipe, (0, 4), "gpipe: num_stages must be at least 1, found 0"),
        (gpipe, (2, 0), "gpipe: num_microbatches must be at least 1, found 0"),
        (one_f_one_b, (-1, 4), "1f1b: num_stages must be at least 1, found -1"),
        (one_f_one_b, (2, 0), "1f1b: num_microbatches must be at least 1, found 0"),
        (interleaved_one_f_one_b, (0, 2, 4), "interleaved_1f1b: num_ranks must"),
        (interleaved_one_f_one_b, (2, 0, 4), "interleaved_1f1b: num_virtual_stages must"),
        (looped_bfs, (2, 2, -3), "looped_bfs: num_microbatches must be at least 1, found -3"),
        (looped_bfs, (2, 0, 4), "looped_bfs: num_virtual_stages must"),
    ],
)
def test_counts_below_one_are_refused(build, counts, bad):
    with pytest.raises(ScheduleError, match=bad):
        build(*counts)


def test_registry_names():
    split = {"zb_h1", "interleaved_zero_bubble", "zbv", "dualpipe", "dualpipev"}
    assert set(SCHEDULES) == split.union(NAMES)
    assert all(schedule.name == name for name, schedule in SCHEDULES.items())


def test_unknown_schedule_names_the_nearest():
    with pytest.raises(ScheduleError, match=r"'interleaved1f1b' \(did you mean 'interleaved_1f1b'"):
        SCHEDULES["interleaved1f1b"]

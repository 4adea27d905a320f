import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedules.unit_time import groups

from piper.directives.place import Place
from piper.errors import PlacementError
from piper.schedules import SCHEDULES, chain, looped, two_way, v_shape

PAIRS = [[0, 1], [2, 3], [4, 5]]


def where(places):
    """(filter, devices) of each directive."""
    return [(place.filter, place.devices) for place in places]


def test_chain():
    assert where(chain(PAIRS)) == [
        ({"PP": 0}, [0, 1]),
        ({"PP": 1}, [2, 3]),
        ({"PP": 2}, [4, 5]),
    ]


def test_looped_goes_round_the_groups():
    assert where(looped([[3], [7]], 3)) == [
        ({"PP": 0}, [3]),
        ({"PP": 1}, [7]),
        ({"PP": 2}, [3]),
        ({"PP": 3}, [7]),
        ({"PP": 4}, [3]),
        ({"PP": 5}, [7]),
    ]


@settings(deadline=None)
@given(num_ranks=st.integers(1, 8))
def test_v_shape_goes_there_and_back(num_ranks):
    devices = {
        place.filter["PP"]: place.devices for place in v_shape([[r] for r in range(num_ranks)])
    }
    assert sorted(devices) == list(range(2 * num_ranks))
    for stage in range(num_ranks):
        assert devices[stage] == devices[2 * num_ranks - 1 - stage] == [stage]


@settings(deadline=None)
@given(num_ranks=st.integers(1, 8), half=st.integers(1, 6))
def test_two_way_places_each_stage_of_each_microbatch_once(num_ranks, half):
    placed = {}
    for place in two_way([[r] for r in range(num_ranks)], 2 * half):
        for microbatch in place.filter["MB"]:
            key = (place.filter["PP"], microbatch)
            assert key not in placed
            (placed[key],) = place.devices
    assert len(placed) == num_ranks * 2 * half
    for (stage, microbatch), device in placed.items():
        assert device == (stage if microbatch < half else num_ranks - 1 - stage)


@pytest.mark.parametrize(("count", "nearest"), [(0, "2"), (1, "2"), (5, "4 or 6")])
def test_two_way_needs_an_even_number_of_microbatches(count, nearest):
    with pytest.raises(PlacementError, match=f"found {count}; nearest: {nearest}$"):
        two_way([[0], [1]], count)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@settings(deadline=None)
@given(half=st.integers(1, 4), num_virtual=st.integers(1, 3))
def test_a_schedule_orders_what_its_placement_puts_on_each_group(name, half, num_virtual):
    schedule, num_ranks, num_microbatches = SCHEDULES[name], 2 * half, 4 * half + 2
    num_virtual = (
        num_virtual if schedule.placement.virtual_stages else schedule.placement.stages_per_rank
    )
    places = schedule.place(
        [[r] for r in range(num_ranks)], num_virtual, num_microbatches, "PP", "MB"
    )
    orders = schedule.order(num_ranks, num_virtual, num_microbatches, "PP", "MB")
    for rank, order in enumerate(orders):
        placed = {
            (place.filter["PP"], microbatch)
            for place in places
            if place.devices == [rank]
            for microbatch in place.filter.get("MB", range(num_microbatches))
        }
        ordered = {(stage, m) for group in groups(order) for _, stage, m in group}
        assert ordered == placed
        assert any("MB" in place.filter for place in places) == schedule.placement.by_microbatch


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "at least one device group"),
        ([[0], []], "group 1 has no device"),
        ([[0, 1], [2]], "group 0 has 2, group 1 has 1"),
        ([[0, 1], [1, 2]], "device 1 is in group 0 and in group 1"),
        ([[0, 0], [1, 2]], "device 0 is named twice in group 0"),
        ([[0], [-1]], "device -1 in group 1"),
    ],
)
@pytest.mark.parametrize(
    "placement",
    [chain, lambda groups: looped(groups, 2), v_shape, lambda groups: two_way(groups, 4)],
    ids=["chain", "looped", "v_shape", "two_way"],
)
def test_bad_groups_are_refused(placement, groups, message):
    with pytest.raises(PlacementError, match=message):
        placement(groups)


def test_looped_needs_a_stage_per_group():
    with pytest.raises(PlacementError, match="at least 1, found 0"):
        looped([[0], [1]], 0)


def test_placements_are_place_directives_with_the_given_tag():
    assert chain([[5]], stage_tag="STAGE") == [Place({"STAGE": 0}, devices=[5])]

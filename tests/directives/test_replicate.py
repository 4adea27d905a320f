import pytest
from tests.support.synthetic import chain

from piper.directives.place import Place
from piper.directives.replicate import Replicate
from piper.directives.split import Split
from piper.directives.strategy import apply
from piper.errors import DirectiveError, PlacementError
from piper.planner import plan


def reduced(dag):
    return sorted((c.groups, c.stream) for c in dag.comms() if c.work.kind == "all_reduce")


def test_explicit_devices_place_what_is_not_placed():
    dag = apply(chain(2), [Replicate({}, [0, 1])])
    assert {c.devices for c in dag.chunks()} == {(0, 1)}
    assert [groups for groups, _ in reduced(dag)] == [((0, 1),)] * 2


def test_explicit_devices_agree_with_the_placement_or_are_refused():
    place = Place({}, [0, 1])
    assert apply(chain(2), [place, Replicate({}, [0, 1])]).num_replicas == 2
    with pytest.raises(
        PlacementError, match=r"'F PP=0' is placed on \[0, 1\] but replicated on \[1, 0\]"
    ):
        apply(chain(2), [place, Replicate({}, [1, 0])])


def test_a_placement_after_explicit_devices_is_a_second_one():
    with pytest.raises(PlacementError, match=r"directive 1, Place.*placed twice"):
        apply(chain(2), [Replicate({}, [0, 1]), Place({}, [0, 1])])


def test_claimed_twice_names_both_directives():
    strategy = [Place({}, [0, 1]), Replicate({"PP": 1}), Split({}), Replicate({})]
    with pytest.raises(DirectiveError) as caught:
        apply(chain(2), strategy)
    for part in ("directive 3, Replicate(", "'F PP=1 MB=0'", "by directive 1 and by this one"):
        assert part in str(caught.value)


def test_the_reduce_stream_is_used():
    dag = apply(
        chain(2),
        [Replicate({"PP": 0}, [0, 1], reduce_stream="quiet"), Replicate({"PP": 1}, [2, 3])],
    )
    assert reduced(dag) == [(((0, 1),), "quiet"), (((2, 3),), "reduce")]


@pytest.mark.parametrize("size", [0, -1.5])
def test_bucket_size_is_positive(size):
    with pytest.raises(DirectiveError, match=f"positive, found {size}"):
        apply(chain(2), [Replicate({}, [0, 1], bucket_size=size)])


def test_one_device_reduces_nothing():
    dag = apply(chain(2), [Replicate({}, [0])])
    assert list(dag.comms()) == []


def test_a_group_that_nobody_claims_cannot_be_planned():
    with pytest.raises(
        PlacementError, match=r"'F PP=1' is placed on 2 devices \[0, 1\].*add Replicate"
    ):
        plan(apply(chain(2), [Place({}, [0, 1]), Replicate({"PP": 0})]))

import pytest
from tests.support.synthetic import chain

from piper.directives.order import Order
from piper.directives.place import Place
from piper.directives.split import Split
from piper.directives.strategy import apply
from piper.errors import DirectiveError, PlacementError


def test_places_both_passes_and_nothing_else():
    dag = apply(chain(3), [Place({"PP": 1}, [4])])
    devices = {c.label: c.devices for c in dag.chunks() if not c.derived}
    assert devices["F PP=1"] == devices["B PP=1"] == (4,)
    assert {d for label, d in devices.items() if "PP=1" not in label} == {None}


def test_by_microbatch():
    dag = apply(
        chain(2),
        [Split({}, num_microbatches=2), Place({"MB": 0}, [0]), Place({"MB": 1}, [1])],
    )
    assert {(dict(c.tags)["MB"], c.devices) for c in dag.chunks() if not c.derived} == {
        (0, (0,)),
        (1, (1,)),
    }


@pytest.mark.parametrize(
    ("devices", "complaint"),
    [
        ([], "at least one device"),
        ([1, 1], r"distinct devices .* found \[1, 1\]"),
        ([0, -1], r"counted from 0, found \[0, -1\]"),
    ],
)
def test_illegal_groups(devices, complaint):
    with pytest.raises(PlacementError, match=complaint):
        apply(chain(2), [Place({}, devices)])


def test_placed_twice_names_the_directive_the_node_and_both_groups():
    strategy = [Place({"PP": 0}, [0]), Place({"PP": [0, 1]}, [1])]
    with pytest.raises(PlacementError) as caught:
        apply(chain(2), strategy)
    for part in ("directive 1, Place(", "'F PP=0' is placed twice", "[0] before", "[1] by this"):
        assert part in str(caught.value)


def test_after_an_order_of_the_same_chunks_is_refused():
    order = Order([[{"PP": 0, "PASS": "F"}], [{"PP": 0, "PASS": "B"}]])
    with pytest.raises(PlacementError, match=r"'F PP=0' is already ordered"):
        apply(chain(2), [order, Place({"PP": 0}, [0])])
    apply(chain(2), [order, Place({"PP": 1}, [0])])  # others may still be placed


@pytest.mark.parametrize("filter_", [{"COMM": "transfer"}, {"PASS": "UPDATE"}])
def test_what_follows_from_chunks_is_not_placed(filter_):
    strategy = [Place({"PP": 0}, [0]), Place({"PP": 1}, [1]), Split({}), Place(filter_, [2])]
    with pytest.raises(DirectiveError, match="communication, sums and updates follow the chunks"):
        apply(chain(2), strategy)


def test_stream_carries_the_messages():
    dag = apply(chain(2), [Place({"PP": 0}, [0], stream="up"), Place({"PP": 1}, [1])])
    streams = {c.pass_: c.stream for c in dag.comms()}
    assert streams == {"F": "up", "B": "up"}  # the other side named none

import pytest
from tests.support.synthetic import chain

from piper.directives.order import Order
from piper.directives.place import Place
from piper.directives.split import Split
from piper.directives.strategy import apply
from piper.errors import DirectiveError, FilterError, OrderError
from piper.ir.check import topological_order
from piper.ops.compute import Compute
from piper.planner import plan

SPLIT = Split({}, num_microbatches=4)
ONE = Place({}, [0])


def f(stage, m):
    return {"PP": stage, "MB": m, "PASS": "F"}


def b(stage, m):
    return {"PP": stage, "MB": m, "PASS": "B"}


def edges(dag):
    return {(dag.nodes[e.before].label, dag.nodes[e.after].label) for e in dag.order}


def program(dag, device=0):
    """Labels of the chunks of a device in issue order."""
    planned = plan(dag)
    return [
        planned.dag.nodes[i.node].label
        for i in planned.devices[device].instructions
        if isinstance(i, Compute)
    ]


def before(dag, one, two):
    """Whether node *one* (by label) precedes *two* in every order that the DAG allows."""
    label = {n.label: n.id for n in dag.nodes.values()}
    reached, todo = set(), [label[one]]
    while todo:
        for after in dag.successors[todo.pop()]:
            if after not in reached:
                reached.add(after)
                todo.append(after)
    return label[two] in reached


def test_groups_run_one_after_the_other():
    dag = apply(chain(2), [ONE, SPLIT, Order([[f(0, 3)], [f(0, 1)], [f(0, 0)], [f(0, 2)]])])
    forwards = [x for x in program(dag) if x.startswith("F PP=0")]
    assert forwards == [f"F PP=0 MB={m}" for m in (3, 1, 0, 2)]


def test_members_of_a_group_stay_unordered():
    dag = apply(chain(2), [ONE, SPLIT, Order([[f(0, 0), f(0, 1)], [f(0, 2), f(0, 3)]])])
    assert edges(dag) == {(f"F PP=0 MB={i}", f"F PP=0 MB={j}") for i in (0, 1) for j in (2, 3)}


def test_every_member_of_a_group_precedes_every_member_of_the_next():
    # Members that depend on each other need fewer edges; the meaning is the same.
    order = Order([[{"MB": 0, "PASS": "F"}], [{"MB": 1, "PASS": "F"}], [{"MB": 0, "PASS": "B"}]])
    dag = apply(chain(3), [ONE, SPLIT, order])
    groups = [
        [f"F PP={s} MB=0" for s in range(3)],
        [f"F PP={s} MB=1" for s in range(3)],
        [f"B PP={s} MB=0" for s in range(3)],
    ]
    for one, two in ((0, 1), (1, 2), (0, 2)):
        assert all(before(dag, x, y) for x in groups[one] for y in groups[two])
    assert len(dag.order) == 2


def test_a_node_in_neighbouring_groups_is_no_contradiction():
    dag = apply(chain(2), [ONE, SPLIT, Order([[f(0, 0), f(0, 1)], [f(0, 1), f(0, 2)]])])
    assert edges(dag) == {
        ("F PP=0 MB=0", "F PP=0 MB=1"),
        ("F PP=0 MB=0", "F PP=0 MB=2"),
        ("F PP=0 MB=1", "F PP=0 MB=2"),
    }


def test_empty_groups_are_skipped():
    absent = {"PP": 0, "MB": 0, "PASS": "UPDATE"}
    dag = apply(chain(2), [ONE, SPLIT, Order([[f(0, 1)], [absent], [], [f(0, 0)]])])
    assert edges(dag) == {("F PP=0 MB=1", "F PP=0 MB=0")}


def test_only_chunks_on_the_same_device_are_ordered():
    strategy = [Place({"PP": 0}, [0]), Place({"PP": [1, 2]}, [1]), SPLIT]
    dag = apply(chain(3), [*strategy, Order([[f(0, 1)], [f(1, 3)], [f(0, 0)], [f(2, 2)]])])
    assert edges(dag) == {("F PP=0 MB=1", "F PP=0 MB=0"), ("F PP=1 MB=3", "F PP=2 MB=2")}


def test_communication_is_ordered_where_it_is_named():
    strategy = [Place({"PP": 0}, [0]), Place({"PP": 1}, [1]), SPLIT]
    sends = [{"COMM": "transfer", "PP": 0, "MB": m, "PASS": "F"} for m in range(4)]
    dag = apply(
        chain(2), [*strategy, Order([[sends[2]], [sends[0]]]), Order([[sends[0]], [f(0, 3)]])]
    )
    assert edges(dag) == {
        ("transfer F PP=0 MB=2", "transfer F PP=0 MB=0"),
        ("transfer F PP=0 MB=0", "F PP=0 MB=3"),
    }


def test_updates_are_ordered_only_if_named():
    # A filter without a pass means the chunks of the region, not its update.
    dag = apply(chain(2), [ONE, Order([[{"PP": 1}], [{"PP": 0, "PASS": "B"}]])])
    assert all("UPDATE" not in label for pair in edges(dag) for label in pair)
    dag = apply(chain(2), [ONE, Order([[{"PP": 1, "PASS": "UPDATE"}], [{"PP": 0, "PASS": "B"}]])])
    assert edges(dag) == {("UPDATE PP=1", "B PP=0")}


def test_a_contradiction_shows_the_cycle_and_names_its_directives():
    strategy = [ONE, SPLIT, Order([[f(0, 0)], [f(0, 1)]]), Order([[b(0, 1)], [f(0, 0)]])]
    with pytest.raises(OrderError) as caught:
        apply(chain(2), strategy)
    message = str(caught.value)
    assert "directives 2 to 3, the last of them Order(" in message
    assert "F PP=0 MB=0  before  F PP=0 MB=1  (directive 2: Order(" in message
    assert "B PP=0 MB=1  before  F PP=0 MB=0  (directive 3: Order(" in message
    assert "F PP=0 MB=1  before  B PP=1 MB=1  (data)" in message


def test_a_cycle_across_devices_is_found():
    # Each device alone is consistent; together they wait for each other.
    strategy = [Place({"PP": 0}, [0]), Place({"PP": 1}, [1]), SPLIT]
    crossed = [Order([[b(0, 0)], [f(0, 1)]]), Order([[f(1, 1)], [b(1, 0)]])]
    with pytest.raises(OrderError) as caught:
        apply(chain(2), [*strategy, *crossed])
    assert "B PP=0 MB=0           before  F PP=0 MB=1           (directive 3: " in str(caught.value)
    assert "F PP=1 MB=1           before  B PP=1 MB=0           (directive 4: " in str(caught.value)
    assert "transfer B PP=1 MB=0  before  B PP=0 MB=0           (data)" in str(caught.value)


@pytest.mark.parametrize("pass_", ["BI", "BW", ["BI", "BW"], ["F", "BW"]])
def test_half_backwards_are_refused_not_ignored(pass_):
    with pytest.raises(DirectiveError, match="half a backward"):
        apply(chain(2), [ONE, Order([[{"PP": 0, "PASS": pass_}]])])


def test_unknown_microbatch_is_an_error():
    with pytest.raises(FilterError, match=r"directive 2, Order.*no node has MB=4"):
        apply(chain(2), [ONE, SPLIT, Order([[f(0, 4)]])])


def test_before_any_placement_all_chunks_are_on_one_device():
    dag = apply(chain(2), [SPLIT, Order([[f(0, 1)], [f(0, 0)]])])
    assert edges(dag) == {("F PP=0 MB=1", "F PP=0 MB=0")}
    labels = program(dag)
    assert labels.index("F PP=0 MB=1") < labels.index("F PP=0 MB=0")


def test_orders_say_nothing_that_they_need_not():
    dag = apply(chain(2), [ONE, SPLIT, Order([[f(0, 0)]]), Order([])])
    assert dag.order == ()
    topological_order(dag)

import pytest
from tests.support.synthetic import chain

from piper.directives.order import Order
from piper.directives.place import Place
from piper.directives.replicate import Replicate
from piper.directives.split import Split
from piper.directives.strategy import apply
from piper.errors import FilterError, OrderError
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


# --- halves of a backward ---------------------------------------------------------------------


def half(pass_, stage, m):
    return {"PP": stage, "MB": m, "PASS": pass_}


def passes(dag, stage):
    """The passes of a stage's chunks, by microbatch."""
    found = {}
    for chunk in dag.chunks():
        tags = dict(chunk.tags)
        if not chunk.derived and tags["PP"] == stage:
            found.setdefault(tags.get("MB"), []).append(chunk.pass_.value)
    return found


def test_half_backwards_are_split_where_they_are_named():
    """Each microbatch as filtered; a stage without outgoing gradients is all BW."""
    order = Order([[half("BI", 1, 2)], [f(1, 3)], [half("BW", [0, 1], 2)]])
    dag = apply(chain(2), [ONE, SPLIT, order])
    whole = ["F", "B"]
    assert passes(dag, 1) == {0: whole, 1: whole, 2: ["F", "BI", "BW"], 3: whole}
    assert passes(dag, 0) == {0: whole, 1: whole, 2: ["F", "BW"], 3: whole}
    labels = program(dag)
    wanted = ["BI PP=1 MB=2", "F PP=1 MB=3", "BW PP=1 MB=2"]
    assert [x for x in labels if x in wanted] == wanted


def test_a_filter_of_passes_splits_if_it_names_a_half():
    dag = apply(
        chain(2), [ONE, SPLIT, Order([[{"PP": 1, "PASS": ["F", "BI"]}], [half("BW", 1, "*")]])]
    )
    assert passes(dag, 1) == {m: ["F", "BI", "BW"] for m in range(4)}
    assert passes(dag, 0) == {m: ["F", "B"] for m in range(4)}
    assert (
        apply(chain(2), [ONE, SPLIT, Order([[{"PASS": "*"}]])]).nodes
        == apply(chain(2), [ONE, SPLIT]).nodes
    )


@pytest.mark.parametrize("split_first", [False, True])
def test_b_means_both_halves(split_first):
    """Also in an order that came before the split."""
    orders = [
        Order([[b(1, 0)], [f(1, 1)], [b(1, 2)]]),
        Order([[half(p, 1, m)] for m in (0, 2) for p in ("BI", "BW")]),
    ]
    dag = apply(chain(2), [ONE, SPLIT, *(orders[::-1] if split_first else orders)])
    for part in ("BI", "BW"):
        assert before(dag, f"{part} PP=1 MB=0", "F PP=1 MB=1")
        assert before(dag, "F PP=1 MB=1", f"{part} PP=1 MB=2")


def test_a_split_into_microbatches_after_the_order():
    order = Order([[{"PP": 0, "PASS": "F"}], [{"PASS": "BI"}], [{"PASS": "BW"}]])
    dag = apply(chain(2), [ONE, order, SPLIT])
    assert passes(dag, 1) == {m: ["F", "BI", "BW"] for m in range(4)}
    assert all(before(dag, f"BI PP=1 MB={m}", f"BW PP=0 MB={m}") for m in range(4))


def test_bw_before_its_bi_is_a_cycle():
    with pytest.raises(OrderError) as caught:
        apply(chain(2), [ONE, SPLIT, Order([[half("BW", 1, 0)], [half("BI", 1, 0)]])])
    assert "BI PP=1 MB=0  before  BW PP=1 MB=0" in str(caught.value)
    assert "BW PP=1 MB=0  before  BI PP=1 MB=0  (directive 2: Order(" in str(caught.value)


@pytest.mark.parametrize(
    ("filters", "missing"),
    [
        ([[half("BI", 1, 0)]], "BW PP=1 MB=0"),
        ([[half("BI", 1, [0, 1])], [half("BW", 1, 0)]], "BW PP=1 MB=1"),
        ([[half("BI", 0, 0)]], "BW PP=0 MB=0"),
    ],
)
def test_bi_without_its_bw(filters, missing):
    with pytest.raises(OrderError, match=f"directive 2 orders .*'BI'.*when '{missing}'"):
        apply(chain(2), [ONE, SPLIT, Order(filters)])


@pytest.mark.parametrize("rest", [half("BW", 1, 0), b(1, 0), {"PP": 1}])
def test_bw_may_be_named_by_another_order_in_other_words(rest):
    orders = [Order([[half("BI", 1, 0)]]), Order([[rest]])]
    assert passes(apply(chain(2), [ONE, SPLIT, *orders]), 1)[0] == ["F", "BI", "BW"]


def test_communication_of_halves():
    """Sends of gradients belong to BI; a gather that an order named serves both halves, or the one
    that needs it.
    """
    strategy = [
        Place({"PP": 0}, [0, 1]),
        Place({"PP": 1}, [2, 3]),
        Replicate({}, shard_params=True),
        SPLIT,
    ]
    gathers = [{"COMM": "all_gather", "PP": 1, "MB": m, "PASS": "B"} for m in range(2)]
    first = Order([[gathers[1]], [gathers[0]]])
    halves = Order([[half("BI", 1, "*")], [half("BW", 1, "*")]])
    dag = apply(chain(2), [*strategy, first, halves])
    found = {
        (a, b) for a, b in edges(dag) if a.startswith("all_gather") and b.startswith("all_gather")
    }
    assert found == {
        (f"all_gather {p} PP=1 MB=1", f"all_gather {q} PP=1 MB=0")
        for p in ("BI", "BW")
        for q in ("BI", "BW")
    }
    labels = {c.label for c in dag.comms()}
    assert "transfer BI PP=1 MB=0" in labels
    assert "reduce_scatter BW PP=1 MB=0" in labels
    named = Order([[{"COMM": "transfer", "PASS": "BI", "MB": 0}], [f(1, 3)]])
    both = Order([[half("BI", 1, 0)], *named.filters, [half("BW", 1, 0)]])
    assert ("transfer BI PP=1 MB=0", "F PP=1 MB=3") in edges(apply(chain(2), [*strategy, both]))


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


def test_an_order_of_groups_that_share_no_device_is_refused():
    strategy = [Place({"PP": 0}, [0]), Place({"PP": [1, 2]}, [1]), SPLIT]
    apart = Order([[f(0, 1)], [], [f(1, 3)]])
    with pytest.raises(OrderError, match="no two of its groups share a device") as caught:
        apply(chain(3), [*strategy, Order([[f(1, 3), f(2, 0)]]), apart])
    message = str(caught.value)
    assert "directive 4, Order(" in message
    assert "group 0 ('F PP=0 MB=1' …) on [0], group 2 ('F PP=1 MB=3' …) on [1]" in message
    # One group that overlaps says something; so does one shared device.
    for order in (Order([[f(0, 1)], [f(1, 3), f(2, 0)]]), Order([[f(0, 1)], [{"PASS": "B"}]])):
        assert apply(chain(3), [*strategy, order]).nodes


def test_the_nearest_tag_is_named_whatever_its_case():
    with pytest.raises(FilterError, match=r"names tag 'pp', .* \(did you mean 'PP'\?\)"):
        apply(chain(2), [ONE, Order([[{"pp": 0}]])])

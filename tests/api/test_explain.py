import pytest
from tests.support.synthetic import chain
from tests.verify.plans import pipeline

import piper
from piper.api.explain import explain
from piper.errors import PlanError
from piper.plan.costs import UnitCosts
from piper.simulate import simulate

STRATEGY = pipeline(2, replicas=2, microbatches=3)


@pytest.fixture(scope="module")
def plan():
    return piper.plan(piper.apply(chain(2, batch_size=12), STRATEGY))


def node_of(plan, label):
    return next(n for n in plan.dag.nodes.values() if n.label == label)


def test_a_node_by_label_and_by_number(plan):
    node = node_of(plan, "F PP=1 MB=1")
    text = explain(plan, "F PP=1 MB=1", STRATEGY)
    assert explain(plan, str(node.id), STRATEGY) == text
    place = next(
        (i, d)
        for i, d in enumerate(STRATEGY)
        if isinstance(d, piper.Place) and d.filter == {"PP": 1}
    )
    assert f"directive {place[0]}, {place[1].describe()}" in text
    assert "on devices 2, 3" in text
    assert "Place({'PP': 0}" not in text


def test_what_a_node_comes_after_and_who_said_so(plan):
    text = explain(plan, "F PP=1 MB=1", STRATEGY)
    transfer = node_of(plan, "transfer F PP=0 MB=1")
    before = node_of(plan, "B PP=1 MB=0")
    assert f"after node {transfer.id} [transfer F PP=0 MB=1]: it makes activation" in text
    order = next(
        i
        for i, d in enumerate(STRATEGY)
        if isinstance(d, piper.Order) and "'PP': 1" in d.describe()
    )
    assert f"after node {before.id} [B PP=1 MB=0]: directive {order}, Order" in text


def test_when_it_runs_and_what_it_waited_for(plan):
    """Device 2 begins with F0 at 1, B0 at 2 to 4; F1 waits for that."""
    text = explain(plan, "F PP=1 MB=1", STRATEGY, simulate(plan, UnitCosts()))
    before = node_of(plan, "B PP=1 MB=0")
    assert "compute on stream 'compute', from 4 F to 5 F" in text
    assert f"what it waited for last: node {before.id} [B PP=1 MB=0]" in text


def test_communication_follows_from_chunks(plan):
    text = explain(plan, "transfer F PP=0 MB=1", STRATEGY)
    assert "between devices [0, 2], [1, 3]" in text
    assert "Place({'PP': 0}" in text
    assert "Place({'PP': 1}" in text


def test_an_update_waits_for_the_readers_of_its_parameter(plan):
    text = explain(plan, "UPDATE PP=0", STRATEGY)
    assert "it reads what this node overwrites" in text


def test_a_device(plan):
    text = explain(plan, "device 3", STRATEGY)
    assert text.startswith("device 3: ")
    assert "Place({'PP': 1}" in text
    assert "Place({'PP': 0}" not in text
    assert "1 F before F PP=1 MB=0" in text


def test_a_device_of_a_folded_plan(plan):
    folded = piper.plan(plan.dag, fold=True)
    assert explain(folded, "device 3").startswith("device 3 does the same as device 2, renamed:")


def test_a_step(plan):
    waits = [i for i, x in enumerate(plan.devices[2].instructions) if x.op == "wait"]
    text = explain(plan, f"2#{waits[0]}", STRATEGY)
    assert text.startswith(f"device 2 #{waits[0]}: wait")
    assert "waits for #" in text


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("9999", "there is no node 9999"),
        ("F PP=1 MB=", "did you mean 'F PP=1 MB="),
        ("device 9", "there is no device 9; the plan has devices 0 to 3"),
        ("device x", "write a number"),
        ("9#0", "there is no device 9"),
        ("0#9999", "no #9999"),
    ],
)
def test_what_does_not_exist(plan, what, message):
    with pytest.raises(PlanError, match=message):
        explain(plan, what)


def test_chunks_of_a_device_that_no_order_names():
    """The last microbatch of one stage; nothing where the others are named, or none."""
    *placed, first, second = STRATEGY
    strategy = [*placed, piper.Order(first.filters[:2]), second]
    plan = piper.plan(piper.apply(chain(2, batch_size=12), strategy))
    assert "no Order names" not in explain(plan, "device 2", strategy)
    named = {(f["PASS"], f["MB"]) for group in first.filters[:2] for f in group}
    passes = {pass_ for pass_, _ in named}
    missing = 3 * len(passes) - len(named)
    assert f"no Order names {missing} of its chunks" in explain(plan, "device 0", strategy)


def test_a_label_without_its_microbatch_is_answered_with_those_that_there_are(plan):
    with pytest.raises(PlanError, match=r"'F PP=1'; there are 'F PP=1 MB=0', 'F PP=1 MB=1', "):
        explain(plan, "F PP=1")

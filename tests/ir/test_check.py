from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct
from tests.support.synthetic import chain

from piper.errors import DirectiveError, OrderError
from piper.ids import NodeId
from piper.ir.check import check_dag, topological_order
from piper.ir.dag import OrderEdge
from piper.ir.derive import derive


@pytest.fixture
def dag():
    return derive(chain(3))


def changed(dag, node, **fields):
    return replace(dag, nodes={**dag.nodes, node: replace_struct(dag.nodes[node], **fields)})


def test_a_correct_dag_passes(dag):
    check_dag(dag)


def test_two_producers(dag):
    with pytest.raises(DirectiveError, match=r"two producers, 'F PP=0' and 'F PP=1'"):
        check_dag(changed(dag, 1, outputs=dag.nodes[0].outputs))


def test_no_producer(dag):
    with pytest.raises(DirectiveError, match=r"read by 'F PP=1', has no producer"):
        check_dag(changed(dag, 0, outputs=()))


def test_contribution_in_no_sum_and_in_two(dag):
    sums = [c for c in dag.chunks() if c.work.kind == "sum"]
    dropped = {n: c for n, c in dag.nodes.items() if c is not sums[0] and c.work.kind != "update"}
    with pytest.raises(DirectiveError, match="reaches 0 sums instead of one"):
        check_dag(replace(dag, nodes=dropped))
    again = replace_struct(sums[0], id=NodeId(999), outputs=())
    with pytest.raises(DirectiveError, match="reaches 2 sums instead of one"):
        check_dag(replace(dag, nodes={**dag.nodes, 999: again}))


def test_a_value_crosses_devices_only_by_communication(dag):
    moved = changed(changed(dag, 0, devices=(0,)), 1, devices=(1,))
    with pytest.raises(DirectiveError, match=r"from 'F PP=0' to 'F PP=1' without communication"):
        check_dag(moved)
    check_dag(derive(moved))


def test_the_cycle_is_shown_with_what_caused_each_step(dag):
    told = replace(dag, order=(OrderEdge(NodeId(2), NodeId(0), 0),), directives=("Order(...)",))
    with pytest.raises(OrderError) as caught:
        check_dag(told)
    lines = str(caught.value).splitlines()[1:]
    assert sorted(" ".join(line.split()) for line in lines) == [
        "F PP=0 before F PP=1 (data)",
        "F PP=1 before F PP=2 (data)",
        "F PP=2 before F PP=0 (directive 0: Order(...))",
    ]


def test_updates_come_after_every_reader_of_the_parameter(dag):
    order = list(topological_order(dag))
    for update in (c for c in dag.chunks() if c.work.kind == "update"):
        names = update.work.parameters
        parameters = {
            v.id for v in dag.values.values() if v.role == "parameter" and v.name in names
        }
        for chunk in dag.chunks():
            if parameters & set(chunk.inputs):
                assert order.index(chunk.id) < order.index(update.id)

"""The total order that list scheduling finds."""

import pytest
from tests.support.synthetic import chain

from piper.directives.place import Place
from piper.directives.split import Split
from piper.directives.strategy import apply
from piper.planner.streams import total_order
from piper.schedules.placements import chain as chained


@pytest.fixture
def pipeline():
    return apply(chain(3), [*chained([[0], [1], [2]]), Split({}, num_microbatches=4)])


def labels(dag, order, kind="call"):
    return [dag.nodes[n].label for n in order if dag.nodes[n].work.kind == kind]


def test_all_nodes_once_and_along_the_edges(pipeline):
    order = total_order(pipeline, dict.fromkeys(pipeline.nodes, 1.0))
    assert sorted(order) == sorted(pipeline.nodes)
    at = {node: i for i, node in enumerate(order)}
    assert all(at[b] < at[n] for n, before in pipeline.predecessors.items() for b in before)


def test_the_longest_path_goes_first():
    dag = apply(chain(2), [Place({}, [0]), Split({}, num_microbatches=4)])
    seconds = dict.fromkeys(dag.nodes, 1.0)
    # Microbatch 2 has the slowest backward, so its forward starts first.
    (slow,) = [n.id for n in dag.nodes.values() if n.label == "B PP=0 MB=2"]
    seconds[slow] = 9.0
    assert labels(dag, total_order(dag, seconds))[0] == "F PP=0 MB=2"


def test_start_times_are_those_of_a_device_that_runs_one_chunk_at_a_time(pipeline):
    # Communication costs next to nothing and each chunk 1 s: the diagonals of a pipeline, each from
    # the last stage up.
    seconds = {n.id: 1.0 if n.work.kind == "call" else 1e-9 for n in pipeline.nodes.values()}
    order = labels(pipeline, total_order(pipeline, seconds))
    at = {label: i for i, label in enumerate(order)}
    for step in range(3):
        diagonal = [at[f"F PP={s} MB={step - s}"] for s in range(step + 1)]
        assert sorted(diagonal) == list(range(sum(range(step + 1)), sum(range(step + 2))))
    for stage in range(3):
        forwards = [at[f"F PP={stage} MB={m}"] for m in range(4)]
        assert forwards == sorted(forwards)


def test_ties_are_broken_in_the_same_way_every_time(pipeline):
    seconds = dict.fromkeys(pipeline.nodes, 1.0)
    assert total_order(pipeline, seconds) == total_order(pipeline, dict(reversed(seconds.items())))

"""Strategy files in the forms of the published system load as they are, and run."""

import json
from dataclasses import replace

import pytest
import torch
from tests.equality import expert_matrix, planned
from tests.equality.matrix import adam

import piper
from piper.directives.order import Order
from piper.directives.place import Place
from piper.directives.replicate import Replicate
from piper.directives.split import Split
from piper.errors import FilterError, StrategyFileError
from piper.models import MLP, MLPConfig, mlp_loss


def write(tmp_path, contents):
    path = tmp_path / "schedule.json"
    path.write_text(contents if isinstance(contents, str) else json.dumps(contents))
    return path


def places(*groups):
    return [
        {"op": "place", "filter": {"PP": pp}, "devices": devices, "stream": "pp_stream"}
        for pp, devices in enumerate(groups)
    ]


def replicates(*groups, **options):
    return [
        {"op": "replicate", "filter": {"PP": pp}, "devices": devices, **options}
        for pp, devices in enumerate(groups)
    ]


def shards(*groups):
    return [
        {
            "op": "shard",
            "filter": {"PP": pp, "EP": "*"},
            "devices": devices,
            "stream": "ep_stream",
        }
        for pp, devices in enumerate(groups)
    ]


TWO, V = ([0, 2], [1, 3]), ([0, 2], [1, 3], [1, 3], [0, 2])
SPLIT = {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 2}
REDUCE, GATHER = {"reduce_stream": "dp_stream"}, {"gather_stream": "dp_stream"}
ZERO_3 = {**REDUCE, **GATHER, "shard_grads": True, "shard_params": True}


def order(*groups):
    """``order("0F1", "0B0 1F1")``: groups of stage, pass, microbatch."""
    filters = [
        [{"PP": int(c[0]), "MB": int(c[-1]), "PASS": c[1:-1]} for c in group.split()]
        for group in groups
    ]
    return {"op": "order", "filters": filters}


ORDERS = [order("0F0", "0F1", "0B0", "0B1"), order("1F0", "1B0 1F1", "1B1")]

FILES = {
    "stages": places([0], [1]),
    "replicas": [*places(*TWO), *replicates(*TWO, **REDUCE)],
    "buckets": [*places(*TWO), *replicates(*TWO, **REDUCE, bucket_size=25)],
    "ZeRO-2": [*places(*TWO), *replicates(*TWO, **REDUCE, shard_grads=True), SPLIT],
    "ZeRO-3 on one stream": [*places(*TWO), *replicates(*TWO, **ZERO_3), SPLIT, *ORDERS],
    "overlap": [*places(*TWO), *replicates(*TWO, **REDUCE), SPLIT, *ORDERS],
    "looped": [*places(*TWO, *TWO), *replicates(*TWO, *TWO, **REDUCE), SPLIT],
    "V": [*places(*V), *replicates(*V, **REDUCE), SPLIT],
}


@pytest.mark.parametrize("name", FILES)
def test_files_load_and_run(tmp_path, name):
    strategy = piper.load_strategy(write(tmp_path, FILES[name]))
    assert len(strategy) == len(FILES[name])
    stages = sum(isinstance(d, Place) for d in strategy)
    model = MLP(MLPConfig(in_features=3, width=4, out_features=2, num_layers=4, num_stages=stages))
    report = piper.check(
        model,
        mlp_loss,
        strategy,
        (torch.randn(8, 3), torch.randn(8, 2)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    )
    report.require()


@pytest.mark.parametrize("groups", [TWO, V], ids=["stages", "V"])
@pytest.mark.parametrize("options", [REDUCE, ZERO_3], ids=["replicas", "ZeRO-3"])
def test_files_with_experts_load_and_run(tmp_path, groups, options):
    contents = [*places(*groups), *replicates(*groups, **options), *shards(*groups), SPLIT]
    contents += ORDERS if groups is TWO else []
    strategy = piper.load_strategy(write(tmp_path, contents))
    assert len(strategy) == len(contents)
    stages, pieces, form = len(groups), 4, "dropless"
    captured = expert_matrix.captured(stages, form)
    rows = pieces * expert_matrix.ROWS
    plan = piper.plan(piper.apply(replace(captured.dag, batch_size=rows), strategy))
    piper.verify(plan)
    assert len(plan.dag.expert_groups) == 2 * stages
    model, batches = expert_matrix.model_of(stages, form), expert_matrix.batches(pieces)
    found = planned.train(plan, captured.constants, model, batches, adam)
    expected = expert_matrix.expected(stages, form, pieces)
    assert planned.compare(found, expected).worst <= expert_matrix.TOLERANCE


def test_filters_as_lists_of_pairs(tmp_path):
    path = write(
        tmp_path,
        """[
        {"op": "place", "filter": [["PP", 0]], "device": [0, 2], "stream": "pp_stream"},
        {"op": "place", "filter": [["PP", "1"]], "devices": [1, 3]},
        {"op": "replicate", "filter": [["PP", "*"]], "devices": "placed"},
        {"op": "split", "filter": [], "dim_name": "MB", "num_microbatches": 2},
        {"op": "order", "filters": [[["PP", 1], ["MB", 0], ["PASS", "F"]],
                                    [[["PP", 1], ["MB", 0], ["PASS", "B"]], [["PP", 1], ["MB", 1], ["PASS", "F"]]],
                                    [{"PP": "1", "MB": 1, "PASS": "B"}],
                                    []]}
        ]""",
    )
    assert piper.load_strategy(path) == [
        Place({"PP": 0}, [0, 2], stream="pp_stream"),
        Place({"PP": 1}, [1, 3]),
        Replicate({"PP": "*"}),
        Split({}, "MB", 2),
        Order(
            [
                [{"PP": 1, "MB": 0, "PASS": "F"}],
                [{"PP": 1, "MB": 0, "PASS": "B"}, {"PP": 1, "MB": 1, "PASS": "F"}],
                [{"PP": 1, "MB": 1, "PASS": "B"}],
                [],
            ]
        ),
    ]


@pytest.mark.parametrize(
    ("directive", "complaint"),
    [
        (
            order("0FWD0"),
            "$[0].filters[0][0].PASS: unknown pass 'FWD' (did you mean 'F'?); passes: F, B, BI, BW, UPDATE",
        ),
        (order("0F0", "0F1 0BWD1"), "$[0].filters[1][1].PASS: unknown pass 'BWD' (did you mean 'BW'"),
        (
            {"op": "order", "filters": [[["PASS", "I"], ["MB", 0]]]},
            "$[0].filters[0].PASS: unknown pass 'I' (did you mean 'BI'?)",
        ),
        (
            {"op": "order", "filters": [[{"PASS": ["B", "W"]}]]},
            "$[0].filters[0][0].PASS: unknown pass 'W' (did you mean 'BW'?)",
        ),
        (
            {"op": "order", "filters": [{"PP": 0, "PASS": "F"}]},
            "$[0].filters[0]: expected a group, which is a list of filters that may overlap, found a filter",
        ),
        (
            {"op": "place", "filter": [["PP", 0], ["PP", 1]], "devices": [0]},
            "$[0].filter: the filter names tag 'PP' twice",
        ),
        ({"op": "place", "filter": ["PP", 0], "devices": [0]}, "Expected `object`, got `array`"),
        ({"op": "oder", "filters": []}, "$[0].op: unknown directive 'oder' (did you mean 'order'?)"),
        (
            {"op": "split", "filter": [], "num_microbatchs": 2},
            "$[0].num_microbatchs: directive 'split' has no such field (did you mean 'num_microbatches'?)",
        ),
    ],
)  # fmt: skip
def test_mistakes_say_where(tmp_path, directive, complaint):
    with pytest.raises(StrategyFileError) as caught:
        piper.load_strategy(write(tmp_path, [directive]))
    assert complaint in str(caught.value)


def test_a_tag_that_the_model_does_not_have_is_named_with_the_nearest(tmp_path):
    contents = [*places([0]), SPLIT, {"op": "order", "filters": [[{"PPP": 0, "MB": 0}]]}]
    strategy = piper.load_strategy(write(tmp_path, contents))
    model = MLP(MLPConfig(in_features=3, width=4, out_features=2, num_layers=2, num_stages=1))
    dag = piper.capture(model, mlp_loss, (torch.randn(4, 3), torch.randn(4, 2)))
    with pytest.raises(FilterError, match=r"directive 2, Order.*'PPP', .* .did you mean 'PP'"):
        piper.apply(dag, strategy)

"""Strategies as files and as programs."""

import json

import pytest
from tests.support.synthetic import chain

from piper.directives.base import DIRECTIVES
from piper.directives.offload import Offload
from piper.directives.order import Order
from piper.directives.place import Place
from piper.directives.recompute import Recompute
from piper.directives.replicate import Replicate
from piper.directives.shard import Shard
from piper.directives.split import Split
from piper.directives.strategy import apply, dump_strategy, load_strategy
from piper.errors import FilterError, PlacementError, StrategyFileError
from piper.schedules.interleaved import interleaved_one_f_one_b

STRATEGY = [
    Place({"PP": 0}, [0, 1]),
    Place({"PP": [1, 2], "EP": "*", "X": None}, [2, 3], stream="side"),
    Replicate({}),
    Replicate({"PP": 0}, [0, 1], bucket_size=2.5, reduce_stream="r", replicated_buffers="mean"),
    Split({}, num_microbatches=8),
    Split({"PP": "*"}, "SUB", 2),
    Shard({"EP": "*"}),
    Shard({"EP": 0}, [[0, 1], [2, 3]], stream="x", capacity_factor=1.5, replicated=["*.gain"]),
    Recompute({"PP": 0}),
    Recompute({"PP": [1, 2]}, save=["mm", "matmul"]),
    Offload({"PP": 0}),
    Offload({"PP": 1}, stream="host"),
    Order([[{"PP": 0, "MB": 0, "PASS": "F"}], [], [{"COMM": "all_reduce"}, {"PASS": ["F", "B"]}]]),
    *interleaved_one_f_one_b(2, 2, 4),
]


def write(tmp_path, contents):
    path = tmp_path / "strategy.json"
    path.write_text(contents if isinstance(contents, str) else json.dumps(contents))
    return path


def test_round_trip_of_every_directive(tmp_path):
    assert {type(d) for d in STRATEGY} == set(DIRECTIVES.values())
    path = tmp_path / "strategy.json"
    dump_strategy(STRATEGY, path)
    assert load_strategy(path) == STRATEGY
    again = tmp_path / "again.json"
    dump_strategy(load_strategy(path), again)
    assert again.read_bytes() == path.read_bytes()
    assert [item["op"] for item in json.loads(path.read_text())][:5] == [
        "place",
        "place",
        "replicate",
        "replicate",
        "split",
    ]


def test_an_empty_strategy_round_trips(tmp_path):
    path = tmp_path / "strategy.json"
    dump_strategy([], path)
    assert load_strategy(path) == []


def test_files_written_by_hand(tmp_path):
    path = write(
        tmp_path,
        """[
        {"op": "place", "filter": {"PP": 0}, "devices": [0, 1]},
        {"op": "place", "filter": {"PP": 1}, "devices": [2, 3], "stream": "p2p"},
        {"op": "replicate", "filter": {"PP": 0}, "devices": [0, 1], "bucket_size": 25},
        {"op": "replicate", "filter": {"PP": 1}, "devices": "placed", "reduce_stream": "ar"},
        {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 2},
        {"op": "order", "filters": [[{"PP": 0, "MB": 0, "PASS": "F"}],
                                    [{"PP": 0, "MB": 1, "PASS": "F"}, {"PP": 0, "MB": 0, "PASS": "B"}]]}
        ]""",
    )
    strategy = load_strategy(path)
    assert strategy == [
        Place({"PP": 0}, [0, 1]),
        Place({"PP": 1}, [2, 3], "p2p"),
        Replicate({"PP": 0}, [0, 1], bucket_size=25.0),
        Replicate({"PP": 1}, reduce_stream="ar"),
        Split({}, "MB", 2),
        Order(
            [
                [{"PP": 0, "MB": 0, "PASS": "F"}],
                [{"PP": 0, "MB": 1, "PASS": "F"}, {"PP": 0, "MB": 0, "PASS": "B"}],
            ]
        ),
    ]
    assert apply(chain(2), strategy).num_microbatches == 2


@pytest.mark.parametrize(
    ("contents", "complaint"),
    [
        ([{"op": "place", "filter": {}, "devices": [0]}, {"op": "plcae"}],
         "strategy.json: $[1].op: unknown directive 'plcae' (did you mean 'place'?)"),
        ([{"filter": {}}], 'strategy.json: $[0]: every directive has a field "op"'),
        ([{"op": "split", "filter": {}, "num_microbatch": 4}],
         "json: $[0].num_microbatch: directive 'split' has no such field (did you mean 'num_microbatches'?); fields: filter,"),
        ([{"op": "place", "filter": {}}], "strategy.json: $[0]: Object missing required field `devices`"),
        ([{"op": "place", "filter": {}, "devices": ["a"]}], "got `str` - at `$.devices[0]`"),
        ([{"op": "order", "filters": [[{"MB": 0.5}]]}], "at `$.filters[0][0][...]`"),
        ([{"op": "replicate", "filter": {}, "devices": "everywhere"}], "at `$.devices`"),
        ({"op": "place"}, "must be a JSON list of objects"),
        ("[{", "must be a JSON list of objects"),
    ],
)  # fmt: skip
def test_malformed_files_say_where(tmp_path, contents, complaint):
    with pytest.raises(StrategyFileError) as caught:
        load_strategy(write(tmp_path, contents))
    assert complaint in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(StrategyFileError, match=r"cannot read strategy file .*nothing\.json"):
        load_strategy(tmp_path / "nothing.json")


def test_directives_are_applied_in_program_order():
    # The second placement speaks of microbatches, which exist only after the split.
    split, place = Split({}, num_microbatches=2), Place({"MB": 0}, [0])
    apply(chain(2), [split, place])
    with pytest.raises(FilterError, match=r"directive 0, Place\(.*'MB', which no node has"):
        apply(chain(2), [place, split])


def test_numbers_count_on_over_several_calls():
    dag = apply(chain(2), [Split({}, num_microbatches=2)])
    dag = apply(dag, [Place({"PP": 0}, [0])])
    assert [text.split("(")[0] for text in dag.directives] == ["Split", "Place"]
    with pytest.raises(PlacementError, match=r"^directive 2, Place"):
        apply(dag, [Place({"PP": 0}, [1])])


def test_the_given_dag_is_not_changed():
    dag = chain(2)
    nodes, values = dict(dag.nodes), dict(dag.values)
    apply(dag, [Place({}, [0]), Split({}, num_microbatches=2)])
    assert (dag.nodes, dag.values, dag.directives) == (nodes, values, ())


def test_an_error_after_several_directives_names_them_all():
    strategy = [Place({"PP": 0}, [0]), Place({"PP": 1}, [1, 2]), Place({"PP": 2}, [3])]
    with pytest.raises(PlacementError, match=r"^directives 0 to 2, the last of them Place\("):
        apply(chain(3), strategy)

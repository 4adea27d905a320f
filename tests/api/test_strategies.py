import pytest

from piper.api.strategies import pipeline
from piper.directives.place import Place
from piper.directives.replicate import Replicate
from piper.directives.split import Split
from piper.errors import DirectiveError, PlacementError, ScheduleError
from piper.schedules import (
    dualpipe,
    interleaved_one_f_one_b,
    looped,
    one_f_one_b,
    two_way,
    v_shape,
    zbv,
)

PAIRS = [[0, 1], [2, 3]]


def test_pipeline_with_data_parallelism():
    assert pipeline("1f1b", PAIRS, 8, bucket_size=25.0, replicated_buffers="mean") == [
        Place({"PP": 0}, devices=[0, 1]),
        Place({"PP": 1}, devices=[2, 3]),
        Replicate({}, devices="placed", bucket_size=25.0, replicated_buffers="mean"),
        Split({}, dim_name="MB", num_microbatches=8),
        *one_f_one_b(num_stages=2, num_microbatches=8),
    ]


def test_one_device_per_group_is_not_replicated():
    strategy = pipeline("gpipe", [[0], [1], [2]], 4)
    assert not any(isinstance(d, Replicate) for d in strategy)
    assert [d.devices for d in strategy if isinstance(d, Place)] == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("zero", "flags"),
    [
        (0, {}),
        (1, {"shard_optimizer": True}),
        (2, {"shard_grads": True}),
        (3, {"shard_params": True, "gather_stream": "early"}),
    ],
)
def test_zero_is_what_the_replicas_shard(zero, flags):
    stream = flags.get("gather_stream")
    strategy = pipeline("1f1b", PAIRS, 4, zero=zero, gather_stream=stream)
    assert [d for d in strategy if isinstance(d, Replicate)] == [Replicate({}, **flags)]


def test_virtual_stages_are_per_group():
    assert pipeline("interleaved_1f1b", [[0], [1]], 4, num_virtual_stages=3) == [
        *looped([[0], [1]], 3),
        Split({}, dim_name="MB", num_microbatches=4),
        *interleaved_one_f_one_b(2, 3, 4),
    ]


@pytest.mark.parametrize("num_virtual_stages", [None, 2])
def test_schedules_in_a_v_have_two_stages_per_group(num_virtual_stages):
    strategy = pipeline("zbv", PAIRS, 4, num_virtual_stages=num_virtual_stages)
    assert strategy == [*v_shape(PAIRS), Replicate({}), Split({}, "MB", 4), *zbv(2, 4)]


def test_dualpipe_places_microbatches():
    split = Split({}, "SAMPLE", num_microbatches=6)
    tags = {"stage_tag": "STAGE", "microbatch_tag": "SAMPLE"}
    assert pipeline("dualpipe", PAIRS, 6, **tags) == [
        split,
        *two_way(PAIRS, 6, **tags),
        Replicate({}),
        *dualpipe(2, 6, **tags),
    ]


def test_tags_reach_every_directive():
    strategy = pipeline("1f1b", PAIRS, 2, stage_tag="STAGE", microbatch_tag="SAMPLE")
    assert strategy == [
        Place({"STAGE": 0}, devices=[0, 1]),
        Place({"STAGE": 1}, devices=[2, 3]),
        Replicate({}),
        Split({}, dim_name="SAMPLE", num_microbatches=2),
        *one_f_one_b(2, 2, stage_tag="STAGE", microbatch_tag="SAMPLE"),
    ]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (("1f1", PAIRS, 8), {}, ScheduleError, "unknown schedule '1f1' .did you mean '1f1b'"),
        (("1f1b", PAIRS, 0), {}, ScheduleError, "num_microbatches must be at least 1, found 0"),
        (("1f1b", [[0, 1], [2]], 8), {}, PlacementError, "group 0 has 2, group 1 has 1"),
        (("1f1b", [[0, 1], [1, 2]], 8), {}, PlacementError, "device 1 is in group 0 and in"),
        (("1f1b", [], 8), {}, PlacementError, "at least one device group"),
        (
            ("gpipe", PAIRS, 8),
            {"num_virtual_stages": 2},
            ScheduleError,
            "one stage per group, found num_virtual_stages=2; .* interleaved_1f1b, interleaved_zero",
        ),
        (
            ("zbv", PAIRS, 8),
            {"num_virtual_stages": 1},
            ScheduleError,
            "two stages per group, found num_virtual_stages=1; leave it at 2 or",
        ),
        (("dualpipe", PAIRS, 7), {}, PlacementError, "must be even and at least 2; found 7"),
        (("dualpipev", PAIRS, 3), {}, ScheduleError, "4 here; found 3; nearest: 4"),
        (
            ("looped_bfs", PAIRS, 8),
            {"num_virtual_stages": 0},
            PlacementError,
            "at least 1, found 0",
        ),
        (("1f1b", PAIRS, 8), {"bucket_size": 0}, DirectiveError, "positive, found 0"),
        (("1f1b", [[0]], 8), {"bucket_size": -1}, DirectiveError, "positive, found -1"),
        (("1f1b", PAIRS, 8), {"zero": 4}, DirectiveError, "zero is 0 .*found 4"),
        (("1f1b", PAIRS, 8), {"microbatch_tag": "PP"}, ScheduleError, "must differ"),
    ],
)
def test_mistakes_are_named(arguments, options, error, message):
    with pytest.raises(error, match=message):
        pipeline(*arguments, **options)

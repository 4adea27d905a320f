import math

import pytest
from msgspec.structs import replace
from tests.visualize.timelines import pipeline

import piper
from piper.errors import PictureError
from piper.schedules import one_f_one_b


@pytest.fixture(scope="module")
def step():
    return pipeline(one_f_one_b(2, 2), stages=2)


def with_box(step, **fields):
    first = step.devices[0]
    lane = first.lanes[0]
    lane = replace(lane, boxes=(replace(lane.boxes[0], **fields), *lane.boxes[1:]))
    return replace(
        step, devices=(replace(first, lanes=(lane, *first.lanes[1:])), *step.devices[1:])
    )


@pytest.mark.parametrize("kind", ["html", "svg", "json"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"end": math.inf}, "'F PP=0 MB=0' on device 0, instruction 0, runs from 0 s to inf s"),
        ({"end": math.nan}, "runs from 0 s to nan s"),
        ({"start": 2.0, "end": 1.0}, "runs from 2 s to 1 s"),
        ({"flops": math.inf}, "counts inf FLOPs"),
        ({"flops": math.nan}, "counts nan FLOPs"),
    ],
)
def test_a_box_that_cannot_be_drawn_is_named(step, kind, fields, message, tmp_path):
    with pytest.raises(PictureError, match=message):
        piper.visualize(with_box(step, **fields), tmp_path / f"x.{kind}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seconds", [0.0, math.inf, math.nan])
def test_a_step_takes_time(step, seconds, tmp_path):
    with pytest.raises(
        PictureError, match=f"takes {seconds:g} s: expected more than 0, and finite"
    ):
        piper.visualize(replace(step, seconds=seconds), tmp_path / "x.html")


def test_counts_are_finite(step, tmp_path):
    with pytest.raises(PictureError, match="found inf FLOPs and MFU"):
        piper.visualize(replace(step, flops=math.inf), tmp_path / "x.html")


def test_a_box_may_take_no_time(step, tmp_path):
    for kind in ("html", "svg", "json"):
        piper.visualize(with_box(step, end=0.0), tmp_path / f"x.{kind}")

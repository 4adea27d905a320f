"""Streams: work is on the stream that the user names, waits are where edges cross streams, what may
be in flight at once has communicators of its own.
"""

from dataclasses import replace
from itertools import combinations

import pytest
from msgspec.structs import replace as replace_struct
from tests.cases.equal import assert_equal, mse, randn
from tests.equality.split_matrix import WIDTH, Normed, Stages
from tests.support.synthetic import chain
from tests.support.zero_bubble import zb_h1

import piper
from piper.directives.place import Place
from piper.directives.replicate import Replicate
from piper.directives.split import Split
from piper.directives.strategy import apply
from piper.ops.compute import Compute
from piper.ops.wait import Wait
from piper.planner import plan
from piper.verify import find_problems, verify


def planned(*, first="down", second="up", microbatches=2, **streams):
    """Two stages on two replicas each; the stages' messages are on the streams *first* and
    *second*.
    """
    strategy = [
        Place({"PP": 0}, [0, 1], stream=first),
        Place({"PP": 1}, [2, 3], stream=second),
        Replicate({}, shard_params=True, **streams),
        Split({}, num_microbatches=microbatches),
        *zb_h1(2, microbatches),
    ]
    made = plan(apply(chain(2, weighted=True), strategy))
    verify(made)
    return made


def test_each_kind_of_work_is_on_its_stream():
    made = planned(gather_stream="collect", reduce_stream="add")
    for mine, down, up in zip(made.devices, ("0>2", "1>3") * 2, ("2>0", "3>1") * 2, strict=True):
        found: dict[str, set[str]] = {}
        for i in mine.instructions:
            if i.rendezvous() or isinstance(i, Compute):
                found.setdefault(i.op, set()).add(i.stream)
        sends, receives = (f"down:{down}", f"up:{up}")[:: 1 if mine.device < 2 else -1]
        assert found == {
            "compute": {"compute"},
            "all_gather_bucket": {"collect"},
            "reduce_scatter_bucket": {"add"},
            "send": {sends},
            "post_receive": {receives},
            **({"all_reduce_bucket": {"add"}} if mine.device >= 2 else {}),  # of the loss's weight
        }


def test_a_stage_may_send_its_values_on_different_streams():
    """Forward and backward of one stage, each on its own."""
    strategy = [
        Place({"PP": 0, "PASS": "F"}, [0], stream="a"),
        Place({"PP": 0, "PASS": "B"}, [0]),
        Place({"PP": [1, 2], "PASS": "F"}, [1], stream="c"),
        Place({"PP": [1, 2], "PASS": "B"}, [1], stream="d"),
        Split({}, num_microbatches=3),
    ]
    made = plan(apply(chain(3, skip=True, batch_size=24), strategy))
    verify(made)
    lanes = {(c.name.split(":")[0], c.members) for c in made.communicators}
    assert {("a", (0, 1)), ("d", (1, 0))} <= lanes
    assert "c" not in {name for name, _ in lanes}  # the last stages keep their activations


@pytest.mark.parametrize(
    "streams",
    [
        {},
        {"gather_stream": "one", "reduce_stream": "one"},
        {"gather_stream": "down", "reduce_stream": "up"},
        {"gather_stream": "compute", "reduce_stream": "compute"},
        {"first": "compute", "second": "compute"},
        {"first": "gather", "second": "gather"},
    ],
    ids=str,
)
def test_waits_are_where_edges_cross_streams_and_none_can_be_left_out(streams):
    """Each wait is for an event of another stream. Without any one of them the race detector, or
    another check, refuses the plan (unless the next instruction waits for something later on that
    other stream).
    """
    made = planned(**streams)
    for mine in made.devices:
        recorded = {i.record: i.stream for i in mine.instructions if i.record is not None}
        for i in mine.instructions:
            if isinstance(i, Wait):
                assert recorded[i.event] != i.stream
    device = made.devices[0]
    for k, i in enumerate(device.instructions):
        if isinstance(i, Wait) and _source(device, i) != _source(
            device, device.instructions[k + 1]
        ):
            rest = (*device.instructions[:k], *device.instructions[k + 1 :])
            spoiled = _with_instructions(made, device, rest)
            assert find_problems(spoiled)


def _source(device, instruction):
    """The streams that a wait joins: its own, and that of what it waits for."""
    if not isinstance(instruction, Wait):
        return None
    (cause,) = [i for i in device.instructions if i.record == instruction.event]
    return instruction.stream, cause.stream


def _with_instructions(made, device, instructions):
    changed = replace_struct(device, instructions=instructions)
    return replace(made, devices=(changed, *made.devices[1:]))


def test_what_may_be_in_flight_at_once_shares_no_communicator():
    """One communicator is one kind of operation of one group on one stream: so its order is the
    stream's on every member.
    """
    made = planned(gather_stream="one", reduce_stream="one")
    uses: dict[str, set[tuple[str, str, tuple[int, ...]]]] = {}
    for mine in made.devices:
        for i in mine.instructions:
            if (meeting := i.rendezvous()) is not None:
                kind = "message" if meeting.role in ("send", "receive") else meeting.role
                use = (kind, i.stream, meeting.members)
                uses.setdefault(meeting.communicator, set()).add(use)
    assert all(len(found) == 1 for found in uses.values())
    for (one, a), (two, b) in combinations(uses.items(), 2):
        assert a != b, (one, two)


@pytest.mark.parametrize(
    "streams",
    [
        {"gather_stream": "one", "reduce_stream": "one"},
        {"gather_stream": "compute", "reduce_stream": "compute"},
    ],
    ids=str,
)
def test_the_numbers_do_not_depend_on_streams(streams):
    strategy = [
        piper.Place({"PP": 0}, [0, 1], stream="compute"),
        piper.Place({"PP": 1}, [2, 3], stream="one"),
        piper.Replicate({}, shard_params=True, **streams),
        piper.Split({}, num_microbatches=3),
        *zb_h1(2, 3),
    ]
    batch = (randn(12, WIDTH), randn(12, WIDTH, seed=1))
    assert_equal(Stages(2, lambda _: Normed()), mse, strategy, batch, delay=0.002, poison=True)

from collections import defaultdict
from itertools import pairwise

import pytest
from tests.schedules import unit_time
from tests.verify.plans import CASES, case, chain, drop, find, interleaved, make, pipeline

from piper.errors import PlanError
from piper.ops.all_reduce import AllReduceBucket
from piper.ops.compute import Compute
from piper.ops.p2p import PostReceive, Send
from piper.ops.wait import Wait
from piper.schedules.interleaved import interleaved_one_f_one_b
from piper.schedules.one_f_one_b import one_f_one_b
from piper.simulate.playback import play


def unit(device, instruction):
    return 1.0 if isinstance(instruction, Compute) else 0.0


def varied(device, instruction):
    """Something different for everything."""
    return 1.0 + device / 8 + (instruction.node % 7) / 16 + len(instruction.op) / 32


def starts(plan, timelines):
    """Start of each chunk, named as in unit_time."""
    found = {}
    for timeline in timelines:
        for played in timeline:
            if isinstance(played.instruction, Compute):
                node = plan.dag.nodes[played.instruction.node]
                tags = dict(node.tags)
                found[node.pass_.value, tags["PP"], tags["MB"]] = played.start
    return found


@pytest.mark.parametrize(
    ("stages", "strategy", "orders"),
    [
        (2, pipeline(2, microbatches=3), one_f_one_b(2, 3)),
        (4, pipeline(4, microbatches=8), one_f_one_b(4, 8)),
        (4, interleaved(2, 2, 4), interleaved_one_f_one_b(2, 2, 4)),
    ],
)
def test_chunks_start_when_the_schedule_says(stages, strategy, orders):
    plan = make(chain(stages, 24), strategy)
    ranks = [unit_time.chunks(order) for order in orders]
    assert starts(plan, play(plan, unit)) == unit_time.run(ranks, stages).start


def test_a_message_takes_its_time():
    plan = make(chain(2, 16), pipeline(2, microbatches=1))

    def durations(device, instruction):
        return 0.25 if isinstance(instruction, (Send, PostReceive)) else unit(device, instruction)

    found = starts(plan, play(plan, durations))
    assert found == {("F", 0, 0): 0, ("F", 1, 0): 1.25, ("B", 1, 0): 2.25, ("B", 0, 0): 3.5}


def test_a_collective_starts_with_the_last_member_and_takes_as_long_as_the_slowest():
    plan = make(chain(1, 16), pipeline(1, replicas=2, microbatches=1))

    def durations(device, instruction):
        if isinstance(instruction, AllReduceBucket):
            return 3.0 + device
        return (10.0 if device == 0 else 1.0) if isinstance(instruction, Compute) else 0.0

    reductions = [
        (played.start, played.end)
        for timeline in play(plan, durations)
        for played in timeline
        if isinstance(played.instruction, AllReduceBucket)
    ]
    assert reductions == [(20.0, 24.0), (20.0, 24.0)]


@pytest.mark.parametrize("name", CASES)
def test_streams_waits_and_meetings_are_kept(name):
    plan = case(name)
    timelines = play(plan, varied)
    meetings = defaultdict(list)
    for mine, timeline in zip(plan.devices, timelines, strict=True):
        assert [played.instruction for played in timeline] == list(mine.instructions)
        recorded, counts, streams = {}, defaultdict(int), defaultdict(list)
        for played in timeline:
            instruction = played.instruction
            streams[instruction.stream].append(played)
            if instruction.record is not None:
                recorded[instruction.record] = played.end
            if isinstance(instruction, Wait):
                assert played.start >= recorded[instruction.event]
            if (meeting := instruction.rendezvous()) is not None:
                meetings[meeting.communicator, counts[meeting.communicator]].append(played)
                counts[meeting.communicator] += 1
        for stream in streams.values():
            assert all(one.end <= two.start for one, two in pairwise(stream))
    for together in meetings.values():
        assert len({(played.start, played.end) for played in together}) == 1
        assert len(together) == len(together[0].instruction.rendezvous().members)


def test_a_plan_that_cannot_end_is_refused():
    plan = case("1f1b")
    with pytest.raises(PlanError, match="devices 0, 1 wait for each other"):
        play(drop(plan, 0, find(plan, 0, Send)), unit)

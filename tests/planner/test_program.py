"""The builder of one device's program, by itself."""

import pytest
from msgspec.structs import replace

from piper.dtypes import DType
from piper.ids import COMPUTE, DeviceId, NodeId, Stream, ValueId
from piper.ir.body import TensorSpec
from piper.ir.dag import Comm, Pass, Role, Value
from piper.ops.base import Message, Site
from piper.ops.compute import Compute
from piper.ops.free import Free
from piper.ops.p2p import PostReceive, Send, Transfer
from piper.ops.wait import Wait
from piper.planner.early import Early
from piper.planner.program import Program

SPEC = TensorSpec((4,), DType.FLOAT32)
MESSAGE = Message((4,), DType.FLOAT32)
OUT, IN = Stream("p2p:0>1"), Stream("p2p:1>0")


def value(number, role=Role.ACTIVATION):
    return Value(ValueId(number), SPEC, role)


def compute(inputs, outputs):
    return Compute(
        node=NodeId(0), stream=COMPUTE, body="b", inputs=inputs, outputs=outputs, microbatch=0
    )


def send(slot):
    return Send(
        node=NodeId(1),
        stream=OUT,
        communicator=OUT,
        sender=DeviceId(0),
        receiver=DeviceId(1),
        message=MESSAGE,
        slot=slot,
    )


def receive(slot):
    return PostReceive(
        node=NodeId(2),
        stream=IN,
        communicator=IN,
        sender=DeviceId(1),
        receiver=DeviceId(0),
        message=MESSAGE,
        slot=slot,
    )


@pytest.fixture
def program():
    return lambda **uses: Program(DeviceId(0), {ValueId(int(v[1:])): n for v, n in uses.items()})


def kinds(program):
    return [type(i) for i in program.finish().instructions]


def test_a_wait_only_where_a_read_crosses_streams(program):
    p = program(v0=2)
    slot = p.allocate(value(0), MESSAGE)
    p.emit(receive(slot))
    assert kinds(p) == [PostReceive]
    p.emit(compute((slot,), ()))
    p.emit(compute((slot,), ()))
    post, wait, one, two = p.finish().instructions
    assert isinstance(wait, Wait)
    assert (wait.stream, wait.event) == (COMPUTE, post.record)
    assert (one.record, two.record) == (None, None)


def test_a_stream_that_waited_for_later_work_need_not_wait_for_earlier(program):
    p = program(v0=1, v1=1)
    early, late = (p.allocate(value(v), MESSAGE) for v in (0, 1))
    p.emit(receive(early))
    p.emit(receive(late))
    p.emit(compute((late,), ()))
    p.emit(compute((early,), ()))
    assert kinds(p).count(Wait) == 1


def test_a_free_waits_for_readers_on_other_streams(program):
    p = program(v0=2)
    slot = p.allocate(value(0), MESSAGE)
    p.emit(compute((), (slot,)))
    p.emit(send(slot), consume=(slot,))
    p.emit(compute((), ()))
    p.emit(compute((slot,), ()), consume=(slot,))
    instructions = p.finish().instructions
    assert [type(i) for i in instructions] == [Compute, Wait, Send, Compute, Compute, Wait, Free]
    sent, waited, free = instructions[2], instructions[5], instructions[6]
    assert (waited.stream, waited.event) == (COMPUTE, sent.record)
    assert (free.stream, free.slots) == (COMPUTE, (slot,))


def test_a_free_that_would_wait_for_what_was_just_issued_is_put_off(program):
    # A value sent on two streams: freed after the next chunk, before the one after that.
    p = program(v0=2, v1=1, v2=1)
    sent, one, two = (p.allocate(value(v), MESSAGE) for v in range(3))
    p.emit(compute((), (sent,)))
    p.emit(send(sent), consume=(sent,))
    p.emit(replace(send(sent), stream=Stream("p2p:0>2")), consume=(sent,))
    p.emit(compute((), (one,)))
    p.emit(compute((), (two,)))
    instructions = p.finish().instructions
    assert [type(i) for i in instructions] == [
        *(Compute, Wait, Send, Wait, Send),
        *(Compute, Wait, Free, Compute),
    ]
    assert {instructions[6].stream, instructions[7].stream} == {"p2p:0>2"}  # compute goes on


def test_what_was_put_off_is_freed_at_the_end(program):
    p = program(v0=2)
    sent = p.allocate(value(0), MESSAGE)
    p.emit(compute((), (sent,)))
    p.emit(send(sent), consume=(sent,))
    p.emit(replace(send(sent), stream=Stream("p2p:0>2")), consume=(sent,))
    assert kinds(p) == [Compute, Wait, Send, Wait, Send, Wait, Free]


def test_overwriting_waits_for_readers(program):
    p = program(v0=2)
    slot = p.allocate(value(0), MESSAGE)
    p.emit(compute((), (slot,)))
    p.emit(send(slot))
    p.emit(compute((), (slot,)))
    assert kinds(p) == [Compute, Wait, Send, Wait, Compute]


def test_state_is_never_freed(program):
    p = program(v0=1)
    slot = p.allocate(value(0, Role.PARAMETER), MESSAGE)
    p.emit(compute((slot,), ()), consume=(slot,))
    assert kinds(p) == [Compute]


def test_an_alias_keeps_its_slot_until_its_own_readers_are_done(program):
    p = program(v0=1, v1=2)
    slot = p.allocate(value(0), MESSAGE)
    p.emit(compute((), (slot,)))
    p.alias(ValueId(1), slot)
    assert p.slot(ValueId(1)) == slot
    p.emit(compute((slot,), ()), consume=(slot,))
    assert Free not in kinds(p)
    p.emit(compute((slot,), ()), consume=(slot,))
    assert kinds(p)[-1] is Free


def test_what_nothing_reads_is_dropped(program):
    p = program(v0=1)
    used, unused = (p.allocate(value(v), MESSAGE) for v in (0, 1))
    p.emit(compute((), (used, unused)))
    p.drop_unread((used, unused))
    assert p.finish().instructions[-1].slots == (unused,)


class TestEarly:
    """Five messages of 16 bytes, needed in the order 0, 1, 2, 3, 4."""

    def start(self, limit):
        p = Program(DeviceId(0), {})
        ahead = Early(limit)
        posted = []

        def locate(comm, group, position, program):
            posted.append(comm.id)
            site_slot = program.allocate(value(int(comm.id)), MESSAGE)
            return Site(comm.id, IN, None, IN, group, position, (), (site_slot,), (MESSAGE,))

        for number in range(5):
            comm = Comm(
                NodeId(number), (), Pass.FORWARD, (), (), Transfer(), ((1, 0),), Stream("p2p")
            )
            ahead.expect(comm, (DeviceId(1), DeviceId(0)), 1, MESSAGE.nbytes, locate)
        return p, ahead, posted

    def test_as_many_as_the_limit_allows(self):
        p, ahead, posted = self.start(limit=40)
        ahead.advance(p)
        assert posted == [0, 1]
        ahead.advance(p)
        assert posted == [0, 1]

    def test_a_needed_message_makes_room(self):
        p, ahead, posted = self.start(limit=40)
        ahead.advance(p)
        ahead.require(NodeId(0), p)
        assert posted == [0, 1]
        ahead.advance(p)
        assert posted == [0, 1, 2]

    @pytest.mark.parametrize("limit", [0, 15])
    def test_the_one_that_is_needed_is_posted_whatever_the_limit(self, limit):
        p, ahead, posted = self.start(limit)
        ahead.advance(p)
        assert posted == []
        for number in range(5):
            ahead.require(NodeId(number), p)
            assert posted == list(range(number + 1))

    def test_all_at_once(self):
        p, ahead, posted = self.start(limit=80)
        ahead.advance(p)
        assert posted == [0, 1, 2, 3, 4]
        assert kinds(p) == [PostReceive] * 5

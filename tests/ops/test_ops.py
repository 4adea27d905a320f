"""What all operations have in common."""

import msgspec
import pytest

import piper.ops  # noqa: F401  (registers the operations)
from piper.dtypes import DType
from piper.errors import PlanError
from piper.ids import DeviceId, EventId, NodeId, Slot, Stream
from piper.ops.accumulate import Accumulate
from piper.ops.all_reduce import AllReduce, AllReduceBucket
from piper.ops.base import INSTRUCTIONS, WORKS, Message, Site, Then
from piper.ops.broadcast import Broadcast, BroadcastBucket
from piper.ops.p2p import PostReceive, Send, Transfer
from piper.ops.update import OptimizerStep, Update
from piper.ops.write_buffer import StoreBuffer

GROUP = (DeviceId(3), DeviceId(5))
MESSAGES = (Message((2, 3), DType.BFLOAT16),)


def site(work, position):
    stream = Stream("lane")
    consumes, delivers = work.consumes(position), work.delivers(position)
    return Site(
        node=NodeId(7),
        stream=work.stream(stream, GROUP),
        record=EventId(1),
        communicator=work.communicator(stream, GROUP),
        group=GROUP,
        position=position,
        inputs=(Slot(0),) if consumes else (),
        outputs=(Slot(1),) if delivers else (),
        messages=MESSAGES,
    )


def test_registered_names_are_the_class_names():
    assert {"call", "sum", "update", "transfer", "all_reduce", "broadcast"} <= set(WORKS)
    assert {"compute", "accumulate", "send", "post_receive", "wait", "free"} <= set(INSTRUCTIONS)
    for registry in (WORKS, INSTRUCTIONS):
        for name, cls in registry.items():
            assert cls.__struct_config__.tag == name
            assert cls.__struct_config__.forbid_unknown_fields


def test_unknown_names_get_a_suggestion():
    with pytest.raises(
        PlanError, match=r"unknown work 'all_redude' \(did you mean 'all_reduce'\?\)"
    ):
        WORKS["all_redude"]


@pytest.mark.parametrize("work", [AllReduce(), AllReduce(average=True), Broadcast()])
def test_collectives_meet_all_members_with_the_same_messages(work):
    found = [work.lower(site(work, position)) for position in (0, 1)]
    assert found[0] == found[1]
    meeting = found[0].rendezvous()
    assert meeting.members == GROUP
    assert meeting.messages == MESSAGES
    assert meeting.role == work.kind
    assert (found[0].reads(), found[0].writes()) == ((0,), (1,))
    assert isinstance(found[0], (AllReduceBucket, BroadcastBucket))


def test_a_transfer_is_a_send_here_and_a_posted_receive_there():
    work = Transfer()
    send, receive = (work.lower(site(work, position)) for position in (0, 1))
    assert isinstance(send, Send)
    assert isinstance(receive, PostReceive)
    assert (send.reads(), send.writes()) == ((0,), ())
    assert (receive.reads(), receive.writes()) == ((), (1,))
    assert send.rendezvous().members == receive.rendezvous().members == GROUP
    assert {send.rendezvous().role, receive.rendezvous().role} == {"send", "receive"}
    assert send.stream == receive.stream == send.communicator == "lane:3>5"


def test_each_direction_has_its_own_communicator_and_stream():
    work, stream = Transfer(), Stream("p2p")
    assert work.communicator(stream, GROUP) != work.communicator(stream, GROUP[::-1])
    assert work.stream(stream, GROUP) != work.stream(stream, GROUP[::-1])


def test_collectives_on_two_streams_do_not_share_a_communicator():
    names = {
        work.communicator(Stream(s), GROUP) for s in "ab" for work in (AllReduce(), Broadcast())
    }
    assert len(names) == 4


def test_what_overwrites_state():
    assert Update(("w", "b")).overwrites() == (("parameter", "w"), ("parameter", "b"))
    assert StoreBuffer("mean").overwrites() == (("buffer", "mean"),)
    assert AllReduce().overwrites() == ()


def test_reads_and_writes_of_sums_and_updates():
    add = Accumulate(node=NodeId(0), stream=Stream("s"), totals=(2, 4), left=(0, 4), right=(1, 3))
    assert set(add.reads()) == {0, 1, 3, 4}
    assert add.writes() == (2, 4)
    assert add.describe() == "accumulate %2 = %0 + %1, %4 = %4 + %3"
    step = OptimizerStep(
        node=NodeId(0), stream=Stream("s"), names=("w",), parameters=(0,), gradients=(1,), scale=2
    )
    assert (step.reads(), step.writes()) == ((1, 2), (0,))


def test_messages_count_bytes():
    assert MESSAGES[0].nbytes == 12
    assert Message((), DType.FLOAT64).nbytes == 8
    assert Message((0, 5), DType.FLOAT64).nbytes == 0


@pytest.mark.parametrize("dtype", list(DType))
def test_element_sizes_and_kinds_are_torchs(dtype):
    torch = pytest.importorskip("torch")
    theirs = getattr(torch, dtype.value)
    assert theirs.itemsize == dtype.itemsize
    assert (theirs.is_floating_point or theirs.is_complex) == dtype.is_floating


def test_then_finishes_once_and_only_after_waiting():
    events = []

    class Flight:
        def wait(self):
            events.append("wait")

        def done(self):
            return "wait" in events

    handle = Then(Flight(), lambda: events.append("finish"))
    assert not handle.done()
    handle.wait()
    handle.wait()
    assert events == ["wait", "finish", "wait"]


def test_instructions_are_json():
    work = Transfer()
    for position, cls in ((0, Send), (1, PostReceive)):
        instruction = work.lower(site(work, position))
        data = msgspec.json.encode(instruction)
        assert msgspec.json.decode(data, type=cls) == instruction

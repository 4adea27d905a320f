"""What a receiver does with messages that no piper sender would send."""

import threading
import time

import pytest
import torch
from torch.distributed import HashStore

from piper.devices.gloo import GlooCommunicator
from piper.errors import CommunicationError
from piper.ids import DeviceId
from piper.ops.base import Message

MEMBERS = (DeviceId(0), DeviceId(1))


@pytest.fixture
def pair():
    """The two ends of one communicator, both in this thread."""
    store, ends = HashStore(), {}

    def connect(device):
        ends[device] = GlooCommunicator("pair", MEMBERS, device, store, timeout=10)

    threads = [threading.Thread(target=connect, args=(device,)) for device in MEMBERS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return ends[0], ends[1]


def frame_of(sender: GlooCommunicator, tensor: torch.Tensor, number: int) -> torch.Tensor:
    layout = sender._layout(tuple(tensor.shape), tensor.dtype)
    frame = torch.empty(layout.size, dtype=torch.uint8)
    layout.payload(frame).copy_(tensor)
    layout.seal(frame, number)
    return frame


def send_raw(sender: GlooCommunicator, frame: torch.Tensor) -> None:
    sender._group.send([frame], 1, 0).wait()


def test_a_bare_message_without_a_trailer(pair):
    sender, receiver = pair
    _, handle = receiver.receive(Message((8,), "float32"), 0)
    send_raw(sender, torch.zeros(32, dtype=torch.uint8))
    with pytest.raises(CommunicationError, match=r"expected message 1, float32\[8\].*without a"):
        handle.wait()


def test_a_message_cut_short(pair):
    sender, receiver = pair
    tensor = torch.arange(8.0)
    _, handle = receiver.receive(Message((8,), "float32"), 0)
    send_raw(sender, frame_of(sender, tensor, 1)[:-80])
    with pytest.raises(CommunicationError, match="without a trailer"):
        handle.wait()


def test_a_message_out_of_turn(pair):
    sender, receiver = pair
    _, handle = receiver.receive(Message((8,), "float32"), 0)
    send_raw(sender, frame_of(sender, torch.arange(8.0), 7))
    with pytest.raises(CommunicationError, match=r"expected message 1, .* found message 7"):
        handle.wait()


def test_memory_that_held_a_good_frame_does_not_pass_for_one(pair):
    sender, receiver = pair
    for _ in range(20):  # the allocator hands out the same block again and again
        _, handle = receiver.receive(Message((8,), "float32"), 0)
        sender.send(torch.ones(8), 1).wait()
        handle.wait()
    _, handle = receiver.receive(Message((8,), "float32"), 0)
    send_raw(sender, torch.zeros(32, dtype=torch.uint8))
    with pytest.raises(CommunicationError, match="expected message 21"):
        handle.wait()


def test_shapes_that_differ_only_beyond_the_trailers_sizes(pair):
    sender, receiver = pair
    _, handle = receiver.receive(Message((1, 1, 1, 1, 1, 1, 2, 3), "float32"), 0)
    sent = sender.send(torch.ones(1, 1, 1, 1, 1, 1, 3, 2), 1)
    with pytest.raises(CommunicationError, match="run different plans"):
        handle.wait()
    sent.wait()


@pytest.mark.parametrize("count", range(1, 9))
def test_payloads_are_aligned_for_their_type(pair, count):
    sender, receiver = pair
    tensor, handle = receiver.receive(Message((count,), "complex128"), 0)
    sent = sender.send(torch.full((count,), 1 + 2j, dtype=torch.complex128), 1)
    handle.wait()
    sent.wait()
    assert tensor.data_ptr() % 16 == 0
    assert tensor.tolist() == [1 + 2j] * count


def test_a_send_is_over_when_its_message_has_gone_though_nobody_waits_for_it(pair):
    """Or the frames of a whole step would stay in memory."""
    sender, receiver = pair
    sends = [sender.send(torch.arange(8.0), 1) for _ in range(3)]
    for _ in sends:
        receiver.receive(Message((8,), "float32"), 0)[1].wait()
    give_up = time.monotonic() + 10
    while not all(send.done() for send in sends) and time.monotonic() < give_up:
        time.sleep(0.001)
    assert all(send.done() for send in sends)
    for send in sends:
        send.wait()


def test_a_peer_that_is_gone_is_noticed_at_once(pair):
    sender, receiver = pair
    _, handle = receiver.receive(Message((8,), "float32"), 0)
    sender._group.abort()
    with pytest.raises(CommunicationError, match=r"receive from device 0 .*'pair'"):
        handle.wait()

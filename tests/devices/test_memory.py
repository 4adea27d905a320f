"""What only the in-memory communicator promises: rendezvous, abort, agreement on collectives."""

import threading
import time

import pytest
import torch

from piper.devices.memory import Hub
from piper.errors import AbortedError, CommunicationError
from piper.ids import DeviceId
from piper.ops.base import Message

MEMBERS = (DeviceId(0), DeviceId(1))
MESSAGE = Message((4,), "float32")


def ends(hub: Hub):
    return [hub.communicator("pair", MEMBERS, device) for device in MEMBERS]


def test_a_send_completes_when_its_receive_is_posted():
    first, second = ends(Hub())
    sent = first.send(torch.ones(4), 1)
    assert not sent.done()
    second.receive(MESSAGE, 0)
    assert sent.done()


def test_a_received_tensor_has_its_contents_only_after_the_wait():
    first, second = ends(Hub(poison=True))
    tensor, handle = second.receive(MESSAGE, 0)
    first.send(torch.ones(4), 1)
    assert tensor.isnan().all()
    handle.wait()
    assert tensor.tolist() == [1.0] * 4


def test_abort_wakes_those_who_wait_and_refuses_new_work():
    hub = Hub()
    first, second = ends(hub)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            second.receive(MESSAGE, 0)[1].wait()
        except AbortedError as error:
            caught.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.05)
    hub.abort("device 7: ValueError")
    thread.join(5)
    assert "device 7: ValueError" in str(caught[0])
    with pytest.raises(AbortedError):
        first.send(torch.ones(4), 1)


def test_members_that_disagree_about_a_collective_all_learn_of_it():
    first, second = ends(Hub())
    handles = [first.all_reduce(torch.ones(4)), second.all_reduce(torch.ones(5))]
    for handle in handles:
        with pytest.raises(CommunicationError, match=r"member 0: .*float32\[4\].*float32\[5\]"):
            handle.wait()
    handles = [first.all_reduce(torch.ones(4)), second.broadcast(torch.ones(4), 0)]
    for handle in handles:
        with pytest.raises(CommunicationError, match=r"member 0: .*all_reduce.*broadcast"):
            handle.wait()


def test_delays_depend_on_the_seed_and_never_change_the_data():
    def seconds(seed: int) -> float:
        first, second = ends(Hub(delay=0.1, seed=seed))
        started = time.monotonic()
        tensor, handle = second.receive(MESSAGE, 0)
        first.send(torch.arange(4.0), 1)
        handle.wait()
        assert tensor.tolist() == [0, 1, 2, 3]
        return time.monotonic() - started

    assert abs(seconds(1) - seconds(1)) < 0.02
    assert len({round(seconds(seed), 2) for seed in range(6)}) > 2

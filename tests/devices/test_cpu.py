"""Streams of the CPU device: queues of handles."""

from collections.abc import Callable

import pytest

from piper.devices.cpu import CpuDevice
from piper.errors import CommunicationError
from piper.ids import COMPUTE, EventId, Stream

A, B = Stream("a"), Stream("b")


class Flight:
    """A handle that records when it is waited for."""

    def __init__(self, name: str, log: list[str], *, done: bool = False) -> None:
        self.name, self.log, self.is_done = name, log, done

    def wait(self) -> None:
        self.log.append(self.name)

    def done(self) -> bool:
        return self.is_done


class Bench:
    def __init__(self) -> None:
        self.device = CpuDevice()
        self.log: list[str] = []

    def communication(
        self, name: str, stream: Stream, event: int | None = None, *, done: bool = False
    ) -> Callable[[], None]:
        record = None if event is None else EventId(event)
        return self.device.on_stream(
            stream,
            lambda: Flight(name, self.log, done=done),
            record,
            asynchronous=True,
        )

    def compute(self, stream: Stream, event: int) -> Callable[[], None]:
        return self.device.on_stream(stream, lambda: None, EventId(event), asynchronous=False)


@pytest.fixture
def bench():
    return Bench()


def test_waiting_for_an_event_waits_for_its_stream_up_to_there_and_no_further(bench):
    issue = [bench.communication(f"a{i}", A, i) for i in range(3)]
    wait = bench.device.waiter(COMPUTE, EventId(1))
    for closure in issue:
        closure()
    wait()
    assert bench.log == ["a0", "a1"]
    wait()
    assert bench.log == ["a0", "a1"]


def test_streams_are_independent(bench):
    issue = [bench.communication("a", A, 0), bench.communication("b", B, 1)]
    wait = bench.device.waiter(COMPUTE, EventId(1))
    for closure in issue:
        closure()
    wait()
    assert bench.log == ["b"]


def test_an_event_of_compute_alone_needs_no_wait(bench):
    bench.compute(COMPUTE, 0)
    assert bench.device.waiter(A, EventId(0)) is None


def test_an_event_of_compute_on_a_stream_with_communication_covers_it(bench):
    issue = [bench.communication("a", A), bench.compute(A, 5)]
    wait = bench.device.waiter(COMPUTE, EventId(5))
    for closure in issue:
        closure()
    wait()
    assert bench.log == ["a"]


def test_the_next_step_waits_anew(bench):
    issue = bench.communication("a", A, 0)
    wait = bench.device.waiter(COMPUTE, EventId(0))
    for _ in range(3):
        issue()
        wait()
        bench.device.synchronize()
    assert bench.log == ["a"] * 3


def test_synchronize_waits_for_everything(bench):
    for closure in [bench.communication("a", A), bench.communication("b", B)]:
        closure()
    bench.device.synchronize()
    assert sorted(bench.log) == ["a", "b"]


def test_finished_communication_is_given_up_early(bench):
    issue = [bench.communication(f"a{i}", A, i, done=i < 2) for i in range(4)]
    for closure in issue:
        closure()
    assert bench.log == ["a0", "a1"]
    bench.device.synchronize()
    assert bench.log == ["a0", "a1", "a2", "a3"]


def test_a_failure_does_not_come_back(bench):
    class Lost(Flight):
        def wait(self) -> None:
            raise CommunicationError("lost")

    issue = bench.device.on_stream(A, lambda: Lost("x", bench.log), None, asynchronous=True)
    issue()
    with pytest.raises(CommunicationError):
        bench.device.synchronize()
    bench.device.abandon()
    bench.device.synchronize()

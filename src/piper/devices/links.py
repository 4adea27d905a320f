"""How fast messages travel between two workers of this machine: a round trip between this process
and another one, or two threads.

``python -m piper.devices.links PORT`` is the other process.
"""

import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch._C._distributed_c10d import TCPStore

from piper.devices.gloo import GlooCommunicator
from piper.devices.heap import keep_freed_memory
from piper.devices.memory import Hub
from piper.dtypes import DType
from piper.errors import RunError
from piper.ids import DeviceId
from piper.ops.base import Communicator, Message

HOST = "127.0.0.1"
SMALL, LARGE = 64, 4 * 1024 * 1024
"""Bytes of the messages whose times are compared."""

ROUNDS = 30
_MEMBERS = (DeviceId(0), DeviceId(1))
_LIMIT = 60.0


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Seconds of the quickest of several messages, by size: until it is issued, and from then until
    it is there.
    """

    issue: dict[int, float]
    travel: dict[int, float]

    @property
    def latency(self) -> float:
        """Seconds of a message of no size."""
        return self.travel[SMALL]

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a long one."""
        return (LARGE - SMALL) / max(self.travel[LARGE] - self.travel[SMALL], 1e-9)


def between_processes() -> LinkTimes:
    """Over gloo and the loopback device, as the ray backend's workers on one machine. Raises
    :class:`RunError` if the other process fails.
    """
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=_limit())
    command = [sys.executable, "-m", "piper.devices.links", str(store.port)]
    with subprocess.Popen(command) as peer:  # noqa: S603 (ourselves)
        try:
            return measure_link(_gloo(0, store))
        except Exception as error:
            raise RunError(f"messages between processes could not be measured: {error}") from error
        finally:
            peer.terminate()


def between_threads() -> LinkTimes:
    """In memory, as the in-process backend's workers."""
    hub = Hub(timeout=_LIMIT)
    other = threading.Thread(
        target=lambda: answer_link(hub.communicator("links", _MEMBERS, _MEMBERS[1])), daemon=True
    )
    other.start()
    found = measure_link(hub.communicator("links", _MEMBERS, _MEMBERS[0]))
    other.join()
    return found


def measure_link(communicator: Communicator, rounds: int = ROUNDS) -> LinkTimes:
    """The times of messages to the other of *communicator*'s two members, which is to
    :func:`answer_link`.
    """
    peer = 1 - communicator.rank
    issue: dict[int, float] = {}
    travel: dict[int, float] = {}
    for size in (SMALL, LARGE):
        message = Message((size,), DType.UINT8)
        data = torch.zeros(size, dtype=torch.uint8)
        issued, round_trip = float("inf"), float("inf")
        for _ in range(rounds):
            _, handle = communicator.receive(message, peer)
            began = time.perf_counter()
            sent = communicator.send(data, peer)
            issued = min(issued, time.perf_counter() - began)
            handle.wait()
            round_trip = min(round_trip, time.perf_counter() - began)
            sent.wait()
        issue[size], travel[size] = issued, max(round_trip / 2 - issued, 1e-9)
    return LinkTimes(issue, travel)


def answer_link(communicator: Communicator, rounds: int = ROUNDS) -> None:
    """Send back what comes."""
    peer = 1 - communicator.rank
    for size in (SMALL, LARGE):
        message = Message((size,), DType.UINT8)
        for _ in range(rounds):
            tensor, handle = communicator.receive(message, peer)
            handle.wait()
            communicator.send(tensor, peer).wait()


def _gloo(rank: int, store: TCPStore) -> GlooCommunicator:
    return GlooCommunicator("links", _MEMBERS, _MEMBERS[rank], store, host=HOST, timeout=_LIMIT)


def _limit() -> timedelta:
    return timedelta(seconds=_LIMIT)


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep_freed_memory()
    answer_link(_gloo(1, TCPStore(HOST, int(sys.argv[1]), is_master=False, timeout=_limit())))

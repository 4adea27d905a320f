"""How fast collectives are between processes of this machine, and how much communication and
computation hold each other up.

Everything is measured symmetrically: all members do the same at the same time.
``python -m piper.devices.collectives PORT SIZE RANK ROUNDS KIND...`` is another member.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from mmap import mmap
from statistics import median

import torch
from torch._C._distributed_c10d import TCPStore

from piper.devices.gloo import GlooCommunicator
from piper.devices.heap import keep_freed_memory
from piper.devices.links import HOST, SMALL, LinkTimes
from piper.devices.memory import Hub
from piper.errors import RunError
from piper.ids import DeviceId
from piper.ops.base import Communicator, Handle
from piper.plan.topology import Contention

KINDS = ("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter")
"""What can be measured."""

LARGE = 8 * 1024 * 1024
"""Bytes of the longer ones; the shorter ones have as few as the shorter messages."""

ROUNDS = 12
_IN_A_ROW = 3
_LIMIT = 60.0
_WIDTH = 192
_CALLS = 16

Start = Callable[[], Handle]
"""Begins one collective."""


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """By kind of collective, its times by bytes of what each member has afterwards; how work and
    traffic hold each other up (``None``: they do not, as communication is done by whoever waits for
    it).
    """

    kinds: Mapping[str, LinkTimes]
    contention: Contention | None


def between_processes(
    size: int, kinds: Sequence[str] = KINDS, rounds: int = ROUNDS
) -> CollectiveTimes:
    """Of *size* members over gloo and the loopback device. Raises :class:`RunError` if another
    process fails.
    """
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=_limit())
    with _peers(store.port, size, kinds, rounds):
        try:
            return measure_collectives(_gloo(0, size, store), kinds, rounds)
        except Exception as error:
            raise RunError(
                f"collectives of {size} processes could not be measured: {error}"
            ) from error


def between_threads(
    size: int, kinds: Sequence[str] = KINDS, rounds: int = ROUNDS
) -> CollectiveTimes:
    """Of *size* members in memory, as the in-process backend's workers."""
    hub, members = Hub(timeout=_LIMIT), _members(size)

    def take_part(rank: int) -> CollectiveTimes:
        own = hub.communicator("collectives", members, members[rank])
        return measure_collectives(own, kinds, rounds, contention=False)

    others = [
        threading.Thread(target=take_part, args=(rank,), daemon=True) for rank in range(1, size)
    ]
    for other in others:
        other.start()
    found = take_part(0)
    for other in others:
        other.join()
    return found


@contextmanager
def _peers(port: int, size: int, kinds: Sequence[str], rounds: int) -> Iterator[None]:
    """The other members, which are ended on the way out."""
    command = [sys.executable, "-m", "piper.devices.collectives", str(port), str(size)]
    peers = [
        subprocess.Popen([*command, str(rank), str(rounds), *kinds])  # noqa: S603 (ourselves)
        for rank in range(1, size)
    ]
    try:
        yield
    finally:
        for peer in peers:
            peer.terminate()
        for peer in peers:
            peer.wait()


def measure_collectives(
    communicator: Communicator,
    kinds: Sequence[str] = KINDS,
    rounds: int = ROUNDS,
    *,
    contention: bool = True,
) -> CollectiveTimes:
    """The times of collectives of all of *communicator*'s members, each of whom calls this;
    *contention*: in the end they compute and communicate at once.
    """
    meet = _meeting(communicator)
    found = {
        kind: _quickest({n: _STARTS[kind](communicator, n) for n in (SMALL, LARGE)}, meet, rounds)
        for kind in kinds
    }
    both = _contention(communicator, meet, rounds) if contention else None
    return CollectiveTimes(found, both)


def _quickest(starts: Mapping[int, Start], meet: Callable[[], None], rounds: int) -> LinkTimes:
    """The quickest of *rounds*, of several in a row each, since members do not begin at exactly the
    same time.
    """
    issue: dict[int, float] = {}
    travel: dict[int, float] = {}
    for size, start in starts.items():
        best = float("inf")
        for _ in range(rounds):
            meet()
            issued = 0.0
            began = time.perf_counter()
            for _ in range(_IN_A_ROW):
                now = time.perf_counter()
                handle = start()
                issued += time.perf_counter() - now
                handle.wait()
            whole = (time.perf_counter() - began) / _IN_A_ROW
            if whole < best:
                best, issue[size] = whole, issued / _IN_A_ROW
                travel[size] = max(best - issue[size], 1e-9)
    return LinkTimes(issue, travel)


def _contention(
    communicator: Communicator, meet: Callable[[], None], rounds: int
) -> Contention | None:
    """Members exchange much, compute, and do both at once: what is left of the speed of each.

    The median, as these are ratios of what was measured right after each other.
    """
    start, compute = _all_to_all(communicator, LARGE), _product()
    work: list[float] = []
    traffic: list[float] = []
    for _ in range(rounds):
        meet()
        began = time.perf_counter()
        start().wait()
        alone = time.perf_counter() - began
        meet()
        began = time.perf_counter()
        for _ in range(_CALLS):
            compute()
        call = (time.perf_counter() - began) / _CALLS
        meet()
        began, calls = time.perf_counter(), 0
        handle = start()
        issued = time.perf_counter() - began
        waiting = threading.Thread(target=handle.wait)
        waiting.start()
        while waiting.is_alive():
            compute()
            calls += 1
        took = time.perf_counter() - began
        waiting.join()
        handle.wait()  # raises what the thread met
        if calls:
            work.append(calls * call / (took - issued))
            traffic.append(alone / took)
    if not work:
        return None
    return Contention(_fraction(median(work)), _fraction(median(traffic)))


def _fraction(found: float) -> float:
    """Between nearly nothing and all."""
    return min(1.0, max(found, 0.05))


def _product() -> Callable[[], object]:
    """Some arithmetic, of a fraction of a millisecond."""
    a = torch.full((_WIDTH, _WIDTH), 0.5)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, a, out=out)


def _meeting(communicator: Communicator) -> Callable[[], None]:
    """Returns when all members have called it."""
    nothing = torch.zeros(1)
    return lambda: communicator.all_reduce(nothing).wait()


def _new(numel: int) -> torch.Tensor:
    """Memory that the system has to make first, as it has to in training for what arrives: much was
    freed since the last time.
    """
    return torch.frombuffer(mmap(-1, 4 * numel), dtype=torch.float32)


def _all_reduce(communicator: Communicator, nbytes: int) -> Start:
    flat = torch.zeros(nbytes // 4)
    return lambda: communicator.all_reduce(flat)


def _all_gather(communicator: Communicator, nbytes: int) -> Start:
    shard = torch.zeros(max(1, nbytes // 4 // communicator.size))
    numel = shard.numel() * communicator.size
    return lambda: communicator.all_gather(_new(numel), shard)


def _reduce_scatter(communicator: Communicator, nbytes: int) -> Start:
    numel = nbytes // 4
    flat = torch.zeros(numel * communicator.size)
    return lambda: communicator.reduce_scatter(_new(numel), flat)


def _all_to_all(communicator: Communicator, nbytes: int) -> Start:
    part = max(1, nbytes // 4 // communicator.size)
    splits = (part,) * communicator.size
    flat = torch.zeros(sum(splits))
    return lambda: communicator.all_to_all(_new(sum(splits)), flat, splits, splits)


def _broadcast(communicator: Communicator, nbytes: int) -> Start:
    flat = torch.zeros(nbytes // 4)
    return lambda: communicator.broadcast(flat, 0)


_STARTS: Mapping[str, Callable[[Communicator, int], Start]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce_scatter": _reduce_scatter,
}


def _members(size: int) -> tuple[DeviceId, ...]:
    return tuple(map(DeviceId, range(size)))


def _gloo(rank: int, size: int, store: TCPStore) -> GlooCommunicator:
    members = _members(size)
    return GlooCommunicator("collectives", members, members[rank], store, host=HOST, timeout=_LIMIT)


def _limit() -> timedelta:
    return timedelta(seconds=_LIMIT)


def _take_part(port: int, size: int, rank: int, rounds: int, kinds: Sequence[str]) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    store = TCPStore(HOST, port, is_master=False, timeout=_limit())
    measure_collectives(_gloo(rank, size, store), kinds, rounds)


if __name__ == "__main__":
    port, size, rank, rounds = map(int, sys.argv[1:5])
    _take_part(port, size, rank, rounds, sys.argv[5:])

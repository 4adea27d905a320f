"""Communicators between threads of one process.

Rendezvous semantics: a send completes when its receive is posted, a collective when all members
called it. Data moves when the receiver waits, in the receiver's thread: a missing wait shows as
missing data. Collectives combine in order of rank.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch

from piper.devices.tensors import as_torch, dtype_name, torch_dtype
from piper.errors import AbortedError, CommunicationError
from piper.ids import DeviceId
from piper.ops.base import CommunicatorId, Message, ReduceOp, Tensor

DEFAULT_TIMEOUT = 300.0
"""Seconds that a wait may last."""

Deliver: TypeAlias = Callable[[], None]


class Hub:
    """What the communicators of one process share: the lock, the mailboxes, the end of the run.

    *delay* (seconds, for tests) makes everything complete at a random time up to that much later;
    *poison* fills receive buffers with NaN until their message is there. *timeout* bounds every
    wait.
    """

    def __init__(
        self,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        delay: float = 0.0,
        poison: bool = False,
        seed: int = 0,
    ) -> None:
        self.lock = threading.Lock()
        self.timeout = timeout
        self.poison = poison
        self._delay = delay
        self._random = random.Random(seed)  # noqa: S311 (delays, not secrets)
        self._aborted: str | None = None
        self._waiting: set[threading.Event] = set()
        self._messages: dict[tuple[CommunicatorId, int, int], _Mailbox] = {}
        self._collectives: dict[CommunicatorId, list[deque[_Gathering]]] = {}

    def communicator(
        self, name: CommunicatorId, members: Sequence[DeviceId], device: DeviceId
    ) -> "InMemoryCommunicator":
        """Device *device*'s end of the communicator *name*."""
        return InMemoryCommunicator(self, name, members.index(device), len(members))

    def abort(self, reason: str) -> None:
        """Wake every waiter, now and later, with :class:`AbortedError`."""
        with self.lock:
            self._aborted = self._aborted or reason
            for event in self._waiting:
                event.set()

    def mailbox(self, name: CommunicatorId, sender: int, receiver: int) -> "_Mailbox":
        """The messages of one direction. Call with the lock held."""
        return self._messages.setdefault((name, sender, receiver), _Mailbox())

    def gatherings(self, name: CommunicatorId, size: int, rank: int) -> "deque[_Gathering]":
        """The collectives that *rank* has not joined, oldest first. Call with the lock held."""
        queues = self._collectives.setdefault(name, [deque() for _ in range(size)])
        if not queues[rank]:
            gathering = _Gathering(name, size)
            for queue in queues:
                queue.append(gathering)
        return queues[rank]

    def ready_time(self) -> float:
        """When something that is complete now may be seen to be. Call with the lock held."""
        return time.monotonic() + self._random.uniform(0, self._delay) if self._delay else 0.0

    def check(self) -> None:
        """Raise :class:`AbortedError` when the run was aborted."""
        if self._aborted is not None:
            raise AbortedError(f"stopped, because another device failed first: {self._aborted}")

    def wait(self, ticket: "_Ticket") -> None:
        """Block until *ticket* is complete."""
        deadline = time.monotonic() + self.timeout
        event = threading.Event()
        with self.lock:
            self.check()
            if ticket.complete:
                return
            ticket.event = event
            self._waiting.add(event)
        try:
            event.wait(deadline - time.monotonic())
        finally:
            with self.lock:
                self._waiting.discard(event)
        if not ticket.complete:
            self.check()
            raise CommunicationError(
                f"{ticket.what} did not complete within {self.timeout:g} s: its peer never came; the devices' orders "
                f"contradict each other, or one takes longer than that"
            )


class _Ticket:
    """One side of a communication; the handle given to the device."""

    __slots__ = ("complete", "deliver", "error", "event", "hub", "ready", "what")

    def __init__(self, hub: Hub, what: str) -> None:
        self.hub = hub
        self.what = what
        self.complete = False
        self.ready = 0.0
        self.error: str | None = None
        self.deliver: Deliver | None = None
        self.event: threading.Event | None = None

    def finish(self, deliver: Deliver | None = None, error: str | None = None) -> None:
        """Mark complete. Call with the hub's lock held."""
        self.deliver, self.error = deliver, error
        self.ready = self.hub.ready_time()
        self.complete = True
        if self.event is not None:
            self.event.set()

    def wait(self) -> None:
        """See :class:`~piper.ops.base.Handle`."""
        if not self.complete:
            self.hub.wait(self)
        if self.ready and (rest := self.ready - time.monotonic()) > 0:
            time.sleep(rest)
        if self.error is not None:
            raise CommunicationError(self.error)
        if self.deliver is not None:
            deliver, self.deliver = self.deliver, None
            deliver()

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self.complete and (not self.ready or self.ready <= time.monotonic())


@dataclass(slots=True)
class _Mailbox:
    """Unmatched messages of one direction, and the number of the last matched one."""

    sent: deque[tuple[torch.Tensor, _Ticket]] = field(default_factory=deque)
    posted: deque[tuple[torch.Tensor, _Ticket]] = field(default_factory=deque)
    matched: int = 0


@dataclass(frozen=True, slots=True)
class _Call:
    """One member's call of a collective.

    ``agreed`` must be the same on every member. ``parts`` is what it contributes; ``combine`` turns
    all members' calls, by rank, into its own result.
    """

    agreed: tuple[object, ...]
    parts: Sequence[torch.Tensor]
    combine: Callable[[Sequence["_Call"]], None]
    ticket: _Ticket


class _Gathering:
    """One collective: complete when the last member has come."""

    def __init__(self, name: CommunicatorId, size: int) -> None:
        self._name = name
        self._calls: list[_Call | None] = [None] * size

    def join(self, rank: int, call: _Call) -> None:
        """Add a member's call. Call with the hub's lock held."""
        self._calls[rank] = call
        calls = [c for c in self._calls if c is not None]
        if len(calls) < len(self._calls):
            return
        error = None
        if len({c.agreed for c in calls}) > 1:
            listed = "; ".join(f"member {i}: {c.agreed}" for i, c in enumerate(calls))
            error = (
                f"the members of communicator {self._name!r} disagree about a collective: {listed}; the devices run "
                f"different plans"
            )
        for c in calls:
            c.ticket.finish(deliver=partial(c.combine, calls), error=error)


class InMemoryCommunicator:
    """One member's end. Implements :class:`~piper.ops.base.Communicator`."""

    def __init__(self, hub: Hub, name: CommunicatorId, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._hub = hub
        self._name = name

    def send(self, tensor: Tensor, peer: int) -> _Ticket:
        """Send a copy."""
        hub, copy = (
            self._hub,
            as_torch(tensor).detach().clone(memory_format=torch.contiguous_format),
        )
        ticket = _Ticket(hub, f"send to member {peer} of {self._name!r}")
        with hub.lock:
            hub.check()
            box = hub.mailbox(self._name, self.rank, peer)
            box.sent.append((copy, ticket))
            self._match(box)
        return ticket

    def receive(self, message: Message, peer: int) -> tuple[torch.Tensor, _Ticket]:
        """Post a receive."""
        hub = self._hub
        tensor = torch.empty(message.shape, dtype=torch_dtype(message.dtype))
        if hub.poison and tensor.is_floating_point():
            tensor.fill_(torch.nan)
        ticket = _Ticket(hub, f"receive from member {peer} of {self._name!r}")
        with hub.lock:
            hub.check()
            box = hub.mailbox(self._name, peer, self.rank)
            box.posted.append((tensor, ticket))
            self._match(box)
        return tensor, ticket

    def _match(self, box: _Mailbox) -> None:
        if not (box.sent and box.posted):
            return
        (source, sent), (target, posted) = box.sent.popleft(), box.posted.popleft()
        box.matched += 1
        expected, found = _describe(target), _describe(source)
        if expected != found:
            error = (
                f"communicator {self._name!r}: expected message {box.matched}, {expected}, found {found}; the two devices "
                f"run different plans"
            )
            sent.finish(error=error)
            posted.finish(error=error)
            return
        sent.finish()
        posted.finish(deliver=partial(_copy, target, source))

    def all_reduce(self, flat: Tensor, op: ReduceOp = ReduceOp.SUM) -> _Ticket:
        """Combine in order of rank, in place."""
        target = as_torch(flat)
        into = _sum_into if op is ReduceOp.SUM else _max_into

        def combine(calls: Sequence[_Call]) -> None:
            into(target, [call.parts[0] for call in calls])

        return self._collective(f"all_reduce {op}", _describe(target), [target], combine)

    def all_gather(self, out: Tensor, shard: Tensor) -> _Ticket:
        """Concatenate in order of rank."""
        target, source = as_torch(out), as_torch(shard)

        def combine(calls: Sequence[_Call]) -> None:
            torch.cat([call.parts[0] for call in calls], out=target)

        return self._collective("all_gather", _describe(source), [source], combine)

    def reduce_scatter(self, out: Tensor, flat: Tensor) -> _Ticket:
        """Sum in order of rank; keep the part of one's own rank."""
        target, source, rank = as_torch(out), as_torch(flat), self.rank

        def combine(calls: Sequence[_Call]) -> None:
            _sum_into(target, [call.parts[rank] for call in calls])

        parts = torch.split(source, target.numel())
        assert len(parts) == self.size, "reduce_scatter needs equal parts"
        return self._collective("reduce_scatter", _describe(source), parts, combine)

    def all_to_all(
        self, out: Tensor, flat: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> _Ticket:
        """Exchange parts."""
        target, rank, wanted = as_torch(out), self.rank, list(out_splits)

        def combine(calls: Sequence[_Call]) -> None:
            parts = [call.parts[rank] for call in calls]
            found = [part.numel() for part in parts]
            if found != wanted:
                raise CommunicationError(
                    f"all_to_all on communicator {self._name!r}: member {rank} expected {wanted} elements of the members, "
                    f"found {found}; the devices run different plans"
                )
            torch.cat(parts, out=target)

        parts = torch.split(as_torch(flat), list(in_splits))
        return self._collective("all_to_all", str(target.dtype), parts, combine)

    def broadcast(self, flat: Tensor, root: int) -> _Ticket:
        """Copy the root's tensor."""
        target = as_torch(flat)

        def combine(calls: Sequence[_Call]) -> None:
            target.copy_(calls[root].parts[0])

        return self._collective(f"broadcast from {root}", _describe(target), [target], combine)

    def _collective(
        self,
        kind: str,
        payload: str,
        parts: Sequence[torch.Tensor],
        combine: Callable[[Sequence[_Call]], None],
    ) -> _Ticket:
        hub = self._hub
        ticket = _Ticket(hub, f"{kind} on communicator {self._name!r}")
        # Copied: members may change their tensor as soon as their own handle is complete.
        call = _Call((kind, payload), [part.clone() for part in parts], combine, ticket)
        with hub.lock:
            hub.check()
            hub.gatherings(self._name, self.size, self.rank).popleft().join(self.rank, call)
        return ticket


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _sum_into(target: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    target.copy_(parts[0])
    for part in parts[1:]:
        target.add_(part)


def _max_into(target: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    target.copy_(parts[0])
    for part in parts[1:]:
        torch.maximum(target, part, out=target)


def _describe(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"

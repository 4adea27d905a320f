"""Communication that starts before it is needed: receives, so that no sender waits and both
directions of a link flow at once; gathers of parameters and fetches of what was put aside, so that
they hide behind earlier compute.
"""

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from piper.ids import DeviceId, NodeId, ValueId
from piper.ir.dag import Comm
from piper.ops.base import Site
from piper.planner.program import Program

Locate: TypeAlias = Callable[[Comm, tuple[DeviceId, ...], int, Program], Site]


class _Expected:
    __slots__ = ("comm", "group", "locate", "nbytes", "needs", "position", "since")

    def __init__(
        self,
        comm: Comm,
        group: tuple[DeviceId, ...],
        position: int,
        nbytes: int,
        locate: Locate,
        needs: tuple[ValueId, ...],
        since: int,
    ) -> None:
        self.comm, self.group, self.position = comm, group, position
        self.nbytes, self.locate = nbytes, locate
        self.needs, self.since = needs, since

    def start(self, program: Program) -> None:
        site = self.locate(self.comm, self.group, self.position, program)
        program.emit(self.comm.work.lower(site), consume=site.inputs)


class Early:
    """Starts one device's communications of one kind in the order in which they are needed, as
    early as ``limit`` bytes of started but not yet needed ones allow (always at least the one that
    is needed now). The limit ``None`` is as much as the one chunk that needs the most needs: the
    next one's come while the one before uses its own.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._needed: dict[NodeId, int] = {}  # bytes per chunk
        self._most = self._total = 0  # bytes of one chunk, of all
        self._expected: deque[_Expected] = deque()
        self._started: dict[NodeId, int] = {}
        self._known: set[NodeId] = set()
        self._outstanding = 0

    def expect(
        self,
        comm: Comm,
        group: tuple[DeviceId, ...],
        position: int,
        nbytes: int,
        locate: Locate,
        *,
        chunk: NodeId | None = None,
        needs: tuple[ValueId, ...] = (),
        since: int = 0,
    ) -> None:
        """Announce a communication that makes *nbytes* here for *chunk*; the announcements come in
        order of need, repeated ones do not count. It cannot start before the values *needs* are on
        the device, and need not before *since* chunks were issued.
        """
        if comm.id not in self._known:
            self._known.add(comm.id)
            user = comm.id if chunk is None else chunk
            self._needed[user] = self._needed.get(user, 0) + nbytes
            self._most = max(self._most, self._needed[user])
            self._total += nbytes
            self._expected.append(_Expected(comm, group, position, nbytes, locate, needs, since))

    @property
    def limit(self) -> int:
        """Bytes that may be started and not yet needed, once all is announced."""
        return min(self._total, self._most if self._limit is None else self._limit)

    def advance(self, program: Program, chunks: int = 0) -> None:
        """Start as many as the limit allows, *chunks* having been issued."""
        while self._expected:
            first = self._expected[0]
            if self._outstanding + first.nbytes > self.limit or first.since > chunks:
                return
            if not all(program.has(value) for value in first.needs):
                return
            self._start(program)

    def require(self, node: NodeId, program: Program) -> None:
        """*node* is needed from here on: start it if it is not started yet; it no longer counts as
        early.
        """
        while node not in self._started and self._expected:
            self._start(program)
        self._outstanding -= self._started[node]
        self._started[node] = 0

    def _start(self, program: Program) -> None:
        expected = self._expected.popleft()
        expected.start(program)
        self._started[expected.comm.id] = expected.nbytes
        self._outstanding += expected.nbytes

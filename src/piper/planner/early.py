"""Communication that starts before it is needed: receives, so that no sender waits and both directions of a link flow
at once; gathers of parameters, so that they hide behind earlier compute.
"""

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from piper.ids import DeviceId, NodeId
from piper.ir.dag import Comm
from piper.ops.base import Site
from piper.planner.program import Program

Locate: TypeAlias = Callable[[Comm, tuple[DeviceId, ...], int, Program], Site]


class _Expected:
    __slots__ = ("comm", "group", "locate", "nbytes", "position")

    def __init__(
        self, comm: Comm, group: tuple[DeviceId, ...], position: int, nbytes: int, locate: Locate
    ) -> None:
        self.comm, self.group, self.position = comm, group, position
        self.nbytes, self.locate = nbytes, locate

    def start(self, program: Program) -> None:
        site = self.locate(self.comm, self.group, self.position, program)
        program.emit(self.comm.work.lower(site))


class Early:
    """Starts one device's communications of one kind in the order in which they are needed, as early as ``limit`` bytes
    of started but not yet needed ones allow (always at least the one that is needed now).
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._expected: deque[_Expected] = deque()
        self._started: dict[NodeId, int] = {}
        self._known: set[NodeId] = set()
        self._outstanding = 0

    def expect(
        self, comm: Comm, group: tuple[DeviceId, ...], position: int, nbytes: int, locate: Locate
    ) -> None:
        """Announce a communication that makes *nbytes* here; the announcements come in order of need, repeated ones
        do not count.
        """
        if comm.id not in self._known:
            self._known.add(comm.id)
            self._expected.append(_Expected(comm, group, position, nbytes, locate))

    def advance(self, program: Program) -> None:
        """Start as many as the limit allows."""
        while self._expected and self._outstanding + self._expected[0].nbytes <= self._limit:
            self._start(program)

    def require(self, node: NodeId, program: Program) -> None:
        """*node* is needed from here on: start it if it is not started yet; it no longer counts as early."""
        while node not in self._started and self._expected:
            self._start(program)
        self._outstanding -= self._started[node]
        self._started[node] = 0

    def _start(self, program: Program) -> None:
        expected = self._expected.popleft()
        expected.start(program)
        self._started[expected.comm.id] = expected.nbytes
        self._outstanding += expected.nbytes

"""When to post receives: early, so that no sender waits and both directions of a link flow at once."""

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from piper.ids import DeviceId, NodeId
from piper.ir.dag import Comm
from piper.ops.base import Message, Site
from piper.planner.program import Program

_Locate: TypeAlias = Callable[[Comm, tuple[DeviceId, ...], int, Program], Site]


class _Expected:
    __slots__ = ("comm", "group", "locate", "nbytes", "position")

    def __init__(
        self, comm: Comm, group: tuple[DeviceId, ...], position: int, nbytes: int, locate: _Locate
    ) -> None:
        self.comm, self.group, self.position = comm, group, position
        self.nbytes, self.locate = nbytes, locate

    def post(self, program: Program) -> None:
        site = self.locate(self.comm, self.group, self.position, program)
        program.emit(self.comm.work.lower(site))


class ReceiveAhead:
    """Posts the receives of one device in the order in which they are needed, as early as ``limit`` bytes of posted
    but not yet needed messages allow (always at least the one that is needed now).
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._expected: deque[_Expected] = deque()
        self._posted: dict[NodeId, int] = {}
        self._outstanding = 0

    def expect(
        self,
        comm: Comm,
        group: tuple[DeviceId, ...],
        position: int,
        message: Message,
        locate: _Locate,
    ) -> None:
        """Announce a receive; the announcements come in order of need."""
        self._expected.append(_Expected(comm, group, position, message.nbytes, locate))

    def advance(self, program: Program) -> None:
        """Post as many receives as the limit allows."""
        while self._expected and self._outstanding + self._expected[0].nbytes <= self._limit:
            self._post(program)

    def require(self, node: NodeId, program: Program) -> None:
        """The message of *node* is needed from here on: post it if it is not posted yet; it no longer counts as early."""
        while node not in self._posted:
            self._post(program)
        self._outstanding -= self._posted.pop(node)

    def _post(self, program: Program) -> None:
        expected = self._expected.popleft()
        expected.post(program)
        self._posted[expected.comm.id] = expected.nbytes
        self._outstanding += expected.nbytes

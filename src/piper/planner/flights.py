"""How much communication a device has in flight: its buffers are memory that only a wait gives
back.
"""

from collections import deque
from collections.abc import Sequence

from piper.ids import NodeId, Slot
from piper.planner.program import Program

REDUCE_BYTES = 64 * 1024 * 1024
"""What may be in flight where no limit is given, unless three collectives are less or one is
more.
"""


class Flights:
    """Keeps what one device's collectives hold below ``limit`` bytes (always allowing one): before
    another one starts, the device waits for the oldest. The limit ``None`` is three times as much
    as the largest one, but no more than :data:`REDUCE_BYTES`: enough to keep a link busy.

    Collectives that are gathers have a limit of their own, see ``early``.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._most = 0
        self._flying: deque[tuple[NodeId, tuple[Slot, ...], int]] = deque()
        self._total = 0

    def expect(self, nbytes: int) -> None:
        """Announce a collective of *nbytes*."""
        self._most = max(self._most, nbytes)

    @property
    def limit(self) -> int:
        """Bytes that may be in flight, once all is announced."""
        return min(3 * self._most, REDUCE_BYTES) if self._limit is None else self._limit

    def make_room(self, nbytes: int, program: Program) -> list[NodeId]:
        """Another *nbytes* are about to fly; the nodes that the device had to wait for."""
        landed: list[NodeId] = []
        while self._flying and self._total + nbytes > self.limit:
            node, slots, oldest = self._flying.popleft()
            self._total -= oldest
            program.wait_for(slots)
            landed.append(node)
        return landed

    def started(self, node: NodeId, slots: Sequence[Slot], nbytes: int) -> None:
        """A collective of *nbytes* that fills *slots* has started."""
        self._flying.append((node, tuple(slots), nbytes))
        self._total += nbytes

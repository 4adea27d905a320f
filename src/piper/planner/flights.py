"""How much communication a device has in flight: its buffers are memory that only a wait gives back."""

from collections import deque
from collections.abc import Sequence

from piper.ids import Slot
from piper.planner.program import Program


class Flights:
    """Keeps what one device's collectives hold below ``limit`` bytes (always allowing one): before another one starts, the
    device waits for the oldest.

    Collectives that are gathers have a limit of their own, see ``early``.
    """

    def __init__(self, limit: int | None) -> None:
        assert limit is not None
        self.limit = limit
        self._flying: deque[tuple[tuple[Slot, ...], int]] = deque()
        self._total = 0

    def make_room(self, nbytes: int, program: Program) -> bool:
        """Another *nbytes* are about to fly; whether nothing else does."""
        while self._flying and self._total + nbytes > self.limit:
            slots, oldest = self._flying.popleft()
            self._total -= oldest
            program.wait_for(slots)
        return not self._flying

    def started(self, slots: Sequence[Slot], nbytes: int) -> None:
        """A collective of *nbytes* that fills *slots* has started."""
        self._flying.append((tuple(slots), nbytes))
        self._total += nbytes

"""Play a plan with given durations: when does every instruction start and end?

Like :func:`piper.simulate` on devices whose hosts run ahead, without links: a message or collective
takes as long as the slowest of its members, and what can overlap does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from piper.ids import DeviceId
from piper.ops.base import Instruction
from piper.plan.model import Plan
from piper.plan.topology import Contention, Port
from piper.simulate.engine import Flow, run

Durations: TypeAlias = Callable[[DeviceId, Instruction], float]
"""How long an instruction takes on a device once it can start, in any unit; the longest member of a
rendezvous counts.
"""


@dataclass(frozen=True, slots=True)
class Played:
    """One instruction, from ``start`` to ``end``, in the unit of the durations; time begins at
    0.
    """

    instruction: Instruction
    start: float
    end: float


Track: TypeAlias = tuple[Played, ...]
"""What one device did, in issue order."""


@dataclass(frozen=True, slots=True)
class _Given:
    """Implements :class:`~piper.simulate.engine.Timing`."""

    durations: Durations
    host_blocks: bool = False
    launch: float = 0.0
    contention: Contention | None = None

    def local(self, device: DeviceId, instruction: Instruction) -> float:
        """As given."""
        return self.durations(device, instruction)

    def flow(self, members: Sequence[tuple[DeviceId, Instruction]]) -> Flow:
        """The slowest member's."""
        return Flow(max(self.durations(device, instruction) for device, instruction in members))

    def bandwidth(self, port: Port) -> float:
        """No flow has ports."""
        raise NotImplementedError(port)


def play(plan: Plan, durations: Durations) -> tuple[Track, ...]:
    """The track of each device, in device order.

    Raises :class:`~piper.errors.PlanError` when the plan never comes to its end; the verifier says
    why.
    """
    found = run(plan, _Given(durations))
    return tuple(
        tuple(Played(found.instructions[i], found.start[i], found.end[i]) for i in found.places(d))
        for d in range(len(plan.devices))
    )

"""Play a plan with given durations: when does every instruction start and end?

The devices' hosts run ahead: each stream takes its instructions in issue order, each as soon as the one before is
complete; a ``Wait`` is over when its event has happened; a message or collective starts when all its members
have come to it, and ends for all of them at once. Links and cores are not shared out: what can overlap does.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

from piper.errors import PlanError
from piper.ids import DeviceId, Stream
from piper.ops.base import CommunicatorId, Instruction
from piper.ops.wait import Wait
from piper.plan.model import Plan

Durations: TypeAlias = Callable[[DeviceId, Instruction], float]
"""How long an instruction takes on a device once it can start, in any unit; the longest member of a rendezvous counts."""


@dataclass(frozen=True, slots=True)
class Played:
    """One instruction, from ``start`` to ``end``, in the unit of the durations; time begins at 0."""

    instruction: Instruction
    start: float
    end: float


Timeline: TypeAlias = tuple[Played, ...]
"""What one device did, in issue order."""


def play(plan: Plan, durations: Durations) -> tuple[Timeline, ...]:
    """The timeline of each device, in device order.

    Raises :class:`~piper.errors.PlanError` when the plan never comes to its end; the verifier says why.
    """
    return _Playback(plan, durations).run()


_Place: TypeAlias = tuple[int, int]
"""A device and a position in its program."""

_Lane: TypeAlias = tuple[int, Stream]
"""A device and one of its streams."""

_Meeting: TypeAlias = tuple[CommunicatorId, int]
"""The k-th message or collective of a communicator."""


@dataclass(slots=True)
class _Playback:
    plan: Plan
    durations: Durations
    lanes: dict[_Lane, deque[int]] = field(default_factory=dict)  # positions still to be played
    free_at: dict[_Lane, float] = field(default_factory=dict)
    played: dict[_Place, Played] = field(default_factory=dict)
    recorder: dict[_Place, _Place] = field(default_factory=dict)  # of each wait: what it waits for
    sleepers: dict[_Place, list[_Lane]] = field(default_factory=dict)
    meeting_of: dict[_Place, _Meeting] = field(default_factory=dict)
    arrived: dict[_Meeting, list[_Place]] = field(default_factory=dict)

    def run(self) -> tuple[Timeline, ...]:
        """Play until every stream is empty."""
        for device in range(len(self.plan.devices)):
            self._unfold(device)
        runnable = deque(self.lanes)
        while runnable:
            runnable.extend(self._advance(runnable.popleft()))
        stuck = sorted({device for (device, _), left in self.lanes.items() if left})
        if stuck:
            raise PlanError(
                f"the plan never ends: devices {', '.join(map(str, stuck))} wait for each other; "
                "piper.verify(plan) shows the cycle"
            )
        return tuple(
            tuple(self.played[device, i] for i in range(len(mine.instructions)))
            for device, mine in enumerate(self.plan.devices)
        )

    def _unfold(self, device: int) -> None:
        events: dict[int, _Place] = {}
        counts: dict[CommunicatorId, int] = {}
        for i, instruction in enumerate(self.plan.devices[device].instructions):
            lane = (device, instruction.stream)
            self.lanes.setdefault(lane, deque()).append(i)
            self.free_at[lane] = 0.0
            if isinstance(instruction, Wait):
                self.recorder[device, i] = events[instruction.event]
            if instruction.record is not None:
                events[instruction.record] = (device, i)
            if (meeting := instruction.rendezvous()) is not None:
                k = counts.get(meeting.communicator, 0)
                counts[meeting.communicator] = k + 1
                self.meeting_of[device, i] = (meeting.communicator, k)

    def _advance(self, lane: _Lane) -> Iterator[_Lane]:
        """Play *lane* as far as it gets; the lanes that may go on because of it."""
        waiting = self.lanes[lane]
        while waiting:
            place = (lane[0], waiting[0])
            if place in self.meeting_of:
                yield from self._meet(place)
                return
            start = self.free_at[lane]
            if (source := self.recorder.get(place)) is not None:
                if source not in self.played:
                    self.sleepers.setdefault(source, []).append(lane)
                    return
                start = max(start, self.played[source].end)
            yield from self._finish(place, start, self._duration(place))

    def _meet(self, place: _Place) -> Iterator[_Lane]:
        """Arrive at a rendezvous; the last to come lets all members go on."""
        key = self.meeting_of[place]
        together = self.arrived.setdefault(key, [])
        if place not in together:
            together.append(place)
        meeting = self._instruction(place).rendezvous()
        assert meeting is not None
        if len(together) < len(meeting.members):
            return
        del self.arrived[key]
        start = max(self.free_at[self._lane(member)] for member in together)
        duration = max(self._duration(member) for member in together)
        woken = chain.from_iterable([*self._finish(member, start, duration)] for member in together)
        yield from [*woken, *(self._lane(member) for member in together)]

    def _finish(self, place: _Place, start: float, duration: float) -> Iterator[_Lane]:
        lane = self._lane(place)
        self.lanes[lane].popleft()
        self.free_at[lane] = start + duration
        self.played[place] = Played(self._instruction(place), start, start + duration)
        yield from self.sleepers.pop(place, ())

    def _duration(self, place: _Place) -> float:
        return self.durations(DeviceId(place[0]), self._instruction(place))

    def _instruction(self, place: _Place) -> Instruction:
        return self.plan.devices[place[0]].instructions[place[1]]

    def _lane(self, place: _Place) -> _Lane:
        return (place[0], self._instruction(place).stream)

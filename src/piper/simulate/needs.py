"""What every instruction of a plan has to wait for, whether or not it waits for it last."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from piper.ids import EventId, Slot, Stream
from piper.ops.base import Instruction
from piper.simulate.engine import NOTHING, Place, Run

Needs: TypeAlias = tuple[Place, ...]


def needs(run: Run, shown: Sequence[bool]) -> list[Needs]:
    """For each place that is *shown*, the shown places that must be complete before it starts, in
    ascending order: those that make what it reads, those that a ``Wait`` before it on its stream
    names, and the one before it on its stream.

    What is not shown passes on what it needs itself, the latest of each stream; and of a
    rendezvous, what the other members need. What only the members of a shown rendezvous need is not
    listed for each other.
    """
    return _Needs(run, shown).find()


class _Needs:
    def __init__(self, run: Run, shown: Sequence[bool]) -> None:
        self.run, self.shown = run, shown
        self.direct: list[Needs] = [()] * len(run.instructions)
        self.passed: dict[Place, Needs] = {}
        self.members: dict[int, list[Place]] = {}

    def find(self) -> list[Needs]:
        """See :func:`needs`."""
        for device in range(len(self.run.offsets) - 1):
            self._connect(self.run.places(device))
        for place, number in enumerate(self.run.meeting):
            if number != NOTHING and not self.shown[place]:
                self.members.setdefault(number, []).append(place)
        return [
            self._resolved(self.direct[place]) if shown else ()
            for place, shown in enumerate(self.shown)
        ]

    def _connect(self, places: range) -> None:
        """Fill in what the instructions of one device need directly."""
        writers: dict[Slot, Place] = {}
        recorders: dict[EventId, Place] = {}
        last: dict[Stream, Place] = {}  # the last shown one on each stream
        awaited: dict[Stream, list[Place]] = {}  # by waits since then
        for place in places:
            instruction = self.run.instructions[place]
            stream = instruction.stream
            before = [last[stream]] if stream in last else []
            if (event := instruction.awaits()) is not None:
                awaited.setdefault(stream, []).append(recorders[event])
            made = [writers[slot] for slot in instruction.reads() if slot in writers]
            self.direct[place] = tuple({*before, *awaited.get(stream, ()), *made})
            for slot in instruction.writes():
                writers[slot] = place
            if instruction.record is not None:
                recorders[instruction.record] = place
            if self.shown[place]:
                last[stream] = place
                awaited.pop(stream, None)

    def _resolved(self, places: Iterable[Place]) -> Needs:
        """*places*, what is not shown replaced by what it passes on."""
        found: set[Place] = set()
        for place in places:
            if self.shown[place]:
                found.add(place)
            else:
                found.update(self.passed.get(place) or self._pass_on(place))
        return tuple(sorted(found))

    def _pass_on(self, place: Place) -> Needs:
        """The shown places that *place*, which is not, needs: the latest of each stream. Chains are
        long: without recursion.
        """
        todo, begun = [place], {place}
        while todo:
            now = todo[-1]
            direct = self._direct(now)
            missing = [
                p for p in direct if not self.shown[p] and p not in self.passed and p not in begun
            ]
            if missing:
                todo += missing
                begun.update(missing)
                continue
            todo.pop()
            whole: set[Place] = set()
            for p in direct:
                whole.update((p,) if self.shown[p] else self.passed.get(p, ()))
            latest = self._latest(whole)
            for member in self.members.get(self.run.meeting[now], (now,)):
                self.passed[member] = latest
        return self.passed[place]

    def _direct(self, place: Place) -> Iterable[Place]:
        """What *place* needs, and what those that it meets need."""
        met = self.members.get(self.run.meeting[place])
        if met is None:
            return self.direct[place]
        return {p for member in met for p in self.direct[member]}

    def _latest(self, places: Iterable[Place]) -> Needs:
        found: dict[tuple[int, Stream], Place] = {}
        for place in places:
            instruction: Instruction = self.run.instructions[place]
            key = (self.run.device[place], instruction.stream)
            found[key] = max(place, found.get(key, NOTHING))
        return tuple(found.values())

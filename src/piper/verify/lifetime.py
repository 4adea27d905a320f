"""Slots are written before they are read, freed once after their last use, and empty at the end."""

from collections.abc import Iterator

from piper.ids import Slot
from piper.verify.trace import Problem, Subject, Trace

CHECK = "lifetime"


def check_lifetime(subject: Subject) -> Iterator[Problem]:
    """Problems in issue order, device by device."""
    for trace in subject.traces:
        for text in _Table(subject, trace).run():
            yield Problem(CHECK, text)


class _Table:
    """The value table of one device as the program goes on.

    ``live`` are the slots that hold a value; ``stored`` the state slots that hold the next step's
    already, with the instruction that stored it.
    """

    def __init__(self, subject: Subject, trace: Trace) -> None:
        self.subject = subject
        self.trace = trace
        self.live: set[Slot] = set(trace.state)
        self.freed: dict[Slot, int] = {}
        self.stored: dict[Slot, int] = {}

    def run(self) -> Iterator[str]:
        trace, live, stored = self.trace, self.live, self.stored
        for i, (reads, writes, frees) in enumerate(
            zip(trace.uses, trace.writes, trace.frees, strict=True)
        ):
            for slot in reads:
                if slot not in live or (slot in stored and not self._wants_new(i, slot)):
                    yield self._unreadable(i, slot)
            for slot in writes:
                if slot in trace.state:
                    yield from self._store(i, slot)
                elif slot in live and slot not in reads:
                    yield f"{self._at(i)}: overwrites {self._name(slot)}, which was not freed"
                live.add(slot)
            for slot in frees:
                yield from self._free(i, slot)
        for slot in sorted(live - trace.state):
            yield f"device {trace.device}: {self._name(slot)} is never freed"

    def _wants_new(self, i: int, slot: Slot) -> bool:
        """Whether the instruction's node reads, from this slot itself and not a view of it, what
        another node stores here.
        """
        dag = self.subject.dag
        node = dag.nodes.get(self.trace.instructions[i].node)
        if node is None or slot not in self.trace.reads[i]:
            return False
        mine = dag.values[self.trace.values[slot]]
        read = [dag.values[v] for v in node.inputs if v in dag.producers]
        return any((value.role, value.name) == (mine.role, mine.name) for value in read)

    def _store(self, i: int, slot: Slot) -> Iterator[str]:
        if slot in self.stored:
            yield (
                f"{self._at(i)}: stores {self._name(slot)} again after "
                f"{self._at(self.stored[slot])}"
            )
        self.stored[slot] = i

    def _free(self, i: int, slot: Slot) -> Iterator[str]:
        if slot in self.trace.state:
            yield f"{self._at(i)}: frees {self._name(slot)}, which must survive the step"
        elif slot not in self.live:
            yield f"{self._at(i)}: frees {self._name(slot)}, {self._why_empty(slot)}"
        else:
            self.live.discard(slot)
            self.freed[slot] = i

    def _unreadable(self, i: int, slot: Slot) -> str:
        if slot not in self.live:
            return f"{self._at(i)}: reads {self._name(slot)}, {self._why_empty(slot)}"
        return (
            f"{self._at(i)}: reads {self._name(slot)} after "
            f"{self._at(self.stored[slot])} stored the next step's value there"
        )

    def _why_empty(self, slot: Slot) -> str:
        if slot in self.freed:
            return f"which {self._at(self.freed[slot])} freed"
        return "which nothing has written yet"

    def _at(self, i: int) -> str:
        return self.subject.at(self.trace.device, i)

    def _name(self, slot: Slot) -> str:
        return self.subject.slot(self.trace.device, slot)

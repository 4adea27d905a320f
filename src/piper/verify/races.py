"""Across streams only a ``Wait`` orders: every two conflicting accesses of a slot are ordered by
waits.

One vector clock per stream of a device (Fidge and Mattern, 1988): entry t of stream s's clock is
how many instructions of stream t are complete whenever the next instruction of s starts. Being on
one stream orders too. Messages between devices order nothing here: each device's waits must suffice
by themselves.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from piper.ids import NodeId, Slot
from piper.ir.dag import Chunk, DeviceGroup
from piper.ops.accumulate import Accumulate
from piper.verify.trace import Problem, Subject, Trace, table

CHECK = "races"

Orders: TypeAlias = Mapping[NodeId, Sequence[tuple[NodeId, int]]]
"""Per node: the nodes that order edges put before it, each with the number of its directive."""


def check_races(subject: Subject) -> Iterator[Problem]:
    """Missing waits and broken orders, in issue order, device by device."""
    orders = _orders(subject)
    for device, trace in enumerate(subject.traces):
        yield from _Detector(subject, trace, orders.get(device, {})).run()


def _orders(subject: Subject) -> dict[int, dict[NodeId, list[tuple[NodeId, int]]]]:
    """The order edges that bind each device: between nodes that both run there."""
    dag = subject.dag
    orders: dict[int, dict[NodeId, list[tuple[NodeId, int]]]] = {}
    present: dict[DeviceGroup, DeviceGroup] = {}

    def here(node: NodeId) -> DeviceGroup:
        devices = dag.nodes[node].participants
        if (known := present.get(devices)) is None:
            known = present[devices] = tuple(d for d in devices if d in subject.present)
        return known

    for edge in dag.order:
        before, after = here(edge.before), here(edge.after)
        for device in before if before == after else set(before) & set(after):
            mine = orders.setdefault(device, {})
            mine.setdefault(edge.after, []).append((edge.before, edge.directive))
    return orders


class _Detector:
    """The race detector of one device."""

    def __init__(self, subject: Subject, trace: Trace, orders: Orders) -> None:
        self.subject = subject
        self.trace = trace
        self.orders = orders
        self.number: list[int] = []  # an instruction's number on its stream, counted from 1

    def run(self) -> Iterator[Problem]:
        trace, number, streams = self.trace, self.number, self.trace.streams
        reads, writes, frees = trace.uses, trace.writes, trace.frees
        writer: dict[Slot, int] = {}
        readers: dict[Slot, list[int]] = {}
        started = self._executions()
        for i, clock in self._clocks():
            if i in started:
                yield from self._order(i, started[i], clock)
            for slot in reads[i]:
                w = writer.get(slot)
                if w is not None and clock[streams[w]] < number[w]:
                    yield self._missing(i, w, slot)
                readers.setdefault(slot, []).append(i)
            for slot in writes[i] + frees[i]:
                before = readers.pop(slot, [])
                if slot in writer:
                    before.append(writer[slot])
                for j in before:
                    if j != i and clock[streams[j]] < number[j]:
                        yield self._missing(i, j, slot)
                writer[slot] = i

    def _clocks(self) -> Iterator[tuple[int, list[int]]]:
        """Each instruction with the clock under which it starts."""
        trace, number = self.trace, self.number
        size = len(trace.stream_names)
        clocks = [[0] * size for _ in range(size)]
        awaited = set(trace.waits)
        events: dict[int, tuple[int, ...]] = {}
        for i, (s, waited) in enumerate(zip(trace.streams, trace.waits, strict=True)):
            clock = clocks[s]
            if waited >= 0:
                clock[:] = map(max, clock, events[waited])
            yield i, clock
            clock[s] += 1
            number.append(clock[s])
            if i in awaited:
                events[i] = tuple(clock)

    def _executions(self) -> dict[int, list[tuple[int, int]]]:
        """By position: the positions of what an order puts before it, with the directive.

        A receive is posted early by design and needs no place in an order; its message does what
        the order asks.
        """
        if not self.orders:
            return {}
        wanted = set(self.orders)
        for pairs in self.orders.values():
            wanted.update(before for before, _ in pairs)
        trace = self.trace
        at: dict[NodeId, int] = {}
        for i, instruction in enumerate(trace.instructions):
            if instruction.node not in wanted or isinstance(instruction, Accumulate):
                continue
            meeting = trace.meetings[i]
            if (meeting is not None and meeting.role != "receive") or (
                meeting is None and trace.writes[i]
            ):
                at[instruction.node] = i
        return {
            at[node]: [(at[before], directive) for before, directive in pairs if before in at]
            for node, pairs in self.orders.items()
            if node in at
        }

    def _order(
        self, i: int, earlier: Sequence[tuple[int, int]], clock: Sequence[int]
    ) -> Iterator[Problem]:
        """Orders that the instruction at *i* breaks. Between chunks the order is one of completion;
        an order that names communication is one of issue.
        """
        trace, dag = self.trace, self.subject.dag
        nodes = [dag.nodes[trace.instructions[k].node] for k in (i, *(j for j, _ in earlier))]
        for (j, directive), before in zip(earlier, nodes[1:], strict=True):
            strict = isinstance(before, Chunk) and isinstance(nodes[0], Chunk)
            if j < i and not (strict and clock[trace.streams[j]] < self.number[j]):
                continue
            text = (
                f"order broken: {self.subject.at(trace.device, i)} must start after "
                f"{self.subject.at(trace.device, j)}"
            )
            if 0 <= directive < len(dag.directives):
                text += f"\n    directive {directive}: {dag.directives[directive]}"
            yield Problem(CHECK, text)

    def _missing(self, i: int, other: int, slot: Slot) -> Problem:
        """A race as a small table."""
        subject, trace = self.subject, self.trace
        rows = [
            (
                f"#{k}",
                str(trace.stream_names[trace.streams[k]]),
                subject.at(trace.device, k).split(" ", 3)[-1],
                f"{self._access(k, slot)} %{slot}",
            )
            for k in (other, i)
        ]
        return Problem(
            CHECK,
            f"missing wait on device {trace.device} for {subject.slot(trace.device, slot)}: "
            f"nothing makes #{i} wait for #{other}\n"
            + table(("at", "stream", "instruction", ""), rows),
        )

    def _access(self, i: int, slot: Slot) -> str:
        """What the instruction at *i* does with *slot*."""
        if slot in self.trace.frees[i]:
            return "frees"
        return "writes" if slot in self.trace.writes[i] else "reads"

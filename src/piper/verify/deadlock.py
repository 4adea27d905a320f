"""A plan comes to its end when messages and collectives are rendezvous.

The model is the strictest that a device may follow: one host per device issues instructions in
order; a ``Wait`` blocks the host until its event has happened; so does work that touches what
communication in flight on its own stream writes, until that stream is empty; work on one stream
runs in issue order, each starting when the one before is complete; a message or collective
completes once it has started on all its members. Completion never disables anything, so one
execution decides: if it does not get stuck, no execution does, on this or any laxer device.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from piper.ids import DeviceId, Slot
from piper.ops.base import CommunicatorId
from piper.verify.trace import Problem, Subject, Trace, directives_about, table

CHECK = "deadlock"

Place: TypeAlias = tuple[int, int]
"""A device and a position in its program."""

Meeting: TypeAlias = tuple[CommunicatorId, int]
"""The k-th message or collective of a communicator."""


@dataclass(slots=True)
class Execution:
    """The state of one execution of a plan. Requires that communicators match.

    ``completed`` lists completions in order; those of one rendezvous stand together, as one entry.
    """

    subject: Subject
    completed: list[tuple[Place, ...]] = field(default_factory=list)
    next: list[int] = field(default_factory=list)  # next instruction to issue, per device
    settling: list[set[int]] = field(default_factory=list)  # instructions that need an empty stream
    done: list[bytearray] = field(default_factory=list)
    queues: list[list[deque[int]]] = field(default_factory=list)  # issued, incomplete, per stream
    meeting_of: list[dict[int, Meeting]] = field(default_factory=list)
    arrived: dict[Meeting, list[Place]] = field(default_factory=dict)

    def run(self) -> None:
        """Execute until the end or until stuck."""
        traces = self.subject.traces
        self.next = [0] * len(traces)
        self.settling = [_settling(t) for t in traces]
        self.done = [bytearray(len(t.instructions)) for t in traces]
        self.queues = [[deque() for _ in t.stream_names] for t in traces]
        self.meeting_of = [{} for _ in traces]
        for device, trace in enumerate(traces):
            counts: dict[CommunicatorId, int] = {}
            mine = self.meeting_of[device]
            for i, meeting in enumerate(trace.meetings):
                if meeting is not None:
                    k = counts.get(meeting.communicator, 0)
                    counts[meeting.communicator] = k + 1
                    mine[i] = (meeting.communicator, k)
        runnable = deque(range(len(traces)))
        while runnable:
            self._issue(runnable.popleft(), runnable)

    def stuck(self) -> list[int]:
        """Devices that did not finish."""
        return [
            device
            for device, trace in enumerate(self.subject.traces)
            if self.next[device] < len(trace.instructions) or any(self.queues[device])
        ]

    def _issue(self, device: int, runnable: deque[int]) -> None:
        """Let the host of *device* go on until it must wait."""
        trace = self.subject.traces[device]
        done, queues, completed = self.done[device], self.queues[device], self.completed
        streams, meetings, waits = trace.streams, trace.meetings, trace.waits
        settling = self.settling[device]
        i, end = self.next[device], len(streams)
        while i < end:
            waited = waits[i]
            if waited >= 0 and not done[waited]:
                break
            queue = queues[streams[i]]
            if queue and i in settling:
                break
            if meetings[i] is None and not queue:
                done[i] = 1
                completed.append(((device, i),))
            else:
                queue.append(i)
                if len(queue) == 1:
                    self._start(device, i, runnable)
            i += 1
        self.next[device] = i

    def _start(self, device: int, i: int, runnable: deque[int]) -> None:
        """Start the work at the head of a stream, and whatever can start because of it."""
        work: list[Place] = [(device, i)]
        while work:
            place = work.pop()
            device, i = place
            meeting = self.subject.traces[device].meetings[i]
            together = [place]
            if meeting is not None:
                key = self.meeting_of[device][i]
                together = self.arrived.setdefault(key, [])
                together.append(place)
                if len(together) < len(self.subject.members(meeting)):
                    continue
                del self.arrived[key]
            self.completed.append(tuple(together))
            for member, at in together:
                self.done[member][at] = 1
                queue = self.queues[member][self.subject.traces[member].streams[at]]
                queue.popleft()
                if queue:
                    work.append((member, queue[0]))
                runnable.append(member)


def _settling(trace: Trace) -> set[int]:
    """The instructions that touch what work in flight on their own stream writes."""
    flying: list[set[Slot]] = [set() for _ in trace.stream_names]
    found: set[int] = set()
    for i, s in enumerate(trace.streams):
        written = flying[s]
        if written and not (
            written.isdisjoint(trace.reads[i])
            and written.isdisjoint(trace.frees[i])
            and written.isdisjoint(trace.writes[i])
        ):
            found.add(i)
            written.clear()
        if trace.instructions[i].asynchronous:
            written.update(trace.writes[i])
    return found


def check_deadlock(execution: Execution) -> Iterator[Problem]:
    """The cycle in which a finished *execution* is stuck, if it is."""
    stuck = execution.stuck()
    if not stuck:
        return
    subject = execution.subject
    chain = _chain(execution, stuck[0])
    rows = []
    nodes = []
    for device, at, reason, next_device, next_at in chain:
        instruction = subject.traces[device].instructions[at]
        other = subject.traces[next_device].instructions[next_at]
        nodes += [instruction.node, other.node]
        rows.append(
            (
                str(device),
                _text(subject, device, at),
                reason,
                _text(subject, next_device, next_at) + f" on device {next_device}",
            )
        )
    text = (
        f"{len(stuck)} of {len(subject.traces)} devices never finish; each line waits for the "
        "next, the last for the first:\n" + table(("device", "instruction", "", "waits for"), rows)
    )
    if directives := directives_about(subject.dag, nodes):
        text += "\n  the orders that these come from:\n" + "\n".join(f"    {d}" for d in directives)
    yield Problem(CHECK, text)


Link: TypeAlias = tuple[int, int, str, int, int]
"""Device, position, reason, and the device and position that must complete, start or be issued
first.
"""


def _chain(execution: Execution, device: int) -> list[Link]:
    """The cycle of waiting that *device* runs into."""
    links: list[Link] = []
    place_index: dict[Place, int] = {}
    place: Place = (device, _blocker(execution, device))
    while place not in place_index:
        place_index[place] = len(links)
        link = _waits_for(execution, place)
        links.append(link)
        place = (link[3], link[4])
    return links[place_index[place] :]


def _blocker(execution: Execution, device: int) -> int:
    """The instruction that keeps *device* from finishing: the wait its host is at, or a head of a
    stream.
    """
    if execution.next[device] < len(execution.subject.traces[device].instructions):
        return execution.next[device]
    return next(queue[0] for queue in execution.queues[device] if queue)


def _waits_for(execution: Execution, place: Place) -> Link:
    """Why the instruction at *place* is not complete, as the instruction to blame."""
    device, i = place
    trace = execution.subject.traces[device]
    if i > execution.next[device]:
        return (device, i, "is issued after", device, execution.next[device])
    if i == execution.next[device]:
        waited = trace.waits[i]
        if waited < 0 or execution.done[device][waited]:
            waited = execution.queues[device][trace.streams[i]][0]
        return (device, i, "needs", device, waited)
    head = execution.queues[device][trace.streams[i]][0]
    if head != i:
        return (device, i, "is on one stream behind", device, head)
    key = execution.meeting_of[device][i]
    here = {d for d, _ in execution.arrived[key]}
    meeting = trace.meetings[i]
    assert meeting is not None
    absent = next(d for d in execution.subject.members(meeting) if d not in here)
    return (device, i, "meets", absent, _position(execution, absent, key))


def _position(execution: Execution, device: DeviceId, key: Meeting) -> int:
    """Where *device* takes part in a meeting."""
    return next(i for i, k in execution.meeting_of[device].items() if k == key)


def _text(subject: Subject, device: int, i: int) -> str:
    """An instruction without its device."""
    return subject.at(device, i).split(" ", 2)[-1]

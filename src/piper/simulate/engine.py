"""Discrete-event execution of a plan: when does every instruction start and end, and what did it
wait for?

Two kinds of device. Where the host *blocks* (a CPU), one host per device issues instructions in
order: local work is done when it is issued, communication is in flight from then on, behind what
its stream has in flight already; a ``Wait``, and work that touches what communication on its own
stream fills, stop the host. Elsewhere (a GPU) the host runs ahead, instruction i being issued after
i times the launch time; each stream takes its instructions in issue order, each as soon as the one
before is complete; a ``Wait`` stops its stream only.

A message or collective starts when all its members have come to it, and ends for all of them at
once. Its bytes go through ports; what is under way in one port at once shares its bandwidth in
equal parts, and goes as fast as the slowest of its ports lets it. Where the timing says so, local
work and communication of a device slow each other down (``hosts``).

Of a folded plan (see ``Plan.roles``) only the devices that have a program come; the others do the
same at the same times, and load the links like them.
"""

import heapq
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from piper.errors import PlanError
from piper.ids import DeviceId, EventId, Slot, Stream
from piper.ops.base import CommunicatorId, Instruction, Rendezvous
from piper.plan.model import Plan
from piper.plan.topology import Contention, Port
from piper.simulate.hosts import Hosts

Place: TypeAlias = int
"""An instruction: its number counted over all devices."""

NOTHING = -1


@dataclass(frozen=True, slots=True)
class Flow:
    """A message or collective under way: after ``latency`` seconds, ``nbytes`` through ``ports``.
    Beside each port stands how many flows like this one are in it (not 1 only in a folded plan),
    and the fraction of the bytes that goes through it.
    """

    latency: float
    nbytes: float = 0.0
    ports: tuple[tuple[Port, float, float], ...] = ()


class Timing(Protocol):
    """What the engine must be told."""

    @property
    def host_blocks(self) -> bool: ...

    @property
    def launch(self) -> float: ...

    @property
    def contention(self) -> Contention | None:
        """How hosts that block and their communication slow each other down; ``None``: not at
        all.
        """

    def local(self, device: DeviceId, instruction: Instruction) -> float:
        """Seconds of local work, and of issuing communication."""

    def flow(self, members: Sequence[tuple[DeviceId, Instruction]]) -> Flow:
        """What a rendezvous asks of the links; *members* are those that have a program."""

    def bandwidth(self, port: Port) -> float:
        """Bytes per second."""


@dataclass(slots=True)
class Run:
    """The outcome, by place: when each instruction started and ended, and the place whose end it
    waited for last (:data:`NOTHING`: none). Device d's instructions are places ``offsets[d]`` to
    ``offsets[d + 1] - 1``. ``meeting`` numbers rendezvous, ``events`` counts what the engine
    handled.
    """

    offsets: list[int]
    instructions: list[Instruction]
    device: list[DeviceId]
    start: list[float]
    end: list[float]
    cause: list[Place]
    meeting: list[int]
    events: int = 0

    def places(self, device: int) -> range:
        """The places of a device, in issue order."""
        return range(self.offsets[device], self.offsets[device + 1])


@dataclass(frozen=True, slots=True)
class Connections:
    """What a plan's instructions wait for, by place: ``sources`` are the places that must be
    complete, besides what the host does before; ``members`` the places of each rendezvous.
    """

    run: Run
    sources: list[list[Place]]
    members: list[list[Place]]


def connect(plan: Plan, *, host_blocks: bool) -> Connections:
    """The connections of *plan* on one kind of device, and a :class:`Run` to be filled in."""
    engine = _Engine(plan, _Untimed(host_blocks))
    sources: list[list[Place]] = [[] for _ in engine.result.instructions]
    for lists in (engine.dependants, engine.gated):
        for source, places in enumerate(lists):
            for place in places:
                sources[place].append(source)
    members: list[list[Place]] = [[] for _ in engine.meetings]
    for place, number in enumerate(engine.result.meeting):
        if number != NOTHING:
            members[number].append(place)
    return Connections(engine.result, sources, members)


@dataclass(frozen=True, slots=True)
class _Untimed:
    """A :class:`Timing` that is asked for nothing."""

    host_blocks: bool
    launch: float = 0.0
    contention: Contention | None = None

    def local(self, device: DeviceId, instruction: Instruction) -> float:
        raise NotImplementedError

    def flow(self, members: Sequence[tuple[DeviceId, Instruction]]) -> Flow:
        raise NotImplementedError

    def bandwidth(self, port: Port) -> float:
        raise NotImplementedError


def run(plan: Plan, timing: Timing) -> Run:
    """Execute *plan*. Deterministic.

    Raises :class:`~piper.errors.PlanError` when the plan never comes to its end; the verifier says
    why.
    """
    return _Engine(plan, timing).run()


# Kinds of events, in the order in which they happen at one time.
_DONE, _FLOWING, _FLOWN, _ISSUED, _WORKED = range(5)


_Event: TypeAlias = tuple[float, int, int, int, int]
"""Time, kind, number in the order in which they were foreseen, what happens, version of the
forecast: handled in this order.
"""


@dataclass(slots=True)
class _Meeting:
    """One message or collective: how many of its members are still to come, and who came."""

    absent: int
    places: list[Place] = field(default_factory=list)
    left: float = 0.0
    rate: float = 0.0
    since: float = 0.0
    version: int = 0
    ports: tuple[tuple[int, float, float], ...] = ()


class _Engine:
    def __init__(self, plan: Plan, timing: Timing) -> None:
        self.plan, self.timing = plan, timing
        self.blocks = timing.host_blocks
        self.result = _lay_out(plan)
        count = len(self.result.instructions)
        self.pending = [0] * count  # completions that an instruction still needs before it starts
        self.gates = [0] * count  # of communication: what it needs before it meets the others
        self.gated: list[list[Place]] = [[] for _ in range(count)]  # whose gates open on completion
        self.dependants: list[list[Place]] = [[] for _ in range(count)]
        self.meetings: list[_Meeting] = []
        self.port_numbers: dict[Port, int] = {}
        self.port_users: list[dict[int, float]] = []
        self.port_bandwidth: list[float] = []
        self.heap: list[_Event] = []
        # What is foreseen for this very moment, as most is, comes in order by itself, kind by kind.
        self.now = 0.0
        self.at_once: dict[int, deque[_Event]] = {_DONE: deque(), _ISSUED: deque()}
        self.sequence = 0
        self.finished = 0
        self.hosts: Hosts | None = None
        if self.blocks and timing.contention is not None:
            self.hosts = Hosts(
                timing.contention, lambda time, d, number: self._push(time, _WORKED, d, number)
            )
            self.flying: dict[DeviceId, dict[int, None]] = {}
        self._connect()

    # --- what depends on what ---------------------------------------------------------------------

    def _connect(self) -> None:
        keys: dict[tuple[CommunicatorId, int], int] = {}
        represented = [bool(mine.instructions) for mine in self.plan.devices]
        sizes: dict[CommunicatorId, int] = {}
        for device in range(len(self.plan.devices)):
            counts: dict[CommunicatorId, int] = {}
            lanes = _Lanes()
            for place in self.result.places(device):
                instruction = self.result.instructions[place]
                meeting = instruction.rendezvous()
                self._depend(place, lanes.before(instruction, blocks=self.blocks))
                if meeting is not None:
                    self._gate(place, lanes.last_message(instruction.stream))
                    self._join(place, meeting, counts, keys, sizes, represented)
                lanes.add(place, instruction, meeting)

    def _depend(self, place: Place, sources: Collection[Place]) -> None:
        if self.blocks and place > self.result.offsets[self.result.device[place]]:
            self.pending[place] += 1  # the host comes to it
        self.pending[place] += len(sources)
        for source in sources:
            self.dependants[source].append(place)

    def _gate(self, place: Place, source: Place) -> None:
        """Communication meets its peers once it is issued and its stream got to it."""
        self.gates[place] = 1
        if self.blocks and source != NOTHING:
            self.gates[place] = 2
            self.gated[source].append(place)

    def _join(
        self,
        place: Place,
        meeting: Rendezvous,
        counts: dict[CommunicatorId, int],
        keys: dict[tuple[CommunicatorId, int], int],
        sizes: dict[CommunicatorId, int],
        represented: Sequence[bool],
    ) -> None:
        """Number the rendezvous that *place* takes part in: the k-th of its communicator."""
        name = meeting.communicator
        k = counts[name] = counts.get(name, -1) + 1
        number = keys.setdefault((name, k), len(self.meetings))
        if number == len(self.meetings):
            if name not in sizes:
                sizes[name] = sum(represented[member] for member in meeting.members)
            self.meetings.append(_Meeting(sizes[name]))
        self.result.meeting[place] = number

    # --- time -------------------------------------------------------------------------------------

    def run(self) -> Run:
        result = self.result
        for device in range(len(self.plan.devices)):
            places = result.places(device)
            for place in places[:1] if self.blocks else places:
                if not self.pending[place]:
                    self._begin(place, 0.0)
        handlers: tuple[Callable[[int, int, float], None], ...] = (
            self._done,
            self._flowing,
            self._flown,
            self._issued,
            self._worked,
        )
        while (event := self._next()) is not None:
            self.now, kind, _, number, version = event
            result.events += 1
            handlers[kind](number, version, self.now)
        if self.finished < len(result.instructions):
            stuck = {result.device[p] for p in range(len(result.instructions)) if result.end[p] < 0}
            raise PlanError(
                f"the plan never ends: devices {', '.join(map(str, sorted(stuck)))} wait for each other; "
                "piper.verify(plan) shows the cycle"
            )
        return result

    def _push(self, time: float, kind: int, number: int, version: int = 0) -> None:
        self.sequence += 1
        event = (time, kind, self.sequence, number, version)
        if time == self.now and kind in self.at_once:
            self.at_once[kind].append(event)
        else:
            heapq.heappush(self.heap, event)

    def _next(self) -> _Event | None:
        """The first of all events that are foreseen."""
        queue = self.at_once[_DONE] or self.at_once[_ISSUED]
        if queue and not (self.heap and self.heap[0] < queue[0]):
            return queue.popleft()
        return heapq.heappop(self.heap) if self.heap else None

    def _begin(self, place: Place, now: float) -> None:
        """All that *place* needs is there."""
        result, timing = self.result, self.timing
        device = result.device[place]
        if not self.blocks:
            issued = (place - result.offsets[device]) * timing.launch
            now = max(now, issued)
        result.start[place] = now
        instruction = result.instructions[place]
        seconds = timing.launch if self.blocks else 0.0
        if result.meeting[place] == NOTHING or self.blocks:
            seconds += timing.local(device, instruction)
        kind = _DONE if result.meeting[place] == NOTHING else _ISSUED
        if self.hosts is None or seconds <= timing.launch:
            self._push(now + seconds, kind, place)
            return
        self.hosts.begin(device, place, kind, seconds, now)
        self._rate_all(device, now)

    def _worked(self, device: int, forecast: int, now: float) -> None:
        """A host is through with its work, unless its pace has changed since that was foreseen."""
        assert self.hosts is not None
        if (over := self.hosts.end(DeviceId(device), forecast)) is None:
            return
        place, kind = over
        self._rate_all(DeviceId(device), now)
        (self._done if kind == _DONE else self._issued)(place, 0, now)

    def _done(self, place: Place, _version: int, now: float) -> None:
        """*place* is complete."""
        self.result.end[place] = now
        self.finished += 1
        for after in self.dependants[place]:
            self._release(after, place, now)
        for after in self.gated[place]:
            self._open(after, place, now)
        if self.blocks and self.result.meeting[place] == NOTHING:
            self._host_next(place, place, now)

    def _issued(self, place: Place, _version: int, now: float) -> None:
        """Communication is issued."""
        began_after = self.result.cause[place]
        self._open(place, NOTHING, now)
        if self.blocks:
            self._host_next(place, began_after, now)

    def _host_next(self, place: Place, source: Place, now: float) -> None:
        """The host is done with *place*, and comes to the next instruction because of *source*."""
        following = place + 1
        if following < self.result.offsets[self.result.device[place] + 1]:
            self._release(following, source, now)

    def _release(self, place: Place, source: Place, now: float) -> None:
        self.pending[place] -= 1
        if not self.pending[place]:
            self.result.cause[place] = source
            self._begin(place, now)

    def _open(self, place: Place, source: Place, now: float) -> None:
        """Something that communication needs before it meets its peers has happened: the last such
        thing is its cause.
        """
        self.gates[place] -= 1
        if self.gates[place]:
            return
        if source != NOTHING:
            self.result.cause[place] = source
        self.result.start[place] = now
        meeting = self.meetings[self.result.meeting[place]]
        meeting.places.append(place)
        meeting.absent -= 1
        if not meeting.absent:
            self._start(self.result.meeting[place], place, now)

    # --- links ------------------------------------------------------------------------------------

    def _start(self, number: int, last: Place, now: float) -> None:
        """All members are there; the others waited for the *last*."""
        meeting, result = self.meetings[number], self.result
        for place in meeting.places:
            if place != last and result.start[place] < now:
                result.cause[place] = last
        members = [(result.device[p], result.instructions[p]) for p in meeting.places]
        flow = self.timing.flow(members)
        meeting.left = flow.nbytes
        meeting.ports = tuple((self._port(p), share, part) for p, share, part in flow.ports)
        for place in meeting.places:
            result.start[place] = now
        self._push(now + flow.latency, _FLOWING, number)

    def _port(self, port: Port) -> int:
        number = self.port_numbers.setdefault(port, len(self.port_users))
        if number == len(self.port_users):
            self.port_users.append({})
            self.port_bandwidth.append(self.timing.bandwidth(port))
        return number

    def _flowing(self, number: int, _version: int, now: float) -> None:
        """The latency is over."""
        meeting = self.meetings[number]
        if not meeting.ports or meeting.left <= 0:
            self._complete(meeting, now)
            return
        meeting.since = now
        for port, share, _ in meeting.ports:
            self.port_users[port][number] = share
        self._take_off(number, now)
        self._share_out(meeting, now)

    def _flown(self, number: int, version: int, now: float) -> None:
        """All bytes have arrived, unless the rate has changed since that was foreseen."""
        meeting = self.meetings[number]
        if meeting.version != version:
            return
        for port, _, _ in meeting.ports:
            del self.port_users[port][number]
        self._land(number, now)
        self._share_out(meeting, now)
        self._complete(meeting, now)

    def _share_out(self, changed: _Meeting, now: float) -> None:
        """Give everything that shares a port with *changed* its new rate."""
        affected = dict.fromkeys(n for port, _, _ in changed.ports for n in self.port_users[port])
        for number in affected:
            self._rate(number, now)

    def _rate(self, number: int, now: float) -> None:
        """Give one flow its new rate."""
        meeting = self.meetings[number]
        rate = min(
            self.port_bandwidth[port] / (sum(self.port_users[port].values()) * part)
            for port, _, part in meeting.ports
        )
        if self.hosts is not None:
            rate *= self.hosts.traffic(self._members(number))
        if rate == meeting.rate:
            return
        meeting.left -= meeting.rate * (now - meeting.since)
        meeting.rate, meeting.since = rate, now
        meeting.version += 1
        self._push(now + max(0.0, meeting.left) / rate, _FLOWN, number, meeting.version)

    def _rate_all(self, device: DeviceId, now: float) -> None:
        """*device* begins to compute, or stops."""
        for number in self.flying.get(device, ()):
            self._rate(number, now)

    def _take_off(self, number: int, now: float) -> None:
        if self.hosts is not None:
            for device in self._members(number):
                self.flying.setdefault(device, {})[number] = None
            self.hosts.communicate(self._members(number), 1, now)

    def _land(self, number: int, now: float) -> None:
        if self.hosts is not None:
            for device in self._members(number):
                del self.flying[device][number]
            self.hosts.communicate(self._members(number), -1, now)

    def _members(self, number: int) -> list[DeviceId]:
        return [self.result.device[place] for place in self.meetings[number].places]

    def _complete(self, meeting: _Meeting, now: float) -> None:
        for place in meeting.places:
            self._done(place, 0, now)


class _Lanes:
    """What the instructions of one device wait for, collected in issue order."""

    def __init__(self) -> None:
        self.last: dict[Stream, Place] = {}
        self.messages: dict[Stream, Place] = {}  # the last communication on each stream
        self.filling: dict[Stream, set[Slot]] = {}
        self.recorders: dict[EventId, tuple[Place, Place]] = {}

    def before(self, instruction: Instruction, *, blocks: bool) -> Collection[Place]:
        """The places that must be complete before *instruction*, the next one, starts, apart from
        what its host does before.
        """
        stream = instruction.stream
        one = self.last.get(stream, NOTHING) if not blocks else self._filled(instruction)
        event = instruction.awaits()
        if event is None:
            return () if one == NOTHING else (one,)
        whole, message = self.recorders[event]
        found = {one, message if blocks else whole}
        found.discard(NOTHING)
        return found

    def _filled(self, instruction: Instruction) -> Place:
        """The last communication on the instruction's stream, if it touches what is being filled
        there.
        """
        filling = self.filling.get(instruction.stream)
        if not filling:
            return NOTHING
        touched = (*instruction.reads(), *instruction.writes(), *instruction.frees())
        if filling.isdisjoint(touched):
            return NOTHING
        filling.clear()
        return self.messages[instruction.stream]

    def last_message(self, stream: Stream) -> Place:
        """The communication issued last on *stream*."""
        return self.messages.get(stream, NOTHING)

    def add(self, place: Place, instruction: Instruction, meeting: Rendezvous | None) -> None:
        """Note *place*."""
        stream = instruction.stream
        self.last[stream] = place
        if meeting is not None:
            self.messages[stream] = place
            self.filling.setdefault(stream, set()).update(instruction.writes())
        if instruction.record is not None:
            self.recorders[instruction.record] = (place, self.last_message(stream))


def _lay_out(plan: Plan) -> Run:
    offsets, instructions, device = [0], list[Instruction](), list[DeviceId]()
    for mine in plan.devices:
        instructions.extend(mine.instructions)
        device.extend([mine.device] * len(mine.instructions))
        offsets.append(len(instructions))
    count = len(instructions)
    return Run(
        offsets=offsets,
        instructions=instructions,
        device=device,
        start=[-1.0] * count,
        end=[-1.0] * count,
        cause=[NOTHING] * count,
        meeting=[NOTHING] * count,
    )

"""The program of one device: instructions in issue order, waits between streams, frees after last
uses.
"""

from collections.abc import Container, Iterable, Sequence

from msgspec.structs import replace

from piper.ids import COMPUTE, DeviceId, EventId, NodeId, Slot, Stream, ValueId
from piper.ir.dag import STATE, Value
from piper.ops.base import Instruction, Message
from piper.ops.compute import Compute
from piper.ops.free import Free
from piper.ops.wait import Wait
from piper.plan.model import DevicePlan, SlotInfo


class Program:
    """Builds a :class:`DevicePlan`.

    ``uses`` says how often each value will be read on this device; reading a value for the last
    time frees it. A free runs on the stream of the last reader, after the other streams' readers.
    Where one of those was issued only just now (a value sent to two devices), waiting for it would
    hold up the device: such a free is put off until the next chunk is done and has sent its
    results.
    """

    def __init__(self, device: DeviceId, uses: dict[ValueId, int]) -> None:
        self.device = device
        self._uses = uses
        self._slots: list[SlotInfo] = []
        self._slot_of: dict[ValueId, Slot] = {}
        self._instructions: list[Instruction] = []
        self._streams: list[Stream] = []
        self._waited: dict[tuple[Stream, Stream], int] = {}
        self._writer: dict[Slot, int] = {}
        self._readers: dict[Slot, dict[Stream, int]] = {}
        self._signals: set[int] = set()
        self._waits: dict[int, int] = {}
        self._put_off: dict[Stream, list[Slot]] = {}  # to be freed before the next chunk but one
        self._settled: dict[Stream, list[Slot]] = {}  # to be freed before the next chunk
        self._last_chunks = (-1, -1)  # positions of the last chunk but one, and of the last

    def is_last_use(self, slot: Slot) -> bool:
        """Whether one read of *slot* is left, and the reads before are over as far as *COMPUTE*
        knows: it may be emptied by the next instruction there without holding up the device.
        """
        return self._uses[self._slots[slot].value] == 1 and not self._just_issued(slot, COMPUTE)

    def has(self, value: ValueId) -> bool:
        """Whether *value* is on this device by now."""
        return value in self._slot_of

    def slot(self, value: ValueId) -> Slot:
        """The slot of a value that is on this device."""
        return self._slot_of[value]

    def value(self, slot: Slot) -> ValueId:
        """The value that *slot* was made for."""
        return self._slots[slot].value

    def allocate(
        self,
        value: Value,
        message: Message,
        shard: tuple[int, int] | None = None,
        experts: tuple[int, int] | None = None,
    ) -> Slot:
        """A new slot for *value*; *shard* says which of how many slices of a parameter, *experts*
        which of how many parts of its experts.
        """
        slot = Slot(len(self._slots))
        self._slots.append(SlotInfo(value.id, value.role, value.name, message, shard, experts))
        self._slot_of[value.id] = slot
        return slot

    def alias(self, value: ValueId, slot: Slot) -> None:
        """Let *value* be another name of *slot*: its reads take the place of one read of the slot's
        own value.
        """
        self._slot_of[value] = slot
        self._uses[self._slots[slot].value] += self._uses[value] - 1

    def rename(self, value: ValueId, slot: Slot) -> None:
        """Let *value* be what the state *slot* holds from now on."""
        self._slot_of[value] = slot

    def emit(self, instruction: Instruction, *, consume: Iterable[Slot] = ()) -> None:
        """Append *instruction*, after waits for what it reads and overwrites; free the slots of
        *consume* (a slot counts once for each time that it occurs) that were used for the last
        time.
        """
        if isinstance(instruction, Compute):
            self._settle()
        stream, reads, writes = instruction.stream, instruction.reads(), instruction.writes()
        self._wait_for_writers(stream, reads)
        if writes:
            self._wait_for_all(stream, writes)
        if frees := instruction.frees():
            self._wait_for_all(stream, frees)
        index = self._append(instruction)
        writer, readers = self._writer, self._readers
        for slot in writes:
            writer[slot] = index
            readers.pop(slot, None)
        for slot in reads:
            if (mine := readers.get(slot)) is None:
                readers[slot] = {stream: index}
            else:
                mine[stream] = index
        if isinstance(instruction, Compute):
            self._last_chunks = (self._last_chunks[1], index)
        self._release(consume, stream, frees)

    def wait_for(self, slots: Iterable[Slot], stream: Stream = COMPUTE) -> None:
        """Let *stream* wait for whatever fills *slots*."""
        self._wait_for_writers(stream, slots)

    def release_late(self, slots: Iterable[Slot]) -> None:
        """What was just issued reads *slots* and has to be waited for before they are given up: if
        it was their last reader, they are freed before the next chunk but one, on the stream that
        computes.
        """
        for slot in slots:
            info = self._slots[slot]
            if info.role in STATE:
                continue
            self._uses[info.value] -= 1
            if not self._uses[info.value]:
                self._put_off.setdefault(COMPUTE, []).append(slot)

    def free_now(self, values: Container[ValueId]) -> None:
        """Do not put off any longer what holds *values*."""
        for waiting in (self._settled, self._put_off):
            for stream, slots in waiting.items():
                if dead := [slot for slot in slots if self._slots[slot].value in values]:
                    waiting[stream] = [slot for slot in slots if slot not in dead]
                    self._free(dead, stream)

    def finish(self) -> DevicePlan:
        """The plan; events are numbered by the instructions that something waits for."""
        self._settle()
        self._settle()
        events = {index: EventId(i) for i, index in enumerate(sorted(self._signals))}
        instructions = list(self._instructions)
        for index, event in events.items():
            instructions[index] = replace(instructions[index], record=event)
        for index, signal in self._waits.items():
            instructions[index] = replace(instructions[index], event=events[signal])
        return DevicePlan(self.device, tuple(self._slots), tuple(instructions))

    def _append(self, instruction: Instruction) -> int:
        self._instructions.append(instruction)
        self._streams.append(instruction.stream)
        return len(self._instructions) - 1

    def _wait_for_writers(self, stream: Stream, slots: Iterable[Slot]) -> None:
        """Let *stream* wait for whatever wrote *slots*."""
        writer, streams = self._writer, self._streams
        for slot in slots:
            index = writer.get(slot)
            if index is not None and streams[index] != stream:
                self._wait_for(stream, index)

    def _wait_for_all(self, stream: Stream, slots: Iterable[Slot]) -> None:
        """Let *stream* wait for whatever wrote or reads *slots*."""
        readers = self._readers
        for slot in slots:
            self._wait_for_writers(stream, (slot,))
            for other, index in readers.get(slot, {}).items():
                if other != stream:
                    self._wait_for(stream, index)

    def _wait_for(self, stream: Stream, index: int) -> None:
        """Let *stream* wait for instruction *index* of another stream, unless it has waited for a
        later one there.
        """
        key = (stream, self._streams[index])
        if self._waited.get(key, -1) >= index:
            return
        self._waited[key] = index
        self._signals.add(index)
        wait = Wait(node=self._instructions[index].node, stream=stream, event=EventId(-1))
        self._waits[self._append(wait)] = index

    def _release(
        self, consumed: Iterable[Slot], stream: Stream, emptied: Sequence[Slot] = ()
    ) -> None:
        dead: list[Slot] = []
        for slot in consumed:
            info = self._slots[slot]
            if info.role in STATE:
                continue
            self._uses[info.value] -= 1
            if self._uses[info.value] or slot in emptied:
                continue
            if self._just_issued(slot, stream):
                self._put_off.setdefault(stream, []).append(slot)
            else:
                dead.append(slot)
        if dead:
            self._free(dead, stream)

    def _settle(self) -> None:
        """Free what was put off before the last chunk."""
        for stream, slots in self._settled.items():
            if slots:
                self._free(slots, stream)
        self._settled, self._put_off = self._put_off, {}

    def _just_issued(self, slot: Slot, stream: Stream) -> bool:
        """Whether another stream's reader of *slot*, issued since the last chunk but one, may still
        be under way.
        """
        readers = self._readers.get(slot, {})
        if len(readers) < 2:
            return False
        since = self._last_chunks[0]
        return any(
            reader > since and other != stream and self._waited.get((stream, other), -1) < reader
            for other, reader in readers.items()
        )

    def _free(self, dead: Sequence[Slot], stream: Stream) -> None:
        self._wait_for_all(stream, dead)
        self._append(Free(node=NodeId(-1), stream=stream, slots=tuple(dead)))

    def drop_unread(self, slots: Iterable[Slot], stream: Stream = COMPUTE) -> None:
        """Free those of *slots*, just written on *stream*, that nothing will read."""
        dead = [s for s in slots if not self._uses.get(self._slots[s].value)]
        if dead:
            self._free(dead, stream)

"""The program of one device: instructions in issue order, waits between streams, frees after last uses."""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from piper.ids import COMPUTE, DeviceId, EventId, NodeId, Slot, Stream, ValueId
from piper.ir.dag import STATE, Value
from piper.ops.base import Instruction, Message
from piper.ops.free import Free
from piper.ops.wait import Wait
from piper.plan.model import DevicePlan, SlotInfo


class Program:
    """Builds a :class:`DevicePlan`.

    ``uses`` says how often each value will be read on this device; reading a value for the last time frees it. A free runs on the
    stream of the last reader, after the other streams' readers.
    """

    def __init__(self, device: DeviceId, uses: dict[ValueId, int]) -> None:
        self._device = device
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

    def has(self, value: ValueId) -> bool:
        """Whether *value* is on this device by now."""
        return value in self._slot_of

    def slot(self, value: ValueId) -> Slot:
        """The slot of a value that is on this device."""
        return self._slot_of[value]

    def allocate(self, value: Value, message: Message) -> Slot:
        """A new slot for *value*."""
        slot = Slot(len(self._slots))
        self._slots.append(SlotInfo(value.id, value.role, value.name, message))
        self._slot_of[value.id] = slot
        return slot

    def alias(self, value: ValueId, slot: Slot) -> None:
        """Let *value* be another name of *slot*: its reads take the place of one read of the slot's own value."""
        self._slot_of[value] = slot
        self._uses[self._slots[slot].value] += self._uses[value] - 1

    def emit(self, instruction: Instruction, *, consume: Iterable[Slot] = ()) -> None:
        """Append *instruction*, after waits for what it reads and overwrites; free the slots of *consume* (a slot
        counts once for each time that it occurs) that were used for the last time.
        """
        stream = instruction.stream
        for slot in instruction.reads():
            self._wait_for(stream, self._writer.get(slot))
        for slot in instruction.writes():
            self._wait_for(stream, self._writer.get(slot))
            for reader in self._readers.get(slot, {}).values():
                self._wait_for(stream, reader)
        index = self._append(instruction)
        for slot in instruction.writes():
            self._writer[slot] = index
            self._readers.pop(slot, None)
        for slot in instruction.reads():
            self._readers.setdefault(slot, {})[stream] = index
        self._release(consume, stream)

    def finish(self) -> DevicePlan:
        """The plan; events are numbered by the instructions that something waits for."""
        events = {index: EventId(i) for i, index in enumerate(sorted(self._signals))}
        instructions = tuple(
            self._finished(index, instruction, events)
            for index, instruction in enumerate(self._instructions)
        )
        return DevicePlan(self._device, tuple(self._slots), instructions)

    def _finished(
        self, index: int, instruction: Instruction, events: dict[int, EventId]
    ) -> Instruction:
        if isinstance(instruction, Wait):
            return replace(instruction, event=events[self._waits[index]])
        return replace(instruction, record=events[index]) if index in events else instruction

    def _append(self, instruction: Instruction) -> int:
        self._instructions.append(instruction)
        self._streams.append(instruction.stream)
        return len(self._instructions) - 1

    def _wait_for(self, stream: Stream, index: int | None) -> None:
        if index is None or self._streams[index] == stream:
            return
        key = (stream, self._streams[index])
        if self._waited.get(key, -1) >= index:
            return
        self._waited[key] = index
        self._signals.add(index)
        wait = Wait(node=self._instructions[index].node, stream=stream, event=EventId(-1))
        self._waits[self._append(wait)] = index

    def _release(self, consumed: Iterable[Slot], stream: Stream) -> None:
        dead: list[Slot] = []
        for slot in consumed:
            info = self._slots[slot]
            if info.role in STATE:
                continue
            self._uses[info.value] -= 1
            if not self._uses[info.value]:
                dead.append(slot)
        if dead:
            self._free(dead, stream)

    def _free(self, dead: Sequence[Slot], stream: Stream) -> None:
        for slot in dead:
            self._wait_for(stream, self._writer.get(slot))
            for reader in self._readers.get(slot, {}).values():
                self._wait_for(stream, reader)
        self._append(Free(node=NodeId(-1), stream=stream, slots=tuple(dead)))

    def drop_unread(self, slots: Iterable[Slot]) -> None:
        """Free those of *slots*, just written on the compute stream, that nothing will read."""
        dead = [s for s in slots if not self._uses.get(self._slots[s].value)]
        if dead:
            self._free(dead, COMPUTE)

"""How much memory each device needs for a step, from the plan alone: see :mod:`piper.plan.memory`
for what is counted.

Every instruction is followed in issue order as the CPU's device executes it. Chunks are not run:
their bodies say which outputs are views of what.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from piper.ids import BodyId, EventId, Slot, Stream
from piper.ir.storages import Given, Memory, output_memory
from piper.ops.accumulate import Accumulate
from piper.ops.all_gather import AllGatherBucket, RefreshBucket
from piper.ops.all_to_all import ExchangeCounts, ExchangeExperts, ExchangeRows
from piper.ops.base import Instruction, Message, shard_length
from piper.ops.bucket import BucketCollective
from piper.ops.compute import Compute
from piper.ops.load_input import LoadInput
from piper.ops.offload import CopyFromHost, CopyToHost
from piper.ops.p2p import PostReceive, Send
from piper.ops.reduce_scatter import ReduceScatterBucket
from piper.ops.update import OptimizerStep
from piper.ops.wait import Wait
from piper.plan.added import added_within
from piper.plan.memory import Category, DeviceMemory, Recorder, category_of, is_state
from piper.plan.model import DevicePlan, Plan, freed_behind

__all__ = ["Category", "DeviceMemory", "account", "adam_bytes", "gloo_frame"]

OptimizerBytes: TypeAlias = Callable[[int], int] | float
"""Bytes of optimizer state for a trained tensor of so many bytes (a slice, if the device holds
one), or a factor.
"""


def adam_bytes(nbytes: int) -> int:
    """Optimizer state of Adam and AdamW: two moments and a step counter (a float32)."""
    return 2 * nbytes + 4


def gloo_frame(nbytes: int) -> int:
    """Bytes of the frame that carries a message of *nbytes* over gloo: padded to 8 bytes, then 72
    of trailer.
    """
    return -(-nbytes // 8) * 8 + 72


def account(
    plan: Plan,
    optimizer_bytes: OptimizerBytes = 0,
    *,
    frame_bytes: Callable[[int], int] = int,
) -> tuple[DeviceMemory, ...]:
    """The memory of each device, in device order, during a step in which the optimizer's state
    exists already.

    *frame_bytes* says how many bytes carry a point-to-point message of so many; by default just
    these (in process), over gloo :func:`gloo_frame`. Without *optimizer_bytes* the optimizer's
    state is not counted.
    """
    if callable(optimizer_bytes):
        of_optimizer = optimizer_bytes
    else:
        factor = optimizer_bytes
        of_optimizer = lambda nbytes: round(factor * nbytes)  # noqa: E731
    bodies: dict[BodyId, tuple[Memory, ...]] = {}
    return tuple(
        _Walk(plan, mine, of_optimizer, frame_bytes, bodies).run() for mine in plan.devices
    )


class _Storage:
    """One allocation; ``holders`` counts, per category, the slots and the communication that keep
    it alive.
    """

    __slots__ = ("holders", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.holders: dict[Category, int] = {}

    def category(self) -> Category | None:
        """Where it counts; ``None`` once nothing holds it."""
        if len(self.holders) == 1:
            return next(iter(self.holders))
        return min(self.holders, key=_PRIORITY.__getitem__, default=None)


_PRIORITY = {category: i for i, category in enumerate(Category)}


@dataclass(slots=True)
class _Ledger:
    """What is alive, in bytes by category."""

    totals: dict[Category, int] = field(default_factory=lambda: dict.fromkeys(Category, 0))

    def hold(self, storage: _Storage, category: Category) -> None:
        """Keep *storage* alive for *category*, once more."""
        before = storage.category()
        storage.holders[category] = storage.holders.get(category, 0) + 1
        self._move(storage, before)

    def release(self, storage: _Storage, category: Category) -> None:
        """The opposite of :meth:`hold`."""
        before = storage.category()
        storage.holders[category] -= 1
        if not storage.holders[category]:
            del storage.holders[category]
        self._move(storage, before)

    def _move(self, storage: _Storage, before: Category | None) -> None:
        after = storage.category()
        if before is not None:
            self.totals[before] -= storage.nbytes
        if after is not None:
            self.totals[after] += storage.nbytes


@dataclass(frozen=True, slots=True)
class _Flight:
    """Communication in flight: what it keeps alive (as what), and the slots that it fills on
    completion.
    """

    keeps: tuple[_Storage, ...]
    fills: tuple[tuple[Slot, _Storage], ...] = ()
    is_send: bool = False
    category: Category = Category.COMMUNICATION


@dataclass(slots=True)
class _Queue:
    """The communication on one stream, as the CPU's device keeps it: oldest first."""

    flying: deque[_Flight] = field(default_factory=deque)
    issued: int = 0
    completed: int = 0
    unsettled: set[Slot] = field(default_factory=set)


class _Walk:
    def __init__(
        self,
        plan: Plan,
        mine: DevicePlan,
        of_optimizer: Callable[[int], int],
        frame_bytes: Callable[[int], int],
        bodies: dict[BodyId, tuple[Memory, ...]],
    ) -> None:
        self.plan, self.mine = plan, mine
        self.frame_bytes, self.bodies = frame_bytes, bodies
        self.ledger = _Ledger()
        self.slots: dict[Slot, _Storage] = {}
        self.queues: dict[Stream, _Queue] = {}
        self.events: dict[EventId, tuple[Stream, int]] = {}
        self.added = added_within(mine.instructions)
        self._hold_state(of_optimizer)

    def run(self) -> DeviceMemory:
        """Follow all instructions."""
        recorder = Recorder(self.mine.device)
        for position, instruction in enumerate(self.mine.instructions):
            self._step(position, instruction)
            recorder.add(position, self.ledger.totals)
        return recorder.finish()

    # --- state ------------------------------------------------------------------------------------

    def _hold_state(self, of_optimizer: Callable[[int], int]) -> None:
        shared: dict[tuple[str, str], _Storage] = {}
        for number, info in enumerate(self.mine.slots):
            if not is_state(info.role):
                continue
            # Several slots may hold one tensor of the state; every seed is a tensor of its own.
            key = (info.role, info.name or str(number))
            storage = shared.setdefault(key, _Storage(info.message.nbytes))
            self._fill(Slot(number), storage)
        if self.mine.device == 0:
            self._hold_unused()
        self._hold_idle_masters()
        for nbytes in self._trained():
            self.ledger.hold(_Storage(of_optimizer(nbytes)), Category.OPTIMIZER)

    def _hold_unused(self) -> None:
        """What no device uses is kept on device 0."""
        plan = self.plan
        used = {info.name for mine in plan.devices for info in mine.slots if is_state(info.role)}
        for name, parameter in plan.dag.parameters.items():
            if name not in used:
                nbytes = parameter.spec.nbytes(plan.bindings)
                self.ledger.hold(_Storage(nbytes), Category.PARAMETERS)
                self._hold_master(name)
        for name, buffer in plan.dag.buffers.items():
            if name not in used:
                nbytes = buffer.spec.nbytes(plan.bindings)
                self.ledger.hold(_Storage(nbytes), Category.BUFFERS)

    def _hold_idle_masters(self) -> None:
        """What is trained, though not in this step, has a master copy too."""
        held: dict[Category, set[str]] = {}
        for info in self.mine.slots:
            held.setdefault(category_of(info.role), set()).add(info.name)
        whole, sliced = (held.get(c, set()) for c in (Category.PARAMETERS, Category.SHARDS))
        for name in sorted(whole - sliced):
            self._hold_master(name)

    def _hold_master(self, name: str) -> None:
        dag = self.plan.dag
        if dag.has_master(name):
            nbytes = dag.parameters[name].spec.numel() * dag.master_dtype(name).itemsize
            self.ledger.hold(_Storage(nbytes), Category.SHARDS)

    def _trained(self) -> Iterable[int]:
        """Bytes of each tensor that the optimizer updates: a parameter, or its slice without
        padding.
        """
        for instruction in self.mine.instructions:
            if not isinstance(instruction, OptimizerStep):
                continue
            for name, slot in zip(instruction.names, instruction.parameters, strict=True):
                spec = self.plan.dag.parameters[name].spec
                shape = spec.sizes(self.plan.bindings)
                if (experts := self.mine.slots[slot].experts) is not None:
                    shape = (shape[0] // experts[1], *shape[1:])
                numel = math.prod(shape)
                if (shard := self.mine.slots[slot].shard) is not None:
                    index, count = shard
                    length = shard_length(shape, count)
                    numel = max(0, min(numel - index * length, length))
                yield numel * self.mine.slots[slot].message.dtype.itemsize

    # --- instructions -----------------------------------------------------------------------------

    def _step(self, position: int, instruction: Instruction) -> None:
        queue = self.queues.setdefault(instruction.stream, _Queue())
        self._settle(queue, instruction)
        match instruction:
            case Compute():
                self._compute(position, instruction)
            case LoadInput():
                self._fill(instruction.slot, self._loaded(instruction))
            case Accumulate():
                self._accumulate(instruction)
            case Wait():
                stream, count = self.events[instruction.event]
                self._complete(self.queues[stream], count)
            case _ if instruction.asynchronous:
                self._issue(queue, instruction)
            case _:
                self._local(instruction)
        if instruction.record is not None:
            self.events[instruction.record] = (instruction.stream, queue.issued)

    def _local(self, instruction: Instruction) -> None:
        """What it writes is new, unless it is stored in place."""
        for slot in instruction.writes():
            if slot not in self.slots:
                self._make(slot)
        for slot in instruction.frees():
            self._empty(slot)

    def _compute(self, position: int, instruction: Compute) -> None:
        memory = self.bodies.get(instruction.body)
        if memory is None:
            body = self.plan.dag.bodies[instruction.body]
            memory = self.bodies[instruction.body] = output_memory(body, self.plan.bindings)
        given = [self.slots[slot] for slot in instruction.inputs]
        made: dict[int, _Storage] = {}
        for slot in freed_behind(self.mine.instructions, position).intersection(instruction.inputs):
            self._empty(slot)
        added = self.added.get(position, {})
        for slot, place in zip(instruction.outputs, memory, strict=True):
            if slot in added:
                continue
            if isinstance(place, Given):
                self._fill(slot, given[place.index])
            else:
                self._fill(slot, made.setdefault(place.number, _Storage(place.nbytes)))

    def _accumulate(self, instruction: Accumulate) -> None:
        for total, left in zip(instruction.totals, instruction.left, strict=True):
            if left in instruction.moved:
                self._fill(total, self.slots[left])
                self._empty(left)
            elif total not in self.slots:
                self._make(total)

    def _loaded(self, instruction: LoadInput) -> _Storage:
        """A microbatch is a view of the batch where it is cut along the first dimension, or not at
        all.
        """
        (leaf,) = (leaf for leaf in self.plan.dag.batch if leaf.index == instruction.leaf)
        return _Storage(instruction.message.nbytes if leaf.batch_dim else 0)

    # --- communication ----------------------------------------------------------------------------

    def _issue(self, queue: _Queue, instruction: Instruction) -> None:
        flight = self._flight(instruction)
        for storage in flight.keeps:
            self.ledger.hold(storage, flight.category)
        while queue.flying and queue.flying[0].is_send:
            self._pop(queue)
        queue.flying.append(flight)
        queue.issued += 1
        queue.unsettled.update(instruction.writes())

    def _flight(self, instruction: Instruction) -> _Flight:
        match instruction:
            case Send(message=message):
                frame = _Storage(self.frame_bytes(message.nbytes))
                return _Flight((frame,), is_send=True)
            case PostReceive(message=message, slot=slot):
                frame = _Storage(self.frame_bytes(message.nbytes))
                self._fill(slot, frame)
                return _Flight((frame,))
            case AllGatherBucket() | RefreshBucket():
                return self._gather(instruction)
            case CopyToHost():
                self._copy(instruction.inputs, instruction.outputs)
                return _Flight(())
            case CopyFromHost():
                kept = self._copy(instruction.inputs, instruction.outputs)
                return _Flight(kept, category=Category.HOST)
            case ReduceScatterBucket(messages=messages, members=members):
                mine = sum(message.nbytes for message in messages)
                part = _Storage(mine)
                fills = tuple((slot, part) for slot in instruction.outputs)
                return _Flight((_Storage(mine * len(members)), part), fills)
            case ExchangeExperts() if instruction.ends is None:
                return self._exchange_experts(instruction)
            case ExchangeExperts() | ExchangeCounts() | ExchangeRows():
                return self._exchange(instruction)
            case _:
                meeting = instruction.rendezvous()
                messages = () if meeting is None else meeting.messages
                flat = _Storage(sum(message.nbytes for message in messages))
                return _Flight((flat,), tuple((slot, flat) for slot in instruction.writes()))

    def _copy(self, inputs: Sequence[Slot], outputs: Sequence[Slot]) -> tuple[_Storage, ...]:
        """Fill *outputs* with copies of the memory that *inputs* are in, each copied once; that
        memory.
        """
        copies: dict[int, tuple[_Storage, _Storage]] = {}
        for source, target in zip(inputs, outputs, strict=True):
            storage = self.slots[source]
            pair = copies.setdefault(id(storage), (storage, _Storage(storage.nbytes)))
            self._fill(target, pair[1])
        return tuple(storage for storage, _ in copies.values())

    def _exchange_experts(self, instruction: ExchangeExperts) -> _Flight:
        """A copy of what is sent; what is received, which is the result, or is put together with
        the device's own part of the copy.
        """
        nbytes, count = instruction.messages[0].nbytes, len(instruction.members)
        (slot,), (_, joined) = instruction.outputs, instruction.dims
        sent, result = _Storage(nbytes), _Storage(nbytes)
        received = result if joined == 0 else _Storage(nbytes // count * (count - 1))
        return _Flight((sent, received), ((slot, result),))

    def _exchange(self, instruction: ExchangeExperts | ExchangeCounts | ExchangeRows) -> _Flight:
        """A copy of what is sent, what is received, and the results, which are made of it."""
        sent, received = (_Storage(nbytes) for nbytes in self._exchanged(instruction))
        made = tuple((slot, _Storage(self._nbytes(slot))) for slot in instruction.outputs)
        if isinstance(instruction, ExchangeCounts) and made:  # the matrix is what was received
            made = ((instruction.outputs[0], received), *made[1:])
        return _Flight((sent, received), made)

    def _exchanged(
        self, instruction: ExchangeExperts | ExchangeCounts | ExchangeRows
    ) -> tuple[int, int]:
        """At most the bytes that a member sends and receives."""
        largest = instruction.messages[0].nbytes
        if instruction.ends is None:
            # How many rows are sent and received depends on the data: at most as many as the larger
            # side has room for.
            if isinstance(instruction, ExchangeRows):
                largest = max(largest, self._nbytes(instruction.inputs[0]))
            return largest, largest
        position = instruction.members.index(self.mine.device)
        senders = instruction.ends.holders if instruction.back else instruction.ends.sources
        sent = self._nbytes(instruction.inputs[0]) if position in senders else 0
        return sent, self._nbytes(instruction.outputs[0]) if instruction.outputs else 0

    def _nbytes(self, slot: Slot) -> int:
        return self.mine.slots[slot].message.nbytes

    def _gather(self, instruction: BucketCollective) -> _Flight:
        """The slices are put into one message; the whole tensors are copied out of the flat result,
        unless there is but one.
        """
        messages, count = instruction.messages, len(instruction.members)
        lengths = [_slice_bytes(message, count) for message in messages]
        mine, whole = _Storage(sum(lengths)), _Storage(sum(lengths) * count)
        if isinstance(instruction, RefreshBucket):
            return _Flight((mine, whole))
        alone = sum(length > 0 for length in lengths) == 1
        made = [whole if alone and length else _Storage(length * count) for length in lengths]
        return _Flight((mine, whole), tuple(zip(instruction.outputs, made, strict=True)))

    def _settle(self, queue: _Queue, instruction: Instruction) -> None:
        """What touches a slot that is being filled on its own stream waits for all that is in
        flight there.
        """
        touched = (*instruction.reads(), *instruction.writes(), *instruction.frees())
        if not queue.unsettled.isdisjoint(touched):
            queue.unsettled.clear()
            self._complete(queue, queue.issued)

    def _complete(self, queue: _Queue, count: int) -> None:
        while queue.completed < count:
            self._pop(queue)

    def _pop(self, queue: _Queue) -> None:
        flight = queue.flying.popleft()
        queue.completed += 1
        for slot, storage in flight.fills:
            self._fill(slot, storage)
        for storage in flight.keeps:
            self.ledger.release(storage, flight.category)

    # --- slots ------------------------------------------------------------------------------------

    def _make(self, slot: Slot) -> None:
        self._fill(slot, _Storage(self.mine.slots[slot].message.nbytes))

    def _fill(self, slot: Slot, storage: _Storage) -> None:
        self._empty(slot)
        self.slots[slot] = storage
        self.ledger.hold(storage, category_of(self.mine.slots[slot].role))

    def _empty(self, slot: Slot) -> None:
        if (storage := self.slots.pop(slot, None)) is not None:
            self.ledger.release(storage, category_of(self.mine.slots[slot].role))


def _slice_bytes(message: Message, count: int) -> int:
    return shard_length(message.shape, count) * message.dtype.itemsize

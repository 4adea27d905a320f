"""How much memory each device needs for a step, from the plan alone: see :mod:`piper.plan.memory`
for what is counted.

Every instruction is followed in issue order as the CPU's device executes it. Chunks are not run:
their bodies say which outputs are views of what.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from piper.errors import PlanError
from piper.ids import BodyId, DeviceId, EventId, Slot, Stream
from piper.ir.storages import Given, Memory, output_memory
from piper.ops.base import Instruction, shard_length
from piper.ops.compute import Compute
from piper.ops.storage import Flight, Storage
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


@dataclass(slots=True)
class _Queue:
    """The communication on one stream, as the CPU's device keeps it: oldest first."""

    flying: deque[Flight] = field(default_factory=deque)
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
            self.fill(Slot(number), storage)
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
            for name, slot in instruction.updates():
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
        if isinstance(instruction, Compute):
            self._compute(position, instruction)
        elif (event := instruction.awaits()) is not None:
            stream, count = self.events[event]
            self._complete(self.queues[stream], count)
        elif instruction.asynchronous:
            self._issue(queue, instruction)
        else:
            instruction.place(self)
        if instruction.record is not None:
            self.events[instruction.record] = (instruction.stream, queue.issued)

    def _compute(self, position: int, instruction: Compute) -> None:
        memory = self.bodies.get(instruction.body)
        if memory is None:
            body = self.plan.dag.bodies[instruction.body]
            memory = self.bodies[instruction.body] = output_memory(body, self.plan.bindings)
        given = [self.of(slot) for slot in instruction.inputs]
        made: dict[int, _Storage] = {}
        for slot in freed_behind(self.mine.instructions, position).intersection(instruction.inputs):
            self.empty(slot)
        added = self.added.get(position, {})
        for slot, place in zip(instruction.outputs, memory, strict=True):
            if slot in added:
                continue
            if isinstance(place, Given):
                self.fill(slot, given[place.index])
            else:
                self.fill(slot, made.setdefault(place.number, _Storage(place.nbytes)))

    # --- communication ----------------------------------------------------------------------------

    def _issue(self, queue: _Queue, instruction: Instruction) -> None:
        flight = instruction.fly(self)
        for storage in flight.keeps:
            self.ledger.hold(_own(storage), _category(flight))
        while queue.flying and queue.flying[0].is_send:
            self._pop(queue)
        queue.flying.append(flight)
        queue.issued += 1
        queue.unsettled.update(instruction.writes())

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
            self.fill(slot, storage)
        for storage in flight.keeps:
            self.ledger.release(_own(storage), _category(flight))

    # --- what instructions ask of it: piper.ops.storage.Storages ------------------------------------

    @property
    def device(self) -> DeviceId:
        return self.mine.device

    def new(self, nbytes: int) -> _Storage:
        return _Storage(nbytes)

    def frame(self, nbytes: int) -> _Storage:
        return _Storage(self.frame_bytes(nbytes))

    def of(self, slot: Slot) -> _Storage:
        if (found := self.slots.get(slot)) is None:
            raise PlanError(
                f"device {self.mine.device} reads slot %{slot}, which was freed or never written; piper.verify(plan) says where"
            )
        return found

    def nbytes(self, slot: Slot) -> int:
        return self.mine.slots[slot].message.nbytes

    def is_view(self, leaf: int) -> bool:
        (found,) = (each for each in self.plan.dag.batch if each.index == leaf)
        return not found.batch_dim

    def make(self, slot: Slot) -> None:
        if slot not in self.slots:
            self.fill(slot, _Storage(self.nbytes(slot)))

    def fill(self, slot: Slot, storage: Storage) -> None:
        self.empty(slot)
        self.slots[slot] = mine = _own(storage)
        self.ledger.hold(mine, category_of(self.mine.slots[slot].role))

    def empty(self, slot: Slot) -> None:
        if (storage := self.slots.pop(slot, None)) is not None:
            self.ledger.release(storage, category_of(self.mine.slots[slot].role))


def _own(storage: Storage) -> _Storage:
    """*storage*, which the walk itself made."""
    assert isinstance(storage, _Storage)
    return storage


def _category(flight: Flight) -> Category:
    return Category.HOST if flight.in_host_memory else Category.COMMUNICATION

"""Measure the memory of a step: a worker that counts, after every instruction, the storages that
are alive.

See :mod:`piper.plan.memory` for what counts. A dispatch mode sees every storage that an operator
makes on the device's thread; slots, state and the communication in flight say what each is for.
What the in-memory communicators copy for themselves does not count: other communicators have no
such copies.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from piper.devices.base import TorchDevice
from piper.devices.tensors import as_torch
from piper.ids import DeviceId
from piper.ir.dag import Role
from piper.ops.base import Communicator, CommunicatorId, Handle, Message, ReduceOp, Tensor
from piper.plan.memory import Category, DeviceMemory, Recorder, category_of
from piper.plan.model import DevicePlan, Plan, SlotInfo
from piper.runtime.context import Context
from piper.runtime.interpreter import Closure, Program
from piper.runtime.state import ModelState
from piper.runtime.worker import CommunicatorFactory, Loaded, Worker


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """The storages of one device that are alive: those that operators made while it was entered, or
    that were shown to it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.flying: set[_Held] = set()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._ignored: set[int] = set()
        self._paused = False

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if not self._paused:
            for tensor in _tensors(result):
                self.show(tensor)
        return result

    def show(self, tensor: torch.Tensor) -> None:
        """Count the storage of *tensor* from now on."""
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 (the address of torch's storage: equal tensors share it)
        if key not in self._made:
            weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch's own
            self._made[key] = (weak, storage.nbytes())

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count the storages of *tensors*; replaces what was ignored before."""
        self._ignored = {tensor.untyped_storage()._cdata for tensor in tensors}  # noqa: SLF001

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is made meanwhile does not count."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def count(self, held: Iterable[tuple[Category, torch.Tensor]]) -> dict[Category, int]:
        """Bytes that are alive, by what *held* says that they are for."""
        purpose: dict[int, Category] = {}
        for category, tensor in held:
            self.show(tensor)
            key = tensor.untyped_storage()._cdata  # noqa: SLF001
            known = purpose.get(key, category)
            purpose[key] = min(known, category, key=_PRIORITY.__getitem__)
        self._made = {key: made for key, made in self._made.items() if not _is_gone(made[0])}
        totals = dict.fromkeys(Category, 0)
        for key, (_, nbytes) in self._made.items():
            if key not in self._ignored:
                totals[purpose.get(key, Category.OTHER)] += nbytes
        return totals


_PRIORITY = {category: i for i, category in enumerate(Category)}


class _Held:
    """A handle that keeps the buffers of its communication until it is waited for, as a transport
    does.
    """

    def __init__(
        self,
        meter: Meter,
        handle: Handle,
        buffers: Sequence[torch.Tensor],
        finish: Callable[[], None] | None = None,
        *,
        is_send: bool = False,
    ) -> None:
        self.buffers = tuple(buffers)
        self._meter, self._handle = meter, handle
        self._finish, self._is_send = finish, is_send
        meter.flying.add(self)

    def wait(self) -> None:
        """See :class:`~piper.ops.base.Handle`."""
        with self._meter.paused():
            self._handle.wait()
            if self._finish is not None:
                finish, self._finish = self._finish, None
                finish()
        self.buffers = ()
        self._meter.flying.discard(self)

    def done(self) -> bool:
        """Always for a message that was sent, never for all else, so that chance plays no part: the
        device gives up what is done when it issues the next piece of work on its stream, and has to
        wait for all else.
        """
        return self._is_send


class MeasuredCommunicator:
    """Lets *inner* communicate, in copies that do not count. Implements
    :class:`~piper.ops.base.Communicator`.
    """

    def __init__(self, inner: Communicator, meter: Meter) -> None:
        self.rank, self.size = inner.rank, inner.size
        self._inner, self._meter = inner, meter

    def send(self, tensor: Tensor, peer: int) -> _Held:
        """Send a copy, which counts."""
        copy = as_torch(tensor).detach().clone(memory_format=torch.contiguous_format)
        with self._meter.paused():
            handle = self._inner.send(copy, peer)
        return _Held(self._meter, handle, [copy], is_send=True)

    def receive(self, message: Message, peer: int) -> tuple[torch.Tensor, _Held]:
        """Post a receive."""
        with self._meter.paused():
            tensor, handle = self._inner.receive(message, peer)
        buffer = as_torch(tensor)
        self._meter.show(buffer)
        return buffer, _Held(self._meter, handle, [buffer])

    def all_reduce(self, flat: Tensor, op: ReduceOp = ReduceOp.SUM) -> _Held:
        """Combine, in place."""
        return self._in_place(flat, lambda tensor: self._inner.all_reduce(tensor, op))

    def all_gather(self, out: Tensor, shard: Tensor) -> _Held:
        """Concatenate."""
        return self._between(out, shard, self._inner.all_gather)

    def reduce_scatter(self, out: Tensor, flat: Tensor) -> _Held:
        """Sum; keep a part."""
        return self._between(out, flat, self._inner.reduce_scatter)

    def all_to_all(
        self, out: Tensor, flat: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> _Held:
        """Exchange parts."""
        return self._between(
            out, flat, lambda o, f: self._inner.all_to_all(o, f, out_splits, in_splits)
        )

    def broadcast(self, flat: Tensor, root: int) -> _Held:
        """Copy the root's tensor."""
        return self._in_place(flat, lambda staged: self._inner.broadcast(staged, root))

    def _in_place(self, flat: Tensor, start: Callable[[Tensor], Handle]) -> _Held:
        target = as_torch(flat)
        with self._meter.paused():
            staged = target.clone()
            handle = start(staged)
        return _Held(self._meter, handle, [target], lambda: _copy(target, staged))

    def _between(
        self, out: Tensor, source: Tensor, start: Callable[[Tensor, Tensor], Handle]
    ) -> _Held:
        target, given = as_torch(out), as_torch(source)
        with self._meter.paused():
            staged = torch.empty_like(target)
            handle = start(staged, given.clone())
        return _Held(self._meter, handle, [target, given], lambda: _copy(target, staged))


class MeasuredProgram(Program):
    """A program that counts after each of its instructions."""

    def __init__(
        self,
        *,
        meter: Meter,
        plan: Plan,
        mine: DevicePlan,
        device: TorchDevice,
        state: ModelState,
        context: Context,
        communicators: Mapping[CommunicatorId, Communicator],
        constants: Mapping[str, torch.Tensor],
    ) -> None:
        super().__init__(
            plan=plan,
            mine=mine,
            device=device,
            state=state,
            context=context,
            communicators=communicators,
            constants=constants,
        )
        self._meter = meter
        self._torch_device = device
        self._infos: tuple[SlotInfo, ...] = mine.slots
        self._state, self._context = state, context
        self._recorder = Recorder(mine.device)
        self._closures = list(self._measured())

    def run(self) -> None:
        """Execute the step, and measure it anew."""
        self._recorder = Recorder(self._mine.device)
        leaves = self._context.leaves.values()
        self._meter.ignore(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        with self._meter:
            super().run()

    def found(self) -> DeviceMemory:
        """What the last step used."""
        return self._recorder.finish()

    def _measured(self) -> Iterator[Closure]:
        """The closures, with a count after the last one of each instruction."""
        position = 0
        for number, step in enumerate(self._steps):
            instructions = self._mine.instructions
            while instructions[position] is not step.instruction:
                position += 1  # there is nothing to do for it
            following = self._steps[number + 1 : number + 2]
            if following and following[0].instruction is step.instruction:
                yield step.run
            else:
                yield self._counting(step.run, position)

    def _counting(self, closure: Closure, position: int) -> Closure:
        def run() -> None:
            closure()
            found = self._meter.count(self._held())
            found[Category.HOST] = self._torch_device.host_bytes
            self._recorder.add(position, found)

        return run

    def _held(self) -> Iterator[tuple[Category, torch.Tensor]]:
        """All that the device holds on purpose."""
        for info, tensor in zip(self._infos, self._slots, strict=True):
            if tensor is not None and info.role is not Role.HOST:
                yield category_of(info.role), as_torch(tensor)
        for parameter in self._state.parameters.values():
            yield Category.PARAMETERS, parameter
        for shard in self._state.shards.values():
            yield Category.SHARDS, shard
        for buffer in self._state.buffers.values():
            yield Category.BUFFERS, buffer
        for held in self._meter.flying:
            for tensor in held.buffers:
                yield Category.COMMUNICATION, tensor
        for tensor in _tensors(self._state.optimizer_state()):
            yield Category.OPTIMIZER, tensor


class MeasuringWorker(Worker):
    """A worker whose programs measure what they use."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: Callable[[], TorchDevice],
        communicators: CommunicatorFactory,
    ) -> None:
        self._meter = Meter()

        def measured(name: CommunicatorId, members: tuple[DeviceId, ...]) -> Communicator:
            return MeasuredCommunicator(communicators(name, members), self._meter)

        super().__init__(rank, world_size, device, measured)

    def found(self, key: str) -> DeviceMemory:
        """What the last step of plan *key* used."""
        program = self._plans[key].program
        assert isinstance(program, MeasuredProgram), "measured before it was run"
        return program.found()

    def _program(
        self,
        loaded: Loaded,
        device: TorchDevice,
        state: ModelState,
        *,
        recorded: bool = False,
        ranges: bool = False,
    ) -> Program:
        assert not recorded, "counting memory takes time: times are measured by themselves"
        assert not ranges
        return MeasuredProgram(
            meter=self._meter,
            plan=loaded.plan,
            mine=loaded.mine,
            device=device,
            state=state,
            context=loaded.context,
            communicators=self._communicators,
            constants=loaded.constants,
        )


def _tensors(value: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401 (whatever an operator returns)
    """All tensors in nested lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]  # torch's own


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)

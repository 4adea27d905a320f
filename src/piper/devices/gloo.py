"""Communicators between processes, over gloo.

One gloo process group per communicator, made directly over a store: there is no default group, and
only members take part.

Gloo fills a buffer from a message that is too short, or of another type, without a word. So a
message between two members is a *frame*: the payload, then a trailer with a magic number, the
message's number, and the tensor's type and shape, which the receiver compares with what it expects.
(A message that is too long is fatal inside gloo: the receiving process ends.)
"""

import struct
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from math import prod
from queue import SimpleQueue
from typing import Any, Protocol, TypeAlias
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from piper.devices.tensors import as_torch, torch_dtype
from piper.errors import CommunicationError
from piper.ids import DeviceId
from piper.ops.base import CommunicatorId, Message, ReduceOp, Tensor

DEFAULT_TIMEOUT = 300.0
"""Seconds that a wait may last."""

_MAGIC = 0x7069706572_6672
_DIMS = 6
_TRAILER = struct.Struct(f"<QQHH4x{_DIMS}q")  # magic, number, type, dimensions, sizes
_TAG = 0
_EXCHANGE = 1 << 30
_TAGS = _EXCHANGE - 1

_DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "complex64",
    "complex128",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
)

Sizes: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a trailer says of a tensor. A seventh and later sizes are folded into the last entry."""

    dtype: str
    ndim: int
    sizes: Sizes

    @classmethod
    def of(cls, dtype: str, shape: Sizes) -> "_Kind":
        if len(shape) <= _DIMS:
            return cls(dtype, len(shape), shape + (0,) * (_DIMS - len(shape)))
        digest = blake2b(repr(shape[_DIMS - 1 :]).encode(), digest_size=7).digest()
        return cls(dtype, len(shape), (*shape[: _DIMS - 1], int.from_bytes(digest, "little")))

    def __str__(self) -> str:
        rest = ", ..." if self.ndim > _DIMS else ""
        return f"{self.dtype}[{', '.join(map(str, self.sizes[: self.ndim]))}{rest}]"


class _Layout:
    """The frame of one kind of message."""

    def __init__(self, shape: Sizes, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.kind = _Kind.of(str(dtype).removeprefix("torch."), shape)
        self.nbytes = prod(shape) * dtype.itemsize
        self.trailer = -(-self.nbytes // 8) * 8  # aligned
        self.size = self.trailer + _TRAILER.size

    def payload(self, frame: torch.Tensor) -> torch.Tensor:
        """The message's tensor inside *frame*; torch's allocations are aligned for every type."""
        return frame[: self.nbytes].view(self.dtype).view(self.shape)

    def seal(self, frame: torch.Tensor, number: int) -> None:
        """Write the trailer."""
        kind = self.kind
        _TRAILER.pack_into(
            frame.numpy().data,
            self.trailer,
            _MAGIC,
            number,
            _DTYPES.index(kind.dtype),
            kind.ndim,
            *kind.sizes,
        )

    def clear(self, frame: torch.Tensor) -> None:
        """Erase the trailer, so that what memory held before cannot pass for one."""
        frame[self.trailer :].zero_()

    def check(self, frame: torch.Tensor, number: int, where: str) -> None:
        """Raise :class:`CommunicationError` unless the frame is whole, in turn and of this kind."""
        magic, found_number, code, ndim, *sizes = _TRAILER.unpack_from(
            frame.numpy().data, self.trailer
        )
        if magic != _MAGIC:
            raise CommunicationError(
                f"{where}: expected message {number}, {self.kind}, of {self.size} bytes, found {self._short(frame)}; "
                f"the two devices run different plans"
            )
        found = _Kind(_DTYPES[code], ndim, tuple(sizes))
        if (found, found_number) != (self.kind, number):
            raise CommunicationError(
                f"{where}: expected message {number}, {self.kind}, found message {found_number}, {found}; the two devices "
                f"run different plans"
            )

    def _short(self, frame: torch.Tensor) -> str:
        """What arrived instead, if its trailer can be found."""
        data = frame.numpy().tobytes()
        at = data.rfind(_MAGIC.to_bytes(8, "little"))
        if at < 0 or at + _TRAILER.size > len(data):
            return "a message without a trailer"
        _, number, code, ndim, *sizes = _TRAILER.unpack_from(data, at)
        kind = _Kind(_DTYPES[code], ndim, tuple(sizes)) if code < len(_DTYPES) else "?"
        return f"message {number}, {kind}, of {at + _TRAILER.size} bytes"


class _Work:
    """A gloo operation in flight. *keep* stays alive until it is complete; *finish* runs once after
    it.
    """

    __slots__ = ("_complete", "_finish", "_keep", "_what", "_work")

    def __init__(
        self,
        work: dist.Work,
        what: str,
        keep: object,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._work = work
        self._what = what
        self._keep = keep
        self._finish = finish
        self._complete = False

    def wait(self) -> None:
        """See :class:`~piper.ops.base.Handle`."""
        if self._complete:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            raise CommunicationError(_explain(self._what, error)) from error
        self._complete, self._keep = True, None
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def done(self) -> bool:
        """Whether gloo is known to be through with it: of messages, once they were waited for."""
        return self._complete or bool(self._work.is_completed())


class _Sent:
    """A send in flight."""

    __slots__ = ("_error", "_over", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._over = threading.Event()
        self._error: RuntimeError | None = None

    def end(self, error: RuntimeError | None) -> None:
        """It has gone, or failed."""
        self._error = error
        self._over.set()

    def wait(self) -> None:
        """See :class:`~piper.ops.base.Handle`."""
        self._over.wait()
        if self._error is not None:
            raise CommunicationError(_explain(self._what, self._error)) from self._error

    def done(self) -> bool:
        """Whether gloo is through with it."""
        return self._over.is_set()


class _Sends:
    """Waits for sends, in order, on a thread of its own.

    Gloo says that a message has gone only to who waits for it, and nobody waits for a send before
    the end of the step: until then all frames of the step would stay in memory.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[dist.Work, torch.Tensor, _Sent] | None] = SimpleQueue()
        self._started = False
        weakref.finalize(self, self._queue.put, None)

    def add(self, work: dist.Work, frame: torch.Tensor, what: str) -> _Sent:
        """The handle of *work*, which sends *frame*."""
        if not self._started:
            self._started = True
            threading.Thread(
                target=_wait_for_sends, args=(self._queue,), name="piper sends", daemon=True
            ).start()
        sent = _Sent(what)
        self._queue.put((work, frame, sent))
        return sent


def _wait_for_sends(queue: "SimpleQueue[tuple[dist.Work, torch.Tensor, _Sent] | None]") -> None:
    while (item := queue.get()) is not None:
        work, _, sent = item
        error = None
        try:
            work.wait()
        except RuntimeError as found:
            error = found
        del work, item, _  # the frame, before anyone hears of it
        sent.end(error)


class _Works:
    """Several operations in flight, as one; *finish* runs once after all of them."""

    __slots__ = ("_finish", "_works")

    def __init__(self, works: Sequence[_Work], finish: Callable[[], None] | None) -> None:
        self._works, self._finish = works, finish

    def wait(self) -> None:
        """See :class:`~piper.ops.base.Handle`."""
        for work in self._works:
            work.wait()
        self._works = ()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def done(self) -> bool:
        """Whether gloo is known to be through with all of them: once they were waited for."""
        return all(work.done() for work in self._works)


def _explain(what: str, error: RuntimeError) -> str:
    text = str(error).partition(". This may")[0].partition(". This is typically")[0]
    timed_out = "timed out" in text.lower() or "timeout" in text.lower()
    reason = "it did not complete in time" if timed_out else "the connection to its peer was lost"
    return f"{what}: {reason} ({text.strip()})"


class _Group(Protocol):
    """The part of gloo's process group that is used here."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work: ...
    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work: ...
    def allreduce(
        self, tensors: list[torch.Tensor], options: dist.AllreduceOptions
    ) -> dist.Work: ...
    def broadcast(
        self, tensors: list[torch.Tensor], options: dist.BroadcastOptions
    ) -> dist.Work: ...


def _connect(name: str, rank: int, size: int, store: Store, host: str, timeout: float) -> _Group:
    """A process group of its own; torch's stubs know neither the options nor the methods of
    gloo's.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001 (torch's name for it)
    options._timeout = timedelta(seconds=timeout)  # noqa: SLF001
    options._threads = 2  # noqa: SLF001
    options._devices = [gloo.create_device(hostname=host)]  # noqa: SLF001
    group: _Group = gloo(PrefixStore(name, store), rank, size, options)
    return group


class GlooCommunicator:
    """One member's end. Implements :class:`~piper.ops.base.Communicator`.

    Making it connects all members with each other; all of them must do so.
    """

    def __init__(
        self,
        name: CommunicatorId,
        members: Sequence[DeviceId],
        device: DeviceId,
        store: Store,
        *,
        host: str = "127.0.0.1",
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self.rank = members.index(device)
        self.size = len(members)
        self._name = name
        self._members = tuple(members)
        self._sent = [0] * self.size
        self._exchanges = 0
        self._received = [0] * self.size
        self._layouts: dict[tuple[Sizes, torch.dtype], _Layout] = {}
        self._sends = _Sends()
        try:
            self._group = _connect(f"piper/{name}", self.rank, self.size, store, host, timeout)
        except RuntimeError as error:
            raise CommunicationError(
                f"communicator {name!r}: the devices {list(members)} could not connect: {error}"
            ) from error

    def send(self, tensor: Tensor, peer: int) -> _Sent:
        """Send a copy, framed."""
        source = as_torch(tensor)
        layout = self._layout(tuple(source.shape), source.dtype)
        frame = torch.empty(layout.size, dtype=torch.uint8)
        layout.payload(frame).copy_(source)
        self._sent[peer] += 1
        layout.seal(frame, self._sent[peer])
        work = self._start(lambda: self._group.send([frame], peer, _TAG))
        return self._sends.add(work, frame, self._what("send to", peer))

    def receive(self, message: Message, peer: int) -> tuple[torch.Tensor, _Work]:
        """Post a receive of a frame."""
        layout = self._layout(message.shape, torch_dtype(message.dtype))
        frame = torch.empty(layout.size, dtype=torch.uint8)
        layout.clear(frame)
        self._received[peer] += 1
        number = self._received[peer]
        what = self._what("receive from", peer)
        work = self._start(lambda: self._group.recv([frame], peer, _TAG))
        handle = _Work(work, what, frame, lambda: layout.check(frame, number, what))
        return layout.payload(frame), handle

    def all_reduce(self, flat: Tensor, op: ReduceOp = ReduceOp.SUM) -> _Work:
        """Combine in place. Gloo reduces each part on one member and copies it to the others: same
        bits everywhere.
        """
        target = as_torch(flat)
        if op is ReduceOp.MAX:
            return self._largest(target)
        plain = _summable(target)
        options = dist.AllreduceOptions()
        options.reduceOp = _operation(target.dtype)
        work = self._start(lambda: self._group.allreduce([plain], options))
        return self._reduced(work, "all_reduce", target, plain)

    def _largest(self, target: torch.Tensor) -> _Work:
        """The maximum, in place. Gloo may prefer a number to what is none: that is said apart."""
        missing = target.isnan()
        pair = torch.stack([target.masked_fill(missing, 0), missing.to(target.dtype)]).view(-1)
        plain = _summable(pair)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        work = self._start(lambda: self._group.allreduce([plain], options))

        def finish() -> None:
            if plain.data_ptr() != pair.data_ptr():
                pair.copy_(plain)
            largest, found = pair.view(2, -1)
            target.copy_(torch.where(found > 0, torch.nan, largest) if found.any() else largest)

        return _Work(work, self._what("all_reduce"), (target, pair, plain), finish)

    def all_gather(self, out: Tensor, shard: Tensor) -> "_Works":
        """Concatenate, as bytes: every member sends its shard to all others."""
        source = _bytes(as_torch(shard))
        parts = _bytes(as_torch(out)).view(self.size, -1)
        parts[self.rank].copy_(source)
        given = dict.fromkeys(self._peers(), source)
        wanted = {peer: parts[peer] for peer in self._peers()}
        return self._exchange("all_gather", given, wanted, (parts, source))

    def reduce_scatter(self, out: Tensor, flat: Tensor) -> "_Works":
        """Each member's part of the sum: every member sends the others theirs, and adds up what it
        gets in order of rank.
        """
        target, parts = as_torch(out), as_torch(flat).view(self.size, -1)
        # One part arrives where the sum will be: a group of two needs no buffer.
        found = [target, *(torch.empty_like(target) for _ in range(self.size - 2))]
        peers = self._peers()
        given = {peer: _bytes(parts[peer]) for peer in peers}
        wanted = {peer: _bytes(part) for peer, part in zip(peers, found, strict=False)}
        ordered = found[: len(peers)]
        ordered.insert(self.rank, parts[self.rank])
        return self._exchange(
            "reduce_scatter", given, wanted, (parts, found), lambda: _add_up(target, ordered)
        )

    def all_to_all(
        self, out: Tensor, flat: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> "_Works":
        """Exchange parts, as bytes: every member sends the others theirs. Members that expect parts
        of other sizes never meet.
        """
        size = as_torch(flat).element_size()
        target = torch.split(_bytes(as_torch(out)), [n * size for n in out_splits])
        source = torch.split(_bytes(as_torch(flat)), [n * size for n in in_splits])
        target[self.rank].copy_(source[self.rank])
        given = {peer: source[peer] for peer in self._peers()}
        wanted = {peer: target[peer] for peer in self._peers()}
        return self._exchange("all_to_all", given, wanted, (target, source))

    def broadcast(self, flat: Tensor, root: int) -> _Work:
        """Copy the root's tensor, as bytes."""
        target = _bytes(as_torch(flat))
        options = dist.BroadcastOptions()
        options.rootRank = root
        work = self._start(lambda: self._group.broadcast([target], options))
        return _Work(work, self._what("broadcast"), target)

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    def _exchange(
        self,
        verb: str,
        given: Mapping[int, torch.Tensor],
        wanted: Mapping[int, torch.Tensor],
        keep: object,
        finish: Callable[[], None] | None = None,
    ) -> "_Works":
        """Send and receive bytes by peer. Receives are posted first, so that both directions of a
        link flow at once; gloo's own collectives take 1.5 to 2.2 times as long between two members.

        Members that communicate about something else at this point never meet: the tag says what
        this is.
        """
        self._exchanges += 1
        what = self._what(verb)
        works: list[_Work] = []
        for start, parts in ((self._group.recv, wanted), (self._group.send, given)):
            for peer, part in parts.items():
                if not part.numel():
                    continue
                tag = crc32(f"{verb} {self._exchanges} {part.numel()}".encode()) & _TAGS | _EXCHANGE
                works.append(_Work(self._start(partial(start, [part], peer, tag)), what, keep))
        return _Works(works, finish)

    def _layout(self, shape: Sizes, dtype: torch.dtype) -> _Layout:
        layout = self._layouts.get((shape, dtype))
        if layout is None:
            layout = self._layouts[shape, dtype] = _Layout(shape, dtype)
        return layout

    def _what(self, verb: str, peer: int | None = None) -> str:
        target = "" if peer is None else f" device {self._members[peer]}"
        return f"{verb}{target} on communicator {self._name!r}"

    def _start(self, launch: Callable[[], dist.Work]) -> dist.Work:
        try:
            return launch()
        except RuntimeError as error:
            raise CommunicationError(_explain(self._what("communication"), error)) from error

    def _reduced(
        self,
        work: dist.Work,
        verb: str,
        target: torch.Tensor,
        plain: torch.Tensor,
    ) -> _Work:
        """The handle of a reduction of *plain*, which stands for *target*."""
        if plain.data_ptr() == target.data_ptr():
            return _Work(work, self._what(verb), (target, plain))
        return _Work(work, self._what(verb), None, lambda: _copy(target, plain))


def _summable(tensor: torch.Tensor) -> torch.Tensor:
    """*tensor* in a type that gloo reduces: itself or a view of it where possible."""
    if tensor.is_complex():
        return torch.view_as_real(tensor).view(-1)
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8)
    return tensor.to(torch.int32) if tensor.dtype == torch.int16 else tensor


def _operation(dtype: torch.dtype) -> dist.ReduceOp:
    """A sum; of truth values, as in torch, "or"."""
    kind = dist.ReduceOp.MAX if dtype == torch.bool else dist.ReduceOp.SUM
    return dist.ReduceOp(kind)


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _add_up(target: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Overwrite *target*, which may be one of the first two of *parts*, by their sum; of truth
    values, as in torch, "or".
    """
    if len(parts) == 1:
        target.copy_(parts[0])
        return
    torch.add(parts[0], parts[1], out=target)
    for part in parts[2:]:
        target.add_(part)

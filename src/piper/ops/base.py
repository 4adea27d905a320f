"""What an operation is, at its two levels, and the protocols that it executes against.

At the level of the training DAG an operation is a :class:`Work`: what one node does. At the level
of a plan it is an :class:`Instruction`: what one device does at one point of one stream. One file
of this folder per operation holds both; importing the folder registers them by ``kind``.

A device plan is one list of instructions in *issue order*. Each runs on a stream; work on one
stream runs in issue order; across streams only a ``Wait`` orders. An instruction may *record* an
event, its completion. The compute stream's instructions are done, on a CPU, when issued;
communication is in flight until waited for.

This layer is free of torch: a tensor is an opaque :class:`Tensor`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec

from piper.dtypes import DType
from piper.errors import PlanError
from piper.ids import BodyId, DeviceId, EventId, NodeId, Slot, Stream
from piper.ops.storage import Flight, Storages
from piper.registry import Registry, snake_case

CommunicatorId: TypeAlias = str
"""Name of a communicator: its purpose and members, for instance ``p2p:0>1``."""


class ReduceOp(StrEnum):
    """How a reduction combines what its members give, element by element."""

    SUM = "sum"
    MAX = "max"  # of which one is not a number, that


class Tensor(Protocol):
    """A device's tensor; only devices, communicators and chunk functions look inside."""


# `gc=False`, here and in the DAG: frozen data of which there are hundreds of thousands; it holds no
# cycles, so the collector need not walk over it.
class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Shape (bound sizes) and element type of what one message carries."""

    shape: tuple[int, ...]
    dtype: DType

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return self.numel * self.dtype.itemsize


class Handle(Protocol):
    """Something in flight; it may be lost when its handle is given up before it is complete."""

    def wait(self) -> None:
        """Block until complete and its results are in place.

        Raises :class:`~piper.errors.CommunicationError` when the peer is gone, the message is
        malformed or does not have the expected shape and type, or a time limit passes;
        :class:`~piper.errors.AbortedError` when the run was aborted.
        """

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""


class Communicator(Protocol):
    """Ordered communication among ``size`` members; this process is number ``rank`` of them.

    All calls return at once; completion is the handle's. Buffers belong to the communicator until
    then. Messages between two members are matched in order. Collectives must be called by all
    members in one order. Flat means one-dimensional and contiguous.
    """

    rank: int
    size: int

    def send(self, tensor: Tensor, peer: int) -> Handle:
        """Send a tensor (copied: it may be freed or changed as soon as this returns)."""

    def receive(self, message: Message, peer: int) -> tuple[Tensor, Handle]:
        """Post a receive; the tensor has its contents once the handle completes."""

    def all_reduce(self, flat: Tensor, op: ReduceOp = ReduceOp.SUM) -> Handle:
        """Combine over members, in place; every member gets the same bits."""

    def all_gather(self, out: Tensor, shard: Tensor) -> Handle:
        """Concatenate the members' equal flat shards into flat ``out``."""

    def reduce_scatter(self, out: Tensor, flat: Tensor) -> Handle:
        """Sum flat tensors over members; member i gets the i-th of ``size`` equal parts."""

    def all_to_all(
        self, out: Tensor, flat: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Handle:
        """Send ``in_splits[j]`` elements to member j, receive ``out_splits[i]`` from member i."""

    def broadcast(self, flat: Tensor, root: int) -> Handle:
        """Copy member ``root``'s tensor to all, in place."""


ChunkFunction: TypeAlias = Callable[[list[Tensor], "RandomKey | None"], Sequence[Tensor]]
"""A body as code: ``(inputs, random key) -> outputs``. Pure, but empties the list, so that inputs
which nobody else holds are given up after their last use.
"""

AddingFunction: TypeAlias = Callable[
    [list[Tensor], "RandomKey | None", Sequence[Tensor]], Sequence[Tensor]
]
"""``(inputs, random key, totals) -> outputs``: a body that adds some of its outputs to *totals*, in
place, as it makes them, and returns the others.
"""


class RandomKey(msgspec.Struct, frozen=True):
    """What a chunk's random streams are derived from: the run's seed, the step, the global
    microbatch, and for each ``rng`` slot of the body the ordinal of its op in the captured graph.
    """

    seed: int
    step: int
    microbatch: int
    ordinals: tuple[int, ...]


class Device(Protocol):
    """Executes work on streams. One per rank."""

    def flatten(
        self,
        tensors: Sequence[Tensor],
        shapes: Sequence[tuple[int, ...]],
        dtype: DType | None = None,
    ) -> Tensor:
        """A new flat tensor holding the elements of *tensors*, one after the other, converted to
        *dtype* if given.
        """

    def unflatten(self, flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> Sequence[Tensor]:
        """Views of *flat* with the given shapes, one after the other."""

    def pack_shards(self, tensors: Sequence[Tensor], count: int) -> Tensor:
        """A new flat tensor of *count* equal parts; part i holds the i-th slice of each tensor, one
        after the other.

        A tensor's slices are its flattened elements, padded with zeros, cut into *count* equal
        runs.
        """

    def unpack_shards(
        self, flat: Tensor, shapes: Sequence[tuple[int, ...]], count: int
    ) -> Sequence[Tensor]:
        """The inverse of :meth:`pack_shards`: tensors of the given shapes, views of *flat* where
        possible.
        """

    def split_parts(
        self,
        tensor: Tensor,
        sizes: tuple[int, ...],
        dim: int,
        count: int,
        last: int | None = None,
    ) -> Tensor:
        """A new flat tensor: *tensor*, reshaped to *sizes* (-1: what is left), cut into *count*
        equal parts along *dim*, one part after the other; part number *last*, if given, comes last.
        """

    def join_parts(
        self, parts: Sequence[Tensor], sizes: tuple[int, ...], dim: int, shape: tuple[int, ...]
    ) -> Tensor:
        """A new tensor: flat *parts*, each of *sizes* (-1: what is left), joined along *dim*,
        reshaped to *shape*.
        """

    def sum_rows(self, tensor: Tensor) -> Tensor:
        """A new tensor: the sum over the first dimension."""

    def numbers(self, tensor: Tensor) -> list[int]:
        """The elements of an integer tensor, on the host."""

    def first_rows(self, tensor: Tensor, count: int) -> Tensor:
        """The first *count* rows, flat and contiguous."""

    def padded_rows(self, flat: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A tensor of *shape* that holds the rows in *flat*, then zeros."""

    def rows_by_expert(
        self, flat: Tensor, received: Sequence[Sequence[int]], shape: tuple[int, ...]
    ) -> Tensor:
        """A tensor of *shape* that holds the rows in *flat*, which are sorted by sender, then
        expert, sorted by expert, then sender; then zeros. ``received[s][e]`` is the number of rows
        of sender s for expert e.
        """

    def rows_by_sender(self, rows: Tensor, received: Sequence[Sequence[int]]) -> Tensor:
        """The inverse of :meth:`rows_by_expert`: the rows, sorted by sender, then expert, flat,
        without what is behind them.
        """

    def empty(self, numel: int, dtype: DType) -> Tensor:
        """A new flat tensor with undefined contents."""

    def copy_(self, target: Tensor, source: Tensor) -> None:
        """Overwrite *target* by *source*."""

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """A new tensor a + b."""

    def divide_(self, a: Tensor, divisor: int) -> None:
        """Compute ``a /= divisor``, in place."""

    def add_(self, a: Tensor, b: Tensor) -> None:
        """Compute ``a += b``, in place."""

    def divide(self, a: Tensor, divisor: Tensor) -> Tensor:
        """A new tensor a / divisor of a's type; *divisor* is a scalar."""

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """A new float64 scalar a · b; both are scalars."""

    def zero_(self, a: Tensor) -> None:
        """Overwrite *a* by zeros."""

    def norm_part(self, tensors: Sequence[Tensor], divisor: Tensor | None, op: ReduceOp) -> Tensor:
        """A new float64 scalar: the sum of the squares of all elements, or the largest magnitude;
        each element is first divided by the scalar *divisor*, if given. 0 of no elements.
        """

    def norm_sum(self, parts: Sequence[Tensor], op: ReduceOp) -> Tensor:
        """A new float64 scalar: the sum, or the largest, of *parts* of a norm. 0 of none."""

    def norm_root(self, part: Tensor, op: ReduceOp) -> Tensor:
        """A new float64 scalar: the norm of which *part* is the only part."""

    def to_host(self, tensors: Sequence[Tensor], stream: Stream) -> tuple[Sequence[Tensor], Handle]:
        """Begin, on *stream*, to copy *tensors* into host memory; what stands for each there, with
        its contents once the handle completes. Tensors that share memory are copied once, as a
        whole. They must be kept until then.
        """

    def from_host(
        self, copies: Sequence[Tensor], stream: Stream
    ) -> tuple[Sequence[Tensor], Handle]:
        """Begin, on *stream*, to copy back what :meth:`to_host` made: new tensors with the contents
        (once the handle completes), shapes, strides and sharing of the old ones. The copies may be
        given up as soon as this returns.
        """

    def on_stream(
        self,
        stream: Stream,
        launch: Callable[[], Handle | None],
        record: EventId | None,
        *,
        asynchronous: bool,
    ) -> Callable[[], None]:
        """Wrap *launch* so that it runs on *stream* after what was issued there before, and records
        event *record*.

        An event has happened when everything issued on its stream up to there is complete.
        *asynchronous*: *launch* returns a handle. Called once per instruction, in issue order,
        before any closure runs.
        """

    def waiter(self, stream: Stream, event: EventId) -> Callable[[], None] | None:
        """A closure that makes *stream* wait for *event*; ``None`` if on this device there is
        nothing to do.
        """

    def after_stream(self, stream: Stream) -> Callable[[], None] | None:
        """A closure that lets what is issued next on *stream* use the results of what was issued
        there before; ``None`` if the device's streams see to that themselves.
        """

    def releaser(self, stream: Stream) -> Callable[[Tensor], None] | None:
        """A function to call on a tensor that *stream* is the last to use, before it is given up;
        ``None`` if none is needed.
        """

    def synchronize(self) -> None:
        """Wait for everything in flight; raise what failed."""


class State(Protocol):
    """The parameters, buffers and optimizer of one device."""

    def update(
        self,
        gradients: Mapping[str, Tensor],
        scale: Tensor | None,
        norm: Tensor | None = None,
        max_norm: float | None = None,
        *,
        only_finite: bool = False,
    ) -> None:
        """Give the named parameters their gradients (each divided by the scalar *scale* if given,
        then clipped to *max_norm* if given, *norm* being that of all parameters' gradients) and let
        the optimizer update them. Parameters that are not named are left alone; all are, if
        *only_finite* and *norm* is not finite.
        """

    def write_buffer(self, name: str, value: Tensor, replicas: int = 1) -> None:
        """Store a buffer's new value (copied in place): *value* less ``replicas - 1`` times the old
        one.
        """


class StepContext(Protocol):
    """What varies from step to step."""

    step: int
    seed: int

    def batch_leaf(self, index: int, microbatch: int) -> Tensor:
        """The rows of global microbatch number *microbatch* of batch leaf *index*, on the
        device.
        """

    def report(self, name: str, microbatch: int, value: Tensor) -> None:
        """Hand a scalar (a microbatch's loss or loss weight, the gradient's norm) to the driver.
        *microbatch* is the global number.
        """


class Runtime(Protocol):
    """What an instruction may use when it is bound to a device."""

    slots: list[Tensor | None]
    device: Device
    state: State
    context: StepContext

    def function(self, body: BodyId) -> ChunkFunction:
        """The code of a body, sizes bound."""

    def adding_function(self, body: BodyId, added: tuple[int, ...]) -> AddingFunction:
        """The same, adding the outputs at the positions *added* to as many totals."""

    def communicator(self, name: CommunicatorId) -> Communicator:
        """A communicator of which this device is a member."""


class NodeShape(NamedTuple):
    """How many inputs and outputs a node has and, of a communication, among whom it is."""

    inputs: int
    outputs: int
    groups: Sequence[tuple[DeviceId, ...]] = ()


class Work(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    gc=False,
    tag_field="kind",
    tag=snake_case,
):
    """What a node of the training DAG does. Subclasses are data; ``kind`` is the snake-case class
    name.
    """

    # Whether the planner takes it to be done with the last of its inputs, in no time of its own: so
    # that what it makes can be reduced before the next chunk starts.
    instant: ClassVar[bool] = False

    @property
    def kind(self) -> str:
        """The registered name, for instance ``all_reduce``."""
        return str(self.__struct_config__.tag)

    def overwrites(self) -> tuple[tuple[str, str], ...]:
        """Model state that the node changes: pairs of a value's role (``parameter``, ``shard``,
        ``buffer``, ``kept``) and name.
        """
        return ()

    @property
    def early(self) -> bool:
        """Whether a communication may start long before it is needed, since it reads nothing but
        state, or what was put aside.
        """
        return False

    @property
    def releases_late(self) -> bool:
        """Whether the inputs of a communication must outlive it: they are given up by the stream
        that computes, some time later.
        """
        return False

    communicates: ClassVar[bool] = True

    def flaws(self, node: NodeShape) -> list[str]:  # noqa: ARG002 (for subclasses)
        """What of the work does not fit *node*, in words."""
        return []

    # The rest concerns communication; a group is the tuple of devices that communicate with each
    # other.

    def consumes(self, position: int) -> bool:  # noqa: ARG002
        """Whether the group's member number *position* contributes the node's inputs."""
        return True

    def delivers(self, position: int) -> bool:  # noqa: ARG002
        """Whether the node's outputs exist on the group's member number *position*."""
        return True

    def communicator(self, stream: Stream, group: tuple[DeviceId, ...]) -> CommunicatorId:
        """The communicator of one group; empty if nothing leaves the device. What may be in flight
        at once must not share one.
        """
        return f"{self.kind}:{stream}:{','.join(str(d) for d in group)}"

    def stream(self, stream: Stream, group: tuple[DeviceId, ...]) -> Stream:  # noqa: ARG002
        """The stream of each member's plan that the node's logical *stream* means for one group."""
        return stream

    def lower(self, site: "Site") -> "Instruction":
        """The one instruction that the member at *site* executes for a communication, or a device
        for :class:`LocalWork`.
        """
        raise NotImplementedError


class LocalWork(Work, frozen=True):
    """Work of a derived chunk that is one instruction on each of its devices.

    Its site has no communicator; the inputs are those that live on the device, the outputs the
    chunk's own and then the state that it overwrites.
    """

    communicates: ClassVar[bool] = False


def filled(tensor: Tensor | None) -> Tensor:
    """What a slot holds that the plan says is not empty."""
    assert tensor is not None, "read of an empty slot: the verifier should have refused this plan"
    return tensor


def shard_length(shape: tuple[int, ...], count: int) -> int:
    """Elements of one of *count* equal slices of a tensor, padding included."""
    return -(-math.prod(shape) // count)


class Site(msgspec.Struct, frozen=True, gc=False):
    """One member of one group of a communication node, or one device of a chunk, as the planner
    sees it.

    ``inputs`` and ``outputs`` are the slots of the values that this member contributes and
    receives; ``messages`` are the outputs'.
    """

    node: NodeId
    stream: Stream
    record: EventId | None
    communicator: CommunicatorId
    group: tuple[DeviceId, ...]
    position: int
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    messages: tuple[Message, ...]


class Rendezvous(msgspec.Struct, frozen=True, gc=False):
    """How an instruction meets its peers.

    ``role`` is ``send``, ``receive`` or the collective's kind; ``members`` are the devices that
    must meet (for a message: sender, receiver); ``messages`` is what crosses (equal on all sides).
    ``busiest`` is the number of bytes that the member with most to do sends or receives, where that
    is not what each has afterwards (0: it is).
    """

    communicator: CommunicatorId
    role: str
    members: tuple[DeviceId, ...]
    messages: tuple[Message, ...]
    busiest: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of what crosses, as a member sees it that is no less busy than others."""
        return self.busiest or sum(message.nbytes for message in self.messages)


class Instruction(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    gc=False,
    kw_only=True,
    tag_field="op",
    tag=snake_case,
):
    """One instruction of a device plan.

    ``node`` is the DAG node that it came from (-1: none). ``stream`` is where it runs. ``record``
    is the event that its completion signals, if anything waits for it.
    """

    node: NodeId
    stream: Stream
    record: EventId | None = None

    # Communication stays in flight after it was issued; all else is complete when its stream gets
    # past it.
    asynchronous: ClassVar[bool] = False

    def flaws(self) -> Sequence[str]:
        """Which of its fields do not fit together, in words. All else may be asked of an instruction
        without flaws only.
        """
        return ()

    @property
    def op(self) -> str:
        """The registered name, for instance ``post_receive``."""
        return str(self.__struct_config__.tag)

    def reads(self) -> tuple[Slot, ...]:
        """Slots whose contents it uses."""
        return ()

    def writes(self) -> tuple[Slot, ...]:
        """Slots that hold a new value once it is complete."""
        return ()

    def frees(self) -> tuple[Slot, ...]:
        """Slots that it empties."""
        return ()

    def rendezvous(self) -> Rendezvous | None:
        """How it meets its peers; ``None`` for local work."""
        return None

    def awaits(self) -> EventId | None:
        """The event before which its stream does not go on, if all it does is wait for one."""
        return None

    def loads(self) -> int | None:
        """The batch leaf of which it takes rows, if it does."""
        return None

    def updates(self) -> tuple[tuple[str, Slot], ...]:
        """Parameters that it lets the optimizer update, by name, and their slots."""
        return ()

    def stores(self) -> tuple[str, ...]:
        """Buffers of the model that it overwrites, by name."""
        return ()

    def place(self, memory: Storages) -> None:
        """Take and give up memory, as work does that is complete when its stream gets past it:
        what it writes is new.
        """
        for slot in self.writes():
            memory.make(slot)
        for slot in self.frees():
            memory.empty(slot)

    def fly(self, memory: Storages) -> Flight:
        """What communication keeps from when it is issued until it is complete: by default one flat
        message, which its results are views of.
        """
        meeting = self.rendezvous()
        messages = () if meeting is None else meeting.messages
        flat = memory.new(sum(message.nbytes for message in messages))
        return Flight((flat,), tuple((slot, flat) for slot in self.writes()))

    def bind(self, runtime: Runtime) -> Callable[[], Handle | None] | None:
        """Code that issues it, closed over *runtime*; ``None`` when there is nothing to do on this
        device.
        """
        raise NotImplementedError

    def bind_last(
        self,
        runtime: Runtime,
        dying: frozenset[Slot],  # noqa: ARG002 (for subclasses)
        added: Mapping[Slot, Slot],  # noqa: ARG002 (for subclasses)
    ) -> Callable[[], Handle | None] | None:
        """Like :meth:`bind`, where the plan frees the slots *dying* right after it: it may empty
        them earlier. Chunks add those of their outputs that are in *added* to what is in the slots
        that it names, and fill no slots of their own with them.
        """
        return self.bind(runtime)

    def describe(self) -> str:
        """One line for people and golden files, without stream and event."""
        raise NotImplementedError


WORKS: Registry[type[Work]] = Registry("work", PlanError)
INSTRUCTIONS: Registry[type[Instruction]] = Registry("instruction", PlanError)


W = TypeVar("W", bound=type[Work])
N = TypeVar("N", bound=type[Instruction])


def work(cls: W) -> W:
    """Class decorator: register a kind of work."""
    WORKS.add(snake_case(cls.__name__), cls)
    return cls


def instruction(cls: N) -> N:
    """Class decorator: register a kind of instruction."""
    INSTRUCTIONS.add(snake_case(cls.__name__), cls)
    return cls


class Then:
    """A handle that runs *finish* once, when *handle* has completed."""

    def __init__(self, handle: Handle, finish: Callable[[], None]) -> None:
        self._handle = handle
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        """Wait, then finish."""
        self._handle.wait()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def done(self) -> bool:
        """Whether the work itself is complete."""
        return self._handle.done()

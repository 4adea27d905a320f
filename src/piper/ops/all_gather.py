"""Put the members' slices of tensors together."""

from collections.abc import Callable, Sequence
from typing import ClassVar

from piper.ids import NodeId
from piper.ops.base import (
    Communicator,
    Device,
    Handle,
    Instruction,
    Message,
    Runtime,
    Site,
    Tensor,
    Then,
    Work,
    filled,
    instruction,
    shard_length,
    work,
)
from piper.ops.bucket import BucketCollective, Collect
from piper.ops.storage import Flight, Storages


@work
class AllGather(Work, frozen=True):
    """Output i is the tensor whose slices are the members' i-th inputs (see ``ReduceScatter``), for
    node ``use``. Outputs are of one element type, to which the slices are rounded before they are
    sent.

    It starts as early as the planner likes: its inputs are state.
    """

    use: NodeId

    @property
    def early(self) -> bool:
        return True

    def lower(self, site: Site) -> Instruction:
        return AllGatherBucket.at(site)


@work
class Refresh(Work, frozen=True):
    """Overwrite the parameters ``names``, all of one element type, by what the members' slices, one
    input per name, make together, rounded to that type before they are sent.
    """

    names: tuple[str, ...]

    def overwrites(self) -> tuple[tuple[str, str], ...]:
        return tuple(("parameter", name) for name in self.names)

    def lower(self, site: Site) -> Instruction:
        return RefreshBucket.at(site)


class _Gather(BucketCollective, frozen=True, kw_only=True):
    """An all-gather of slices: they are put into one message; the flat result has them all."""

    def _lengths(self) -> list[int]:
        """Bytes of the slices of each tensor."""
        count = len(self.members)
        return [shard_length(m.shape, count) * m.dtype.itemsize for m in self.messages]

    def fly(self, memory: Storages) -> Flight:
        nbytes = sum(self._lengths())
        return Flight((memory.new(nbytes), memory.new(nbytes * len(self.members))))


@instruction
class AllGatherBucket(_Gather, frozen=True, kw_only=True):
    """Make whole tensors of the members' slices."""

    role: ClassVar[str] = "all_gather"

    def fly(self, memory: Storages) -> Flight:
        """The tensors are copied out of the flat result, unless there is but one."""
        flight, lengths, count = super().fly(memory), self._lengths(), len(self.members)
        alone = sum(length > 0 for length in lengths) == 1
        _, whole = flight.keeps
        made = [whole if alone and n else memory.new(n * count) for n in lengths]
        return flight._replace(fills=tuple(zip(self.outputs, made, strict=True)))

    def start(
        self, device: Device, communicator: Communicator, tensors: Sequence[Tensor]
    ) -> tuple[Handle, Collect]:
        return gather(self.messages, len(self.members), device, communicator, tensors)


@instruction
class RefreshBucket(_Gather, frozen=True, kw_only=True):
    """Make whole tensors of the members' slices, and store them in the parameters (``outputs``)."""

    role: ClassVar[str] = "refresh"

    def bind(self, runtime: Runtime) -> Callable[[], Handle | None]:
        slots, device = runtime.slots, runtime.device
        communicator = runtime.communicator(self.communicator)
        inputs, outputs, messages = self.inputs, self.outputs, self.messages

        def launch() -> Handle:
            tensors = [filled(slots[slot]) for slot in inputs]
            handle, collect = gather(messages, len(self.members), device, communicator, tensors)

            def store() -> None:
                for slot, tensor in zip(outputs, collect(), strict=True):
                    device.copy_(filled(slots[slot]), tensor)

            return Then(handle, store)

        return launch


def gather(
    messages: Sequence[Message],
    count: int,
    device: Device,
    communicator: Communicator,
    tensors: Sequence[Tensor],
) -> tuple[Handle, Collect]:
    """Begin an all-gather of slices *tensors*; it makes tensors with the given messages, of whose
    type the slices are made before they are sent.
    """
    shapes, dtype = tuple(message.shape for message in messages), messages[0].dtype
    lengths = tuple((shard_length(shape, count),) for shape in shapes)
    mine = device.flatten(tensors, lengths, dtype)
    whole = device.empty(count * sum(length for (length,) in lengths), dtype)
    handle = communicator.all_gather(whole, mine)
    return handle, lambda: device.unpack_shards(whole, shapes, count)

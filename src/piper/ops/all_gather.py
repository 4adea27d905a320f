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


@instruction
class AllGatherBucket(BucketCollective, frozen=True, kw_only=True):
    """Make whole tensors of the members' slices."""

    role: ClassVar[str] = "all_gather"

    def start(
        self, device: Device, communicator: Communicator, tensors: Sequence[Tensor]
    ) -> tuple[Handle, Collect]:
        return gather(self.messages, len(self.members), device, communicator, tensors)


@instruction
class RefreshBucket(BucketCollective, frozen=True, kw_only=True):
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

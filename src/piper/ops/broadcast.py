"""Copy the first member's tensors to the others."""

from collections.abc import Sequence
from typing import ClassVar

from piper.ops.base import (
    Communicator,
    Device,
    Handle,
    Instruction,
    Site,
    Tensor,
    Work,
    instruction,
    work,
)
from piper.ops.bucket import BucketCollective, Collect


@work
class Broadcast(Work, frozen=True):
    """Output i is, on every member, the first member's i-th input. All of one element type. The
    other members need have no inputs.
    """

    def lower(self, site: Site) -> Instruction:
        return BroadcastBucket.at(site)


@instruction
class BroadcastBucket(BucketCollective, frozen=True, kw_only=True):
    """Replace a bucket by the first member's."""

    role: ClassVar[str] = "broadcast"

    def start(
        self, device: Device, communicator: Communicator, tensors: Sequence[Tensor]
    ) -> tuple[Handle, Collect]:
        shapes = tuple(message.shape for message in self.messages)
        if tensors:
            flat = device.flatten(tensors, shapes)
        else:
            (dtype,) = {message.dtype for message in self.messages}
            flat = device.empty(sum(message.numel for message in self.messages), dtype)
        return communicator.broadcast(flat, 0), lambda: device.unflatten(flat, shapes)

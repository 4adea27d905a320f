"""Copy the first member's tensors to the others."""

from typing import ClassVar

from piper.ops.base import Communicator, Handle, Instruction, Site, Tensor, Work, instruction, work
from piper.ops.bucket import BucketCollective


@work
class Broadcast(Work, frozen=True):
    """Output i is, on every member, the first member's i-th input. All of one element type."""

    def lower(self, site: Site) -> Instruction:
        return BroadcastBucket(
            node=site.node,
            stream=site.stream,
            record=site.record,
            communicator=site.communicator,
            members=site.group,
            inputs=site.inputs,
            outputs=site.outputs,
            messages=site.messages,
        )


@instruction
class BroadcastBucket(BucketCollective, frozen=True, kw_only=True):
    """Replace a bucket by the first member's."""

    role: ClassVar[str] = "broadcast"

    def start(self, communicator: Communicator, flat: Tensor) -> Handle:
        return communicator.broadcast(flat, 0)

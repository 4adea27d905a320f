"""Sum tensors over the members of a group."""

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
from piper.ops.bucket import BucketCollective


@work
class AllReduce(Work, frozen=True):
    """Output i is the sum over the group of the members' i-th input (the mean, if ``average``).

    All of one element type.
    """

    average: bool = False

    def lower(self, site: Site) -> Instruction:
        return AllReduceBucket(
            node=site.node,
            stream=site.stream,
            record=site.record,
            communicator=site.communicator,
            members=site.group,
            inputs=site.inputs,
            outputs=site.outputs,
            messages=site.messages,
            average=self.average,
        )


@instruction
class AllReduceBucket(BucketCollective, frozen=True, kw_only=True):
    """Sum a bucket over the members; divide by their number if ``average``."""

    average: bool = False

    role: ClassVar[str] = "all_reduce"

    def start(self, communicator: Communicator, flat: Tensor) -> Handle:
        return communicator.all_reduce(flat)

    def finish(self, device: Device, flat: Tensor) -> None:
        if self.average:
            device.divide_(flat, len(self.members))

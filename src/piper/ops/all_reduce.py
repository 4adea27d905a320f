"""Sum tensors over the members of a group, or combine them otherwise."""

from collections.abc import Sequence
from typing import ClassVar

from piper.ops.base import (
    Communicator,
    Device,
    Handle,
    Instruction,
    ReduceOp,
    Site,
    Tensor,
    Work,
    instruction,
    work,
)
from piper.ops.bucket import BucketCollective, Collect


@work
class AllReduce(Work, frozen=True):
    """Output i is the sum over the group of the members' i-th input (the mean, if ``average``), or
    what else ``reduce`` says.

    All of one element type.
    """

    average: bool = False
    reduce: ReduceOp = ReduceOp.SUM

    def lower(self, site: Site) -> Instruction:
        return AllReduceBucket.at(site, average=self.average, reduce=self.reduce)


@instruction
class AllReduceBucket(BucketCollective, frozen=True, kw_only=True):
    """Combine a bucket over the members; divide by their number if ``average``."""

    average: bool = False
    reduce: ReduceOp = ReduceOp.SUM

    role: ClassVar[str] = "all_reduce"

    def start(
        self, device: Device, communicator: Communicator, tensors: Sequence[Tensor]
    ) -> tuple[Handle, Collect]:
        shapes = tuple(message.shape for message in self.messages)
        flat = device.flatten(tensors, shapes)

        def collect() -> Sequence[Tensor]:
            if self.average:
                device.divide_(flat, len(self.members))
            return device.unflatten(flat, shapes)

        return communicator.all_reduce(flat, self.reduce), collect

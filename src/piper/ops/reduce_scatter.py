"""Sum tensors over the members of a group; each member keeps its slice."""

import math
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
from piper.ops.storage import Flight, Storages


@work
class ReduceScatter(Work, frozen=True):
    """Output i is, on member r of n, the r-th of n slices of the sum over the group of the members'
    i-th input.

    Slices are runs of the flattened tensor, padded with zeros to equal lengths. All of one element
    type.
    """

    def lower(self, site: Site) -> Instruction:
        return ReduceScatterBucket.at(site)


@instruction
class ReduceScatterBucket(BucketCollective, frozen=True, kw_only=True):
    """Sum a bucket over the members, each of which keeps its slice of every tensor."""

    role: ClassVar[str] = "reduce_scatter"

    def fly(self, memory: Storages) -> Flight:
        nbytes = sum(message.nbytes for message in self.messages)
        mine = memory.new(nbytes)
        fills = tuple((slot, mine) for slot in self.outputs)
        return Flight((memory.new(nbytes * len(self.members)), mine), fills)

    def start(
        self, device: Device, communicator: Communicator, tensors: Sequence[Tensor]
    ) -> tuple[Handle, Collect]:
        shapes = tuple(message.shape for message in self.messages)
        packed = device.pack_shards(tensors, len(self.members))
        mine = device.empty(sum(math.prod(shape) for shape in shapes), self.messages[0].dtype)
        handle = communicator.reduce_scatter(mine, packed)
        return handle, lambda: device.unflatten(mine, shapes)

"""A communicator whose peers are imagined: everything is there at once. For measuring one device by itself."""

from collections.abc import Sequence

import torch

from piper.devices.tensors import as_torch, torch_dtype
from piper.ops.base import Message, ReduceOp, Tensor


class _Done:
    """A handle of what is complete."""

    def wait(self) -> None:
        """See :class:`~piper.ops.base.Handle`."""

    def done(self) -> bool:
        """See :class:`~piper.ops.base.Handle`."""
        return True


class AloneCommunicator:
    """Implements :class:`~piper.ops.base.Communicator`: messages are zeros, other members' parts are like one's own."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def send(self, tensor: Tensor, peer: int) -> _Done:
        """Copied, as it would be to be sent."""
        del peer
        as_torch(tensor).clone()
        return _Done()

    def receive(self, message: Message, peer: int) -> tuple[torch.Tensor, _Done]:
        """Zeros."""
        del peer
        return torch.zeros(message.shape, dtype=torch_dtype(message.dtype)), _Done()

    def all_reduce(self, flat: Tensor, op: ReduceOp = ReduceOp.SUM) -> _Done:
        """Nothing changes."""
        del flat, op
        return _Done()

    def all_gather(self, out: Tensor, shard: Tensor) -> _Done:
        """All shards are this one."""
        as_torch(out).view(self.size, -1).copy_(as_torch(shard))
        return _Done()

    def reduce_scatter(self, out: Tensor, flat: Tensor) -> _Done:
        """One's own part."""
        as_torch(out).copy_(as_torch(flat).view(self.size, -1)[self.rank])
        return _Done()

    def all_to_all(
        self, out: Tensor, flat: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> _Done:
        """Zeros."""
        del flat, out_splits, in_splits
        as_torch(out).zero_()
        return _Done()

    def broadcast(self, flat: Tensor, root: int) -> _Done:
        """Nothing changes."""
        del flat, root
        return _Done()

"""A communicator whose peers are imagined: everything is there at once. For measuring one device by
itself.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

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


class Imagining:
    """Counts the ``seconds`` that go into imagining peers, which a measurement leaves out."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self._clock = clock

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what happens inside."""
        began = self._clock()
        yield
        self.seconds += self._clock() - began


class AloneCommunicator:
    """Implements :class:`~piper.ops.base.Communicator`: messages are small random numbers, or zeros
    if they may be indices; other members' parts are like one's own.
    """

    def __init__(self, rank: int, size: int, imagining: Imagining) -> None:
        self.rank, self.size = rank, size
        self._imagining = imagining

    def send(self, tensor: Tensor, peer: int) -> _Done:
        """Nothing happens."""
        del tensor, peer
        return _Done()

    def receive(self, message: Message, peer: int) -> tuple[torch.Tensor, _Done]:
        """A new tensor."""
        del peer
        with self._imagining.counted():
            return example(message.shape, torch_dtype(message.dtype)), _Done()

    def all_reduce(self, flat: Tensor, op: ReduceOp = ReduceOp.SUM) -> _Done:
        """Nothing changes."""
        del flat, op
        return _Done()

    def all_gather(self, out: Tensor, shard: Tensor) -> _Done:
        """All shards are this one."""
        with self._imagining.counted():
            as_torch(out).view(self.size, -1).copy_(as_torch(shard))
        return _Done()

    def reduce_scatter(self, out: Tensor, flat: Tensor) -> _Done:
        """One's own part."""
        with self._imagining.counted():
            as_torch(out).copy_(as_torch(flat).view(self.size, -1)[self.rank])
        return _Done()

    def all_to_all(
        self, out: Tensor, flat: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> _Done:
        """What one has for oneself, again and again: others send as much and the like."""
        with self._imagining.counted():
            first = sum(in_splits[: self.rank])
            mine = as_torch(flat)[first : first + in_splits[self.rank]]
            for end, count in zip(accumulate(out_splits), out_splits, strict=True):
                part = as_torch(out)[end - count : end]
                common = min(count, mine.numel())
                part[:common].copy_(mine[:common])
                part[common:].zero_()
        return _Done()

    def broadcast(self, flat: Tensor, root: int) -> _Done:
        """Nothing changes."""
        del flat, root
        return _Done()


def example(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Small random numbers; zeros for integers, which may be indices."""
    if dtype.is_floating_point or dtype.is_complex:
        return 0.02 * torch.randn(tuple(shape), dtype=dtype)
    return torch.zeros(tuple(shape), dtype=dtype)

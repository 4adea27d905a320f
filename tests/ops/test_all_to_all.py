"""What members of a group send each other and put together of experts' tokens."""

import pytest
import torch

from piper.devices.cpu import CpuDevice
from piper.dtypes import DType
from piper.ids import DeviceId, NodeId, Slot, Stream
from piper.ops.all_to_all import ExchangeExperts
from piper.ops.base import Message

DEVICE = CpuDevice()
EXPERTS, TOKENS, WIDTH = 6, 4, 2


class Recording:
    """A communicator that is completed by hand."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_to_all(self, out, flat, out_splits, in_splits):
        assert flat.numel() == sum(in_splits)
        assert out.numel() == sum(out_splits)
        self.given = flat.split(list(in_splits))
        self.wanted = out.split(list(out_splits))


def exchanged(
    tensors: list[torch.Tensor], whole: tuple[int, ...], shape: tuple[int, ...], *, back: bool
) -> list[torch.Tensor]:
    """Run the exchange on all members; *whole* with the tokens as -1."""
    members = tuple(DeviceId(i) for i in range(len(tensors)))
    everyone = [Recording(i, len(tensors)) for i in members]
    collects = []
    for me, tensor in zip(everyone, tensors, strict=True):
        instruction = ExchangeExperts(
            node=NodeId(0),
            stream=Stream("all_to_all"),
            communicator="c",
            members=members,
            inputs=(Slot(0),),
            outputs=(Slot(1),),
            messages=(Message(shape, DType.FLOAT32),),
            sizes=whole,
            expert_dim=whole.index(EXPERTS),
            token_dim=whole.index(-1),
            back=back,
        )
        collects.append(instruction.start(DEVICE, me, [tensor])[1])
    for me in everyone:
        for other in everyone:
            me.wanted[other.rank].copy_(other.given[me.rank])
    return [collect()[0] for collect in collects]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    "whole", [(EXPERTS, -1, WIDTH), (-1, EXPERTS, WIDTH), (WIDTH, EXPERTS, -1)]
)
def test_tokens_of_all_members_go_to_their_experts_and_back(whole, count):
    experts, tokens = whole.index(EXPERTS), whole.index(-1)
    shape = [TOKENS if n == -1 else n for n in whole]
    given = [torch.randn(shape) for _ in range(count)]
    inside = list(shape)
    inside[experts], inside[tokens] = EXPERTS // count, TOKENS * count
    held = exchanged(given, whole, tuple(inside), back=False)
    for me, found in enumerate(held):
        assert torch.equal(found, torch.cat([x.chunk(count, experts)[me] for x in given], tokens))
    # As a chunk's results may lie in memory.
    strided = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in held]
    for found, x in zip(exchanged(strided, whole, tuple(shape), back=True), given, strict=True):
        assert torch.equal(found, x)

"""A model whose stage 1 fails in the backward of the microbatch that the batch says; importable by
worker processes.
"""

import torch
from torch import nn

import piper

STAGES = 2


class Exploding(nn.Module):
    """``index`` [B] int64 is looked up in the backward of stage 1: an index that the table does not
    have raises there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.Linear(3, 3) for _ in range(STAGES)])
        self.register_buffer("table", torch.zeros(4, 3))

    def forward(self, x, index):
        for stage, linear in enumerate(self.stages):
            with piper.annotate("PP", stage):
                x = linear(x)
                if stage == 1:
                    x.register_hook(lambda g: g + nn.functional.embedding(index, self.table))
                x = x.tanh()
        return x


def batch(rows: int, bad_row: int | None):
    """A batch in which *bad_row*, if any, has an index that does not exist."""
    make = torch.Generator().manual_seed(0)
    index = torch.zeros(rows, dtype=torch.int64)
    if bad_row is not None:
        index[bad_row] = 99
    x, y = torch.randn(rows, 3, generator=make), torch.randn(rows, 3, generator=make)
    return (x, index), y


def loss_fn(outputs, targets):
    return nn.functional.mse_loss(outputs, targets)

"""Weights of losses: their types, and who needs their sum."""

import pytest
import torch
from tests.cases.equal import assert_equal, randn
from tests.cases.test_experts import Stack, batch
from torch import nn
from torch.nn import functional

import piper


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with piper.annotate("PP", 0):
            h = self.a(x)
        with piper.annotate("PP", 1):
            return self.b(h)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "bfloat16"])
def test_weights_of_narrow_types_are_added_up_as_numbers(dtype):
    """Truth values count, and a sum of four times 200 (or 100) does not end at 255."""
    size = 100.0 if dtype == "int8" else 200.0

    def loss(outputs, targets):
        weight = torch.tensor(size).to(getattr(torch, dtype)) * (targets[:, 0] > -99).any()
        return (outputs - targets).square().sum(), weight.to(getattr(torch, dtype))

    strategy = piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 2, zero=1)
    assert_equal(Two(), loss, strategy, (randn(8, 4), randn(8, 4, seed=1)))


def weighted(outputs, targets):
    logits, auxiliary = outputs
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss + auxiliary * targets.numel(), targets.numel()


@pytest.mark.parametrize(
    ("dense", "experts"), [([0, 1], [0]), ([0, 1], [1]), ([1, 0], [1]), ([0, 1, 2, 3], [0])]
)
def test_experts_on_one_of_the_devices_of_the_others_get_the_sum_of_weights(dense, experts):
    strategy = [
        piper.Place({"EP": None}, devices=dense),
        piper.Shard({"EP": "*"}, devices=experts),
        piper.Replicate({"EP": None}),
        piper.Split({}, num_microbatches=2),
    ]
    assert_equal(Stack().double(), weighted, strategy, batch(16))

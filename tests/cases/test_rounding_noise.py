"""Gradients that are rounding errors on both sides, and optimizers that divide by their size."""

import pytest
import torch
from tests.cases.equal import randn
from torch import nn
from torch.nn import functional

import piper
from piper.runtime.state import ModelState

STRATEGY = piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 2, zero=2)


class Attention(nn.Module):
    """The gradient of the keys' bias is zero: a softmax does not see what is added to a whole row."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP", 0):
            x = functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        with piper.annotate("PP", 1):
            return self.out(x)


def sign_of_noise(parameters):
    """Steps of the size of the learning rate, whatever the gradient's."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-30)


def checked(batch):
    torch.manual_seed(0)
    return piper.check(
        Attention(), functional.mse_loss, STRATEGY, batch, optimizer=sign_of_noise, steps=3
    )


def test_adam_may_follow_the_noise_of_a_gradient_that_is_zero():
    report = checked((randn(8, 5, 8), randn(8, 5, 8, seed=1)))
    assert report.ok, str(report)


@pytest.mark.parametrize("name", ["key.bias", "out.weight"])
def test_an_update_that_is_not_the_optimizers_is_found(monkeypatch, name):
    """Also of a parameter whose gradient is noise."""
    update = ModelState.update

    def wrong(self, gradients, *rest, **options):
        update(self, gradients, *rest, **options)
        if self.shards and name in self.shards:
            self.shards[name].data.mul_(1 + 1e-6)

    monkeypatch.setattr(ModelState, "update", wrong)
    report = checked((randn(8, 5, 8), randn(8, 5, 8, seed=1)))
    assert not report.ok
    assert max(s.parameters.by_name[name] for s in report.steps) > 1e-7

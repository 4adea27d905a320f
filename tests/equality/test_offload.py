"""Offloading changes no number: pairs of {schedules × ZeRO × recomputation × region}, dropout,
BatchNorm, Ray.
"""

from collections.abc import Sequence
from itertools import combinations, product

import pytest
import torch
from tests.cases.equal import mse, randn, sgd
from tests.equality import zero_matrix as matrix
from tests.equality.test_recompute import tokens, train, transformer
from torch import nn

import piper
from piper.directives.base import Directive
from piper.models import UNet, UNetConfig, transformer_loss, unet_loss

pytestmark = pytest.mark.timeout(240)

FACTORS = {
    "schedule": ("gpipe", "1f1b", "interleaved_1f1b"),
    "zero": (0, 2, 3),
    "recompute": ("nothing", "other regions", "all"),
    "first": (True, False),  # whether the offload is stated before all else
}


def pairs(case: tuple[object, ...]) -> set[object]:
    return set(combinations(enumerate(case), 2))


def covering() -> list[tuple[object, ...]]:
    """Cases in which every pair of values of any two factors occurs; greedy, deterministic."""
    every = list(product(*FACTORS.values()))
    missing = set().union(*map(pairs, every))
    chosen = []
    while missing:
        best = max(every, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def check(model: nn.Module, loss_fn, strategy: Sequence[Directive], batch) -> None:
    report = piper.check(model, loss_fn, strategy, batch, optimizer=sgd, seed=3)
    report.require()


@pytest.mark.parametrize(("schedule", "zero", "recompute", "first"), covering())
def test_pairs(schedule, zero, recompute, first):
    case = matrix.Case(
        schedule, zero, pp=2, dp=2 if zero else 1, recompute=recompute == "all", tied=True
    )
    half = list(range(case.num_stages // 2))
    added: list[Directive] = [piper.Offload({"PP": half} if recompute == "other regions" else {})]
    if recompute == "other regions":
        added.append(piper.Recompute({"PP": [s for s in range(case.num_stages) if s not in half]}))
    usual = matrix.strategy(case)
    worst = matrix.run(case, [*added, *usual] if first else [*usual, *added])
    assert worst.worst <= matrix.TOLERANCE


def test_bit_for_bit_as_without():
    strategy = piper.strategies.pipeline("1f1b", [[0], [1]], 4)
    model, batch = transformer(dropout=0.3), tokens()
    losses, state = train(model, transformer_loss, [*strategy, piper.Offload({})], batch)
    expected_losses, expected = train(model, transformer_loss, strategy, batch)
    assert losses == expected_losses
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


class Norms(nn.Module):
    """BatchNorm saves its statistics; its running ones pass from microbatch to microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 3)

    def forward(self, x):
        with piper.annotate("PP", 0):
            x = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.4)
        with piper.annotate("PP", 1):
            return self.second(x)


def test_batch_norm_and_dropout():
    torch.manual_seed(0)
    strategy = piper.strategies.pipeline("gpipe", [[0], [1]], 4)
    check(Norms(), mse, [*strategy, piper.Offload({})], (randn(16, 4), randn(16, 3, seed=1)))


def test_skip_connections():
    torch.manual_seed(0)
    model = UNet(UNetConfig(channels=2, width=4, image_size=4))
    batch = (randn(4, 2, 4, 4), randn(4, 2, 4, 4, seed=1))
    strategy = piper.strategies.pipeline("1f1b", [[0], [1], [2], [3]], 4)
    check(model.double(), unet_loss, [*strategy, piper.Offload({})], batch)


def test_one_device_without_a_placement():
    check(transformer(), transformer_loss, [piper.Offload({"PP": 0})], tokens())


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_ray_and_threads_agree():
    strategy = [*piper.strategies.pipeline("1f1b", [[0], [1]], 4), piper.Offload({})]

    def run(backend: str):
        model, batch = transformer(dropout=0.1), tokens()
        with piper.compile(
            model, transformer_loss, strategy, batch, optimizer=sgd, backend=backend
        ) as trainer:
            losses = [trainer.step(*batch).loss for _ in range(3)]
            return [*losses, trainer.evaluate(*batch).loss], trainer.state_dict()

    (found, state), (expected, reference) = run("ray"), run("inprocess")
    assert found == expected
    assert all(torch.equal(state[name], tensor) for name, tensor in reference.items())

"""Dropout: the same masks, bit for bit, however the model is cut and wherever it runs."""

import pytest
import torch
from tests.cases.equal import sgd
from torch import nn
from torch.nn import functional

import piper
from piper.models import MLP, MLPConfig, mlp_loss

pytestmark = pytest.mark.timeout(120)

MICROBATCHES = 4


class Noisy(nn.Module):
    """Four layers with dropout of three kinds; *cuts* says at which layers a new region begins."""

    def __init__(self, cuts: tuple[int, ...]) -> None:
        super().__init__()
        self.cuts = cuts
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            with piper.annotate("PP", sum(number >= cut for cut in self.cuts)):
                x = functional.dropout(layer(x).tanh(), 0.4, self.training)
                x = x + torch.rand_like(x) if number % 2 else functional.alpha_dropout(x, 0.2, True)
        return x


def run(groups, cuts: tuple[int, ...], *, seed: int = 3, steps: int = 2, backend="inprocess"):
    """Losses and final weights, from fixed initial weights and batches."""
    torch.manual_seed(0)
    model = Noisy(cuts)
    batch = (torch.randn(8, 6), torch.randn(8, 6))
    split = [piper.Split({}, num_microbatches=MICROBATCHES)]
    strategy = piper.strategies.pipeline("1f1b", groups, MICROBATCHES) if groups else split
    with piper.compile(
        model, mlp_loss, strategy, batch, optimizer=sgd, seed=seed, backend=backend
    ) as trainer:
        losses = [trainer.step(*batch).loss for _ in range(steps)]
        return losses, trainer.state_dict()


def assert_same(found, expected) -> None:
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][n], t) for n, t in expected[1].items())


@pytest.fixture(scope="module")
def whole():
    return run([], ())


def test_the_same_seed_twice(whole):
    assert_same(run([], ()), whole)


def test_another_seed_another_step_another_microbatch(whole):
    assert run([], (), seed=4)[0][0] != whole[0][0]
    assert whole[0][0] != whole[0][1]


@pytest.mark.parametrize(
    ("groups", "cuts"),
    [
        ([[0], [1]], (2,)),
        ([[0], [1]], (1,)),
        ([[0], [1], [2]], (1, 3)),
        ([[0], [1], [2], [3]], (1, 2, 3)),
    ],
    ids=str,
)
def test_stages_and_chunk_boundaries_do_not_change_one_bit(groups, cuts, whole):
    assert_same(run(groups, cuts), whole)


def test_replicas_draw_as_the_microbatches_of_one_process_do():
    """Replica r's microbatch m is number r·M + m. (Sums over replicas are added in another order:
    not bitwise.)
    """
    torch.manual_seed(0)
    model = Noisy((2,))
    batch = (torch.randn(8, 6), torch.randn(8, 6))
    for groups, microbatches in (([[0, 1], [2, 3]], 2), ([[0, 1, 2, 3], [4, 5, 6, 7]], 1)):
        strategy = piper.strategies.pipeline("1f1b", groups, microbatches)
        report = piper.check(model, mlp_loss, strategy, batch, optimizer=sgd, seed=3)
        assert report.ok, report


def test_every_microbatch_has_its_own_mask():
    """The same row in every microbatch: with one mask for all of them, the microbatches' losses
    would be equal.
    """
    torch.manual_seed(0)
    model = MLP(MLPConfig(in_features=6, width=32, out_features=1, num_layers=2, dropout=0.5))
    row = torch.randn(1, 6).expand(4, 6).clone()
    batch = (row, torch.zeros(4, 1))
    split = [piper.Split({}, num_microbatches=4)]
    with piper.compile(
        model, mlp_loss, split, batch, optimizer=sgd, backend="inprocess"
    ) as trainer:
        run_ = trainer._backend.run(trainer.program.key, [batch], first_step=0, seed=0)
    assert len(set(run_.steps[0].values["loss"].values())) == 4


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_both_backends_draw_the_same(whole):
    """Processes instead of threads."""
    assert_same(run([[0], [1]], (2,), backend="ray"), whole)

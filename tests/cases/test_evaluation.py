"""Evaluation leaves everything as it is."""

import pytest
import torch
from tests.cases.equal import mse, randn, sgd
from torch import nn

import piper


class Counting(nn.Module):
    """Counts rows and averages activations in both modes, and its output depends on both."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x):
        with piper.annotate("PP", 0):
            self.seen.add_(x.shape[0])
            h = self.a(x).tanh() * (1 + self.seen / 10)
        with piper.annotate("PP", 1):
            self.mean = 0.5 * self.mean + h.detach().mean(0)
            self.last.copy_(h.detach()[0])
            return self.b(h + self.mean)


STRATEGIES = {
    "one device": [piper.Place({}, [0]), piper.Split({}, num_microbatches=2)],
    "pipeline": piper.strategies.pipeline("1f1b", [[0], [1]], 2),
    "replicas": [
        piper.Place({"PP": 0}, [0, 1]),
        piper.Place({"PP": 1}, [2, 3]),
        piper.Replicate({}, replicated_buffers="sum"),
        piper.Split({}, num_microbatches=2),
    ],
}


def expected_loss(model, state, x, y):
    """Plain PyTorch, each row from the same buffers."""
    model.load_state_dict(state)
    model.mean = torch.zeros(4, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        return mse(model(x), y).item()


def evaluated(strategy, rows, backend, **given):
    torch.manual_seed(0)
    model = Counting().double()
    batch = randn(8, 4), randn(8, 4, seed=1)
    x, y = randn(rows, 4, seed=2), randn(rows, 4, seed=3)
    with piper.compile(
        model, mse, strategy, batch, optimizer=sgd, backend=backend, **given
    ) as trainer:
        trainer.step(*batch)
        before = trainer.state_dict()
        first = trainer.evaluate(x, y).loss
        again = trainer.evaluate(x, y).loss
        after = trainer.state_dict()
    assert first == again
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert before["seen"] > 0
    return first


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_what_forward_writes_in_evaluation_mode_is_not_kept(strategy, rows):
    evaluated(strategy, rows, "inprocess")


@pytest.mark.ray
def test_what_forward_writes_in_evaluation_mode_is_not_kept_by_processes_either():
    evaluated(STRATEGIES["pipeline"], 5, "ray")


def test_every_microbatch_of_an_evaluation_sees_the_same_buffers():
    torch.manual_seed(0)
    model = Counting().double()
    batch = randn(8, 4), randn(8, 4, seed=1)
    x, y = randn(5, 4, seed=2), randn(5, 4, seed=3)
    with piper.compile(
        model, mse, STRATEGIES["pipeline"], batch, optimizer=sgd, backend="inprocess"
    ) as trainer:
        # 5 rows are five microbatches of one row.
        found = trainer.evaluate(x, y).loss
        state = trainer.state_dict()
    parts = [expected_loss(model, state, x[i : i + 1], y[i : i + 1]) for i in range(5)]
    assert found == pytest.approx(sum(parts) / 5, rel=1e-12)

"""Captured models under real strategies: threads, processes and eager PyTorch draw and compute the
same.
"""

import pytest
import torch
from torch import nn

from piper.api.reference import Reference
from piper.backends import make_backend
from piper.capture import annotate, capture_with_constants
from piper.directives.place import Place
from piper.directives.replicate import Replicate
from piper.directives.split import Split
from piper.directives.strategy import apply
from piper.planner import plan
from piper.runtime.batch import signature
from piper.runtime.optimizer import OptimizerSpec
from piper.schedules.one_f_one_b import one_f_one_b

MICROBATCHES, REPLICAS, STEPS, SEED = 2, 2, 3, 5


class Dropping(nn.Module):
    """Two stages with dropout in each, a buffer that the forward writes, and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16, dtype=torch.float64)
        self.second = nn.Linear(16, 8, dtype=torch.float64)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("PP", 0):
            x = self.dropout(torch.relu(self.first(x)))
        with annotate("PP", 1):
            x = self.second(x + 0.1 * torch.randn_like(x))
            return self.dropout(x)


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - targets) ** 2).mean()


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, t = torch.randn(2, 8, 8, dtype=torch.float64, generator=generator)
    return x, t


PIPELINE = [
    Place({"PP": 0}, devices=[0]),
    Place({"PP": 1}, devices=[1]),
    Split({}, num_microbatches=MICROBATCHES * REPLICAS),
    *one_f_one_b(num_stages=2, num_microbatches=MICROBATCHES * REPLICAS),
]
DATA_PARALLEL = [
    Place({}, devices=[0, 1]),
    Replicate({}, devices="placed"),
    Split({}, num_microbatches=MICROBATCHES),
]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Dropping()


def trained(backend, model, strategy):
    """``losses[step][microbatch]`` and final parameters."""
    captured = capture_with_constants(model, loss_fn, batch(0))
    planned = plan(apply(captured.dag, strategy))
    with backend:
        backend.start(planned.num_devices)
        backend.load("train", planned, signature(batch(0)), captured.constants)
        backend.initialise("train", dict(model.named_parameters()), OptimizerSpec(momentum))
        result = backend.run("train", batch, first_step=0, num_steps=STEPS, seed=SEED)
        return [s.values["loss"] for s in result.steps], backend.snapshot().parameters


@pytest.fixture(scope="module")
def expected(model):
    dag = capture_with_constants(model, loss_fn, batch(0)).dag
    reference = Reference(
        model, loss_fn, dag, dict(model.named_parameters()), OptimizerSpec(momentum), SEED
    )
    losses = [reference.step(batch(s), MICROBATCHES * REPLICAS, s).loss for s in range(STEPS)]
    return losses, reference.state.parameters


@pytest.mark.parametrize("strategy", [PIPELINE, DATA_PARALLEL], ids=["pipeline", "data parallel"])
def test_threads_draw_what_eager_draws(model, expected, strategy):
    losses, parameters = trained(make_backend("inprocess", timeout=30.0), model, strategy)
    assert [sum(step.values()) / len(step) for step in losses] == pytest.approx(
        expected[0], rel=1e-13
    )
    for name, tensor in expected[1].items():
        torch.testing.assert_close(parameters[name], tensor.detach(), rtol=1e-12, atol=1e-14)


def test_strategies_give_bitwise_the_same_first_losses(model):
    pipeline, _ = trained(make_backend("inprocess", timeout=30.0), model, PIPELINE)
    replicas, _ = trained(make_backend("inprocess", timeout=30.0), model, DATA_PARALLEL)
    assert pipeline[0] == replicas[0]
    assert len(pipeline[0]) == MICROBATCHES * REPLICAS


@pytest.mark.ray
@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", [PIPELINE, DATA_PARALLEL], ids=["pipeline", "data parallel"])
def test_processes_give_bitwise_what_threads_give(model, strategy):
    losses, parameters = trained(make_backend("inprocess", timeout=30.0), model, strategy)
    found, state = trained(make_backend("ray", threads=1), model, strategy)
    assert found == losses
    assert all(torch.equal(state[name], tensor) for name, tensor in parameters.items())

"""Learning rates that are decided while training, the same on every backend."""

import pytest
import torch
from tests.cases.equal import mse, randn
from torch import nn

import piper
from piper.errors import ConfigError, StateError


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with piper.annotate("PP", 0):
            x = self.a(x).tanh()
        with piper.annotate("PP", 1):
            return self.b(x)


BATCH = randn(8, 4), randn(8, 4, seed=1)
STRATEGY = piper.strategies.pipeline("1f1b", [[0], [1]], 2)


def sgd(params):
    return torch.optim.SGD(params, lr=0.2, momentum=0.9)


def plain(rates):
    """Plain PyTorch with these learning rates."""
    model = Two().double()
    optimizer = sgd(model.parameters())
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        mse(model(BATCH[0]), BATCH[1]).backward()
        optimizer.step()
    return model.state_dict()


def compiled(strategy=STRATEGY, backend="inprocess", optimizer=sgd, **given):
    return piper.compile(
        Two().double(), mse, strategy, BATCH, optimizer=optimizer, backend=backend, **given
    )


def assert_close(trainer, rates):
    found = trainer.state_dict()
    for name, tensor in plain(rates).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-13)


BACKENDS = ["inprocess", pytest.param("ray", marks=pytest.mark.ray)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_schedule_sees_what_the_driver_has_seen(backend):
    """And a factor multiplies it."""
    decided = {"factor": 1.0}
    with compiled(
        backend=backend, lr_schedule=lambda step: decided["factor"] / (1 + step)
    ) as trainer:
        trainer.step(*BATCH)
        decided["factor"] = 0.5
        trainer.step(*BATCH)
        trainer.lr_factor = 0.1
        trainer.fit([BATCH] * 2, 2)
        assert_close(trainer, [0.2, 0.2 * 0.5 / 2, 0.2 * 0.05 / 3, 0.2 * 0.05 / 4])


def test_many_steps_of_one_call_have_each_their_own_rate():
    def data(step):
        return BATCH

    with compiled(lr_schedule=lambda step: 0.9**step) as trainer:
        trainer.fit(data, 5)
        trainer.fit([BATCH] * 4, 4)
        trainer.profile(*BATCH, steps=2)
        assert_close(trainer, [0.2 * 0.9**step for step in range(11)])


def test_a_factor_is_part_of_a_checkpoint(tmp_path):
    with compiled() as trainer:
        trainer.lr_factor = 0.5
        trainer.step(*BATCH)
        trainer.save(tmp_path / "saved")
    strategy = piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 1, zero=2)
    with compiled(strategy) as trainer:
        trainer.load(tmp_path / "saved")
        assert trainer.lr_factor == 0.5
        trainer.step(*BATCH)
        trainer.lr_factor = 1
        trainer.step(*BATCH)
        assert_close(trainer, [0.1, 0.1, 0.2])


def test_accumulation_uses_the_factor_of_the_step_that_updates():
    with compiled() as trainer:
        trainer.lr_factor = 0.0
        trainer.step(*BATCH, update=False)
        trainer.lr_factor = 0.25
        trainer.step(*BATCH)
        found = trainer.state_dict()
    with compiled() as trainer:
        trainer.lr_factor = 0.5
        trainer.step(*BATCH)
        for name, tensor in trainer.state_dict().items():
            torch.testing.assert_close(found[name], tensor)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, "0.1", True, None])
def test_factors_that_make_no_sense(value):
    with compiled() as trainer:
        with pytest.raises(ConfigError, match="lr_factor is"):
            trainer.lr_factor = value
        assert trainer.lr_factor == 1.0


def test_a_trainer_without_optimizer_has_no_rates():
    with compiled(optimizer=None) as trainer, pytest.raises(StateError, match="optimizer=None"):
        trainer.lr_factor = 0.5


def test_a_schedule_that_fails_leaves_the_trainer_as_it_was():
    with compiled(lr_schedule=lambda step: [1.0, 0.5][step]) as trainer:
        trainer.fit([BATCH] * 2, 2)
        with pytest.raises(ConfigError, match="failed for step 2: IndexError"):
            trainer.step(*BATCH)
        assert trainer.steps_done == 2
        assert_close(trainer, [0.2, 0.1])

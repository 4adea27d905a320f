import math

import pytest
import torch

import piper
from piper.api.loss_scaler import LossScaler, is_skipped
from piper.errors import StateError


def test_it_does_what_torch_does():
    """Against ``torch.amp.GradScaler`` over a long run of good and bad steps."""
    options = {"growth": 3.0, "backoff": 0.25, "growth_interval": 3}
    mine = LossScaler(piper.LossScale(init=64.0, **options))
    theirs = torch.amp.GradScaler(
        "cpu", init_scale=64.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=3
    )
    make = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    seen = set()
    for bad in (torch.rand(60, generator=make) < 0.25).tolist():
        assert mine.scale == theirs.get_scale()
        seen.add(mine.scale)
        theirs.scale(torch.ones(1))
        parameter.grad = torch.tensor([math.inf if bad else 1.0])
        theirs.step(optimizer)
        theirs.update()
        mine.update(skipped=bad)
    assert len(seen) > 5


def test_it_goes_on_where_it_was():
    scaler = LossScaler(piper.LossScale(growth_interval=3))
    for skipped in (True, False, False):
        scaler.update(skipped=skipped)
    other = LossScaler(piper.LossScale(growth_interval=3))
    other.load_state_dict(scaler.state_dict())
    other.update(skipped=False)
    assert (other.scale, other.good_steps) == (2.0**16, 0)


def test_the_scale_stays_finite():
    scaler = LossScaler(piper.LossScale(init=1e308, growth=10.0, growth_interval=1))
    scaler.update(skipped=False)
    assert scaler.scale == 1e308


@pytest.mark.parametrize(
    "state",
    [
        {"scale": 1.0},
        {"scale": -1.0, "good_steps": 0},
        {"scale": math.nan, "good_steps": 0},
        {"scale": 1.0, "good_steps": 0.5},
        {"scale": 1.0, "good_steps": 0, "more": 1},
    ],
)
def test_a_state_that_is_none(state):
    with pytest.raises(StateError, match="loss scaler"):
        LossScaler(piper.LossScale()).load_state_dict(state)


@pytest.mark.parametrize(
    ("norm", "skipped"), [(1.0, False), (math.inf, True), (math.nan, True), (None, False)]
)
def test_steps_whose_norm_is_not_finite_are_skipped(norm, skipped):
    assert is_skipped(norm) is skipped

"""Gradients that overflow on one device only."""

import math

import pytest
import torch
from torch import nn

import piper
from piper.schedules import one_f_one_b
from piper.schedules.placements import chain

PRECISION = piper.Precision(
    compute=torch.float16, loss_scale=piper.LossScale(init=2.0**12, growth_interval=2)
)


def data(step):
    """In step 2 the second stage, on the second replica's last microbatch alone, has an infinite
    gradient; the first stage has none.
    """
    make = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 4, generator=make), torch.randn(8, 3, generator=make)
    blown = torch.zeros(8, 1)
    if step == 2:
        blown[-1] = math.inf
    return (x, blown), y


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x, blown):
        with piper.annotate("PP", 0):
            x = self.first(x).tanh()
        with piper.annotate("PP", 1):
            # The bias's gradient is infinite, the gradient that goes back to the first stage is
            # not.
            y = self.second(x)
            return y + _Exploding.apply(self.second.bias * torch.ones_like(y), blown)


class _Exploding(torch.autograd.Function):
    """0 forward; adds *blown* to the gradient."""

    @staticmethod
    def forward(ctx, x, blown):
        ctx.save_for_backward(blown)
        return x * 0

    @staticmethod
    def backward(ctx, gradient):
        (blown,) = ctx.saved_tensors
        return gradient * 0 + blown.to(gradient.dtype), None


def mse(outputs, targets):
    return nn.functional.mse_loss(outputs, targets)


def weighted(outputs, targets):
    return ((outputs - targets) ** 2).sum() / 100, torch.tensor(float(len(targets)))


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.02, eps=1e-3)


def strategy(zero):
    options = {1: "shard_optimizer", 2: "shard_grads", 3: "shard_params"}
    replicate = piper.Replicate({}, **({options[zero]: True} if zero else {}))
    split = piper.Split({}, num_microbatches=2)
    return [*chain([[0, 1], [2, 3]]), replicate, split, *one_f_one_b(2, 2)]


QUICK = [(0, None), (3, 0.05)]
ALL = [(zero, norm) for zero in range(4) for norm in (None, 0.05)]


@pytest.mark.parametrize(
    ("zero", "max_grad_norm"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.full) for case in ALL],
)
def test_all_devices_skip_the_step(zero, max_grad_norm):
    """Nothing changes anywhere, the scale is halved, training goes on as in one process."""
    loss = weighted if zero % 2 else mse
    options = {"optimizer": adam, "precision": PRECISION, "max_grad_norm": max_grad_norm}
    report = piper.check(Model(), loss, strategy(zero), data, steps=5, **options)
    report.require()
    skipping = piper.compile(
        Model(), loss, strategy(zero), data(0), backend="inprocess", verify_capture=False, **options
    )
    with skipping as trainer:
        results = []
        for step in range(5):
            before = trainer._backend.copies()
            results.append(trainer.step(*data(step)))
            if step == 2:
                assert_unchanged(before, trainer._backend.copies())
    assert [r.skipped for r in results] == [False, False, True, False, False]
    assert [r.loss_scale for r in results] == [2.0**12, 2.0**12, 2.0**13, 2.0**12, 2.0**12]
    assert [math.isfinite(r.grad_norm) for r in results] == [True, True, False, True, True]
    assert all(math.isfinite(r.loss) for r in results)
    assert trainer.loss_scaler.scale == 2.0**13


def assert_unchanged(before, after):
    """Parameters, slices, moments, step counters, on every device."""
    assert len(before) == len(after) == 4
    for one, other in zip(before, after, strict=True):
        for name, tensor in one.parameters.items():
            assert torch.equal(tensor, other.parameters[name])
        for name, shard in one.shards.items():
            assert torch.equal(shard.tensor, other.shards[name].tensor)
        assert one.optimizer.state.keys() == other.optimizer.state.keys() != set()
        for name, entries in one.optimizer.state.items():
            for key, value in entries.items():
                assert torch.equal(value, other.optimizer.state[name][key]), (name, key)


def test_fit_adjusts_the_scale_after_every_step():
    """Data that the workers fetch themselves, and an iterable."""
    alone = [piper.Split({}, num_microbatches=4)]
    for source in (data, [data(step) for step in range(5)]):
        trainer = piper.compile(
            Model(),
            mse,
            alone,
            data(0),
            optimizer=adam,
            precision=PRECISION,
            backend="inprocess",
            verify_capture=False,
        )
        with trainer:
            results = trainer.fit(source, 5)
        assert [r.skipped for r in results] == [False, False, True, False, False]
        assert [r.loss_scale for r in results] == [2.0**12, 2.0**12, 2.0**13, 2.0**12, 2.0**12]

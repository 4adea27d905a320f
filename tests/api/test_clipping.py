"""Clipping by the norm of all gradients together, against ``torch.nn.utils.clip_grad_norm_`` in one
process.
"""

import copy
import math

import pytest
import torch
from tests.cases.equal import mse, randn
from tests.equality import eager
from torch import nn

import piper
from piper.errors import ConfigError
from piper.models import Transformer, TransformerConfig, transformer_loss
from piper.schedules import one_f_one_b
from piper.schedules.placements import chain

pytestmark = pytest.mark.timeout(120)

BATCH = randn(24, 3), randn(24, 2, seed=1)
STEPS = 3
NORMS = [2.0, math.inf]


class Model(nn.Module):
    """Two stages; the gradients of the second are *factor* times as large. ``shared`` is used in
    both; sizes that no group divides.
    """

    def __init__(self, factor: float = 100.0, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)
        self.shared = nn.Parameter(torch.randn(5)) if tied else None
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.factor = factor

    def forward(self, x):
        with piper.annotate("PP", 0):
            x = self.first(x).tanh()
            x = x if self.shared is None else x * self.shared
        with piper.annotate("PP", 1):
            x = x if self.shared is None else x + self.shared.tanh()
            y = self.second(x) * self.gain
            y.register_hook(lambda g: g * self.factor) if y.requires_grad else None
            return y


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def weighted(outputs, targets):
    """A sum over elements, and how many there are."""
    weights = (targets > 0).double()
    return (weights * (outputs - targets) ** 2).sum(), weights.sum()


def strategy(groups, microbatches=2, **replicate):
    replicated = [piper.Replicate({}, **replicate)] if len(groups[0]) > 1 else []
    split = piper.Split({}, num_microbatches=microbatches)
    return [*chain(groups), *replicated, split, *one_f_one_b(len(groups), microbatches)]


def plain(model, loss_fn, batch, count, max_norm, norm_type, optimizer=sgd):
    """Losses and norms of plain PyTorch's steps, and the parameters after the last."""
    model = copy.deepcopy(model).double()
    build = optimizer(list(model.parameters()))
    found = []

    class Clipping:
        def zero_grad(self, **options):
            build.zero_grad(**options)

        def step(self):
            found.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)))
            build.step()

    losses = [eager.one_step(model, loss_fn, batch, count, Clipping()).loss for _ in range(STEPS)]
    return losses, found, eager.state_of(model)


def assert_clipped_equal(
    model, loss_fn, how, batch=BATCH, *, max_norm=0.5, norm_type=2.0, count=None, active=True
):
    replicas = max((len(d.devices) for d in how if isinstance(d, piper.Place)), default=1)
    count = count or 2 * replicas
    losses, norms, state = plain(model, loss_fn, batch, count, max_norm, norm_type)
    assert all(norm > max_norm for norm in norms) == active
    options = {"optimizer": sgd, "max_grad_norm": max_norm, "norm_type": norm_type}
    trainer = piper.compile(
        copy.deepcopy(model).double(), loss_fn, how, batch, backend="inprocess", **options
    )
    with trainer:
        for loss, norm in zip(losses, norms, strict=True):
            result = trainer.step(*batch)
            assert result.loss == pytest.approx(loss, rel=1e-11)
            assert result.grad_norm == pytest.approx(norm, rel=1e-11)
        found = trainer.state_dict()
    for name, tensor in state.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-13)
    report = piper.check(model, loss_fn, how, batch, steps=2, **options)
    report.require()
    return report


LAYOUTS = {
    "one device": [[0]],
    "dp": [[0, 1]],
    "pp": [[0], [1]],
    "pp × dp": [[0, 1], [2, 3]],
}


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("name", ["pp", "pp × dp"])
def test_one_stage_with_gradients_a_hundred_times_as_large(norm_type, name):
    """Each stage must not clip by its own norm."""
    assert_clipped_equal(Model(), mse, strategy(LAYOUTS[name]), norm_type=norm_type)


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("flags", ["shard_optimizer", "shard_grads", "shard_params"])
@pytest.mark.parametrize("tied", [False, True])
def test_sharded(norm_type, flags, tied):
    """Every slice counts once, padding does not, and tied copies count once."""
    how = strategy(LAYOUTS["pp × dp"], bucket_size=1e-4, **{flags: True})
    assert_clipped_equal(Model(tied=tied), mse, how, norm_type=norm_type)


@pytest.mark.parametrize("flags", [{}, {"shard_optimizer": True}, {"shard_params": True}])
def test_three_replicas(flags):
    how = strategy([[0, 1, 2], [3, 4, 5]], **flags)
    assert_clipped_equal(Model(tied=True), mse, how)


@pytest.mark.parametrize("flags", ["shard_grads", "shard_params"])
def test_sharded_within_and_replicated_across(flags):
    how = [
        piper.Replicate({}, devices=[[0, 1], [2, 3]], **{flags: True}),
        piper.Split({}, num_microbatches=2),
    ]
    assert_clipped_equal(Model(), mse, how, count=8)


@pytest.mark.parametrize("norm_type", NORMS)
def test_one_device_and_one_stage(norm_type):
    whole = [piper.Split({}, num_microbatches=2)]
    assert_clipped_equal(Model(), mse, whole, norm_type=norm_type)
    replicated = [piper.Replicate({}, [0, 1]), *whole]
    assert_clipped_equal(Model(), mse, replicated, norm_type=norm_type, count=4)


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("flags", [{}, {"shard_grads": True}])
def test_weighted_losses_are_clipped_after_the_division(norm_type, flags):
    how = strategy(LAYOUTS["pp × dp"], **flags)
    assert_clipped_equal(Model(tied=True), weighted, how, norm_type=norm_type)


def test_small_gradients_are_left_alone():
    how = strategy(LAYOUTS["pp"])
    assert_clipped_equal(Model(1.0), mse, how, max_norm=1e3, active=False)


def test_a_copy_that_only_reads_is_clipped_alike_and_not_counted():
    """The second stage uses the first's weight without a gradient, on a copy of its own."""

    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 2)

        def forward(self, x):
            with piper.annotate("PP", 0):
                y = self.first(x).tanh()
            with piper.annotate("PP", 1):
                return self.second(y) + self.first.weight.detach().sum(1)

    assert_clipped_equal(Detached(), mse, strategy(LAYOUTS["pp"]), max_norm=0.1)
    sharded = strategy(LAYOUTS["pp × dp"], shard_optimizer=True)
    assert_clipped_equal(Detached(), mse, sharded, max_norm=0.1)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_transformer_under_1f1b(zero):
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=11,
        context=5,
        width=8,
        num_layers=2,
        num_heads=2,
        num_stages=2,
        tied_embedding=True,
    )
    ids = torch.randint(0, 11, (8, 5)), torch.randint(0, 11, (8, 5))
    how = piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 2, zero=zero)
    assert_clipped_equal(Transformer(config), transformer_loss, how, ids, max_norm=0.1)


def test_an_order_may_name_updates():
    order = piper.Order([[{"PASS": "UPDATE", "PP": 1}], [{"PASS": "UPDATE", "PP": 0}]])
    split = piper.Split({}, num_microbatches=2)
    for devices in ([0], [0, 1]):
        how = [piper.Place({}, devices=devices), piper.Replicate({}), split, order]
        how = how if len(devices) > 1 else [how[0], *how[2:]]
        assert_clipped_equal(Model(), mse, how)


@pytest.mark.ray
def test_processes_agree_with_threads():
    """The maximum over processes, and gradients that are kept in them."""
    found = []
    for backend in ("ray", "inprocess"):
        how = piper.strategies.pipeline("1f1b", LAYOUTS["pp"], 2)
        options = {"optimizer": sgd, "max_grad_norm": 0.5, "norm_type": math.inf}
        model = Model(tied=True).double()
        with piper.compile(model, mse, how, BATCH, backend=backend, **options) as trainer:
            trainer.step(*BATCH, update=False)
            norm = trainer.step(*BATCH).grad_norm
            found.append((norm, trainer.state_dict()))
    (norm, state), (expected, other) = found
    assert norm == pytest.approx(expected, rel=1e-12)
    for name, tensor in other.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-11, atol=1e-14)


def test_infinity_only_reports_the_norm():
    model = Model()
    _, norms, state = plain(model, mse, BATCH, 2, math.inf, 2.0)
    how = strategy(LAYOUTS["pp"])
    options = {"optimizer": sgd, "backend": "inprocess", "max_grad_norm": math.inf}
    with piper.compile(copy.deepcopy(model).double(), mse, how, BATCH, **options) as trainer:
        found = [trainer.step(*BATCH).grad_norm for _ in norms]
        assert found == pytest.approx(norms, rel=1e-11)
        assert trainer.evaluate(*BATCH).grad_norm is None
        for name, tensor in trainer.state_dict().items():
            torch.testing.assert_close(tensor, state[name], rtol=1e-10, atol=1e-13)


def test_without_it_there_is_no_norm():
    how, model = strategy(LAYOUTS["pp"]), Model().double()
    with piper.compile(model, mse, how, BATCH, optimizer=sgd, backend="inprocess") as trainer:
        assert trainer.step(*BATCH).grad_norm is None


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_gradients_that_are_not_finite(norm_type, bad):
    """As with ``error_if_nonfinite=False``: a norm that is none spoils every parameter of every
    stage, an infinite one stops all finite gradients.
    """
    inputs, targets = BATCH[0].clone(), BATCH[1]
    inputs[0, 0] = bad
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 2))
    piper.annotate_module(model[0], "PP", 0)
    piper.annotate_module(model[1], "PP", 1)
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(3))
    _, norms, state = plain(model, mse, (inputs, targets), 2, 1.0, norm_type)
    options = {"optimizer": sgd, "backend": "inprocess", "verify_capture": False}
    options |= {"max_grad_norm": 1.0, "norm_type": norm_type}
    how = strategy(LAYOUTS["pp"])
    with piper.compile(
        copy.deepcopy(model).double(), mse, how, (inputs, targets), **options
    ) as trainer:
        found = [trainer.step(inputs, targets).grad_norm for _ in norms]
        assert torch.equal(torch.tensor(found).isnan(), torch.tensor(norms).isnan())
        for name, tensor in trainer.state_dict().items():
            torch.testing.assert_close(tensor, state[name], equal_nan=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_grad_norm": 0.0}, "max_grad_norm is positive .*found 0.0"),
        ({"max_grad_norm": -1.0}, "found -1.0"),
        ({"max_grad_norm": math.nan}, "found nan"),
        ({"max_grad_norm": 1.0, "norm_type": 1.0}, "norm_type is 2.0 or math.inf, found 1.0"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(ConfigError, match=message):
        piper.compile(
            Model().double(), mse, [], BATCH, optimizer=sgd, backend="inprocess", **options
        )


def test_the_norm_is_wrong_in_the_report_if_it_is_wrong(monkeypatch):
    """The comparison looks at the norm itself, not only at what it does."""
    from piper.api import check as module

    class Off(module.Reference):
        def step(self, *given):
            found = super().step(*given)
            return type(found)(found.loss, found.gradients, found.grad_norm * 1.01)

    monkeypatch.setattr(module, "Reference", Off)
    options = {"optimizer": sgd, "max_grad_norm": 1e6}
    report = piper.check(Model(), mse, strategy(LAYOUTS["pp"]), BATCH, **options)
    assert not report.ok
    assert report.max_grad_error == pytest.approx(0.01, rel=0.1)

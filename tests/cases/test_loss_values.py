"""What a loss function may return, and what it is told when it returns something else."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from tests.cases.equal import randint, randn, sgd
from torch import nn
from torch.nn import functional

import piper
from piper.errors import CaptureError

pytestmark = pytest.mark.timeout(90)

X, Y = randn(8, 3), randn(8, 2, seed=1)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        with piper.annotate("PP", 0):
            h = self.first(x).tanh()
        with piper.annotate("PP", 1):
            return self.second(h)


def strategy(replicas=1, microbatches=2):
    groups = [[r + s * replicas for r in range(replicas)] for s in range(2)]
    return piper.strategies.pipeline("1f1b", groups, microbatches)


def summed(outputs, targets):
    return (outputs - targets).square().sum(), targets.numel()


def mean(outputs, targets):
    return functional.mse_loss(outputs, targets)


def trained(loss_fn, replicas=1):
    """Loss and parameters after one step on the whole batch under a strategy."""
    model = Two().double()
    setup = {"optimizer": sgd, "backend": "inprocess"}
    with piper.compile(model, loss_fn, strategy(replicas), (X, Y), **setup) as trainer:
        return trainer.step(X, Y).loss, trainer.state_dict()


def plainly_trained(loss_fn):
    """The same in plain PyTorch."""
    model = Two().double()
    optimizer = sgd(model.parameters())
    result = loss_fn(model(X), Y)
    loss = result if isinstance(result, torch.Tensor) else result[0] / result[1]
    loss.backward()
    optimizer.step()
    return float(loss.detach()), model.state_dict()


def assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    for name, tensor in expected[1].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-11, atol=1e-12)


class Pair(NamedTuple):
    total: torch.Tensor
    weight: int


PAIRS = {
    "tuple": summed,
    "list": lambda o, y: [*summed(o, y)],
    "named tuple": lambda o, y: Pair(*summed(o, y)),
    "number of another library": lambda o, y: (summed(o, y)[0], np.float64(y.shape[0])),
    "symbolic fraction": lambda o, y: (summed(o, y)[0], y.shape[0] / 2),
    "tensor": lambda o, y: (summed(o, y)[0], y.abs().sum()),
    "detached": lambda o, y: ((o - y).abs().sum(), torch.ones_like(o).sum().detach()),
    "whole numbers": lambda o, y: (summed(o, y)[0], torch.ones_like(y, dtype=torch.int64).sum()),
}


def in_full(names, quick):
    """Of *names*, all but the *quick* ones are for the full tests."""
    return [n if n in quick else pytest.param(n, marks=pytest.mark.full) for n in names]


@pytest.mark.parametrize("name", in_full(PAIRS, ["list", "symbolic fraction"]))
def test_a_sum_and_its_weight_in_any_form(name):
    assert_same(trained(PAIRS[name], 2), plainly_trained(PAIRS[name]))
    assert piper.check(Two(), PAIRS[name], strategy(), (X, Y), optimizer=sgd).ok


class HasLoss:
    def __init__(self, loss):
        self.loss = loss


REFUSED = {
    "auxiliary loss": (
        lambda o, y: (mean(o, y), o.square().mean()),
        ["weight depends on trained parameters", "(sum, weight)", "add it to the first"],
    ),
    "auxiliary loss in a list": (
        lambda o, y: [mean(o, y), o.square().mean()],
        ["weight depends on trained parameters", "add it to the first"],
    ),
    "logits": (lambda o, y: (mean(o, y), o), ["weight must be a scalar", "the loss alone"]),
    "details": (
        lambda o, y: (mean(o, y), {"mse": mean(o, y)}),
        ["weight must be a number or scalar tensor, found dict with 'mse'", "the loss alone"],
    ),
    "nothing second": (lambda o, y: (mean(o, y), None), ["weight must be a number", "NoneType"]),
    "three": (lambda o, y: (mean(o, y), 1.0, 2.0), ["pair (sum, weight), found tuple of 3"]),
    "three of a list": (lambda o, y: [mean(o, y)] * 3, ["found list of 3", "sum"]),
    "one": (lambda o, y: (mean(o, y),), ["found tuple of 1"]),
    "mapping": (lambda o, y: {"loss": mean(o, y)}, ["dict with 'loss'", "result['loss']"]),
    "attribute": (lambda o, y: HasLoss(mean(o, y)), ["found HasLoss", "return its .loss"]),
    "nothing": (lambda o, y: None, ["found NoneType", "return statement is missing"]),
    "number": (lambda o, y: 3.0, ["found float", "keep it a tensor"]),
    "sum that is a number": (lambda o, y: (3.0, 1.0), ["loss sum must be a tensor, found float"]),
    "one per row": (lambda o, y: (o - y).sum(1), ["the loss must be a scalar", ".mean()"]),
    "one element": (lambda o, y: mean(o, y)[None], ["the loss must be a scalar", "(1,)"]),
    "complex": (lambda o, y: mean(o, y) * 1j, ["floating-point", "complex128", ".real"]),
    "whole number": (lambda o, y: (o > y).sum(), ["floating-point", "int64"]),
    "no weight": (lambda o, y: (mean(o, y), 0), ["weight must be a finite number above 0"]),
    "negative": (lambda o, y: (mean(o, y), -1.0), ["weight must be a finite number above 0"]),
    "no number": (lambda o, y: (mean(o, y), float("nan")), ["above 0, found nan"]),
    "complex weight": (
        lambda o, y: (mean(o, y), y.sum() * 1j),
        ["weight must be real, found torch.complex128"],
    ),
    "text": (lambda o, y: (mean(o, y), "one"), ["weight must be a number", "found str"]),
    "several weights": (lambda o, y: (mean(o, y), y[0]), ["weight must be a scalar", "Sum it up"]),
    "negative in the data": (
        lambda o, y: (mean(o, y), -y.abs().sum()),
        ["weight of a microbatch's loss must be finite and not negative"],
    ),
    "infinite in the data": (
        lambda o, y: (mean(o, y), 1 / (y - y).sum()),
        ["weight of a microbatch's loss must be finite and not negative"],
    ),
    "no parameter": (lambda o, y: y.square().mean(), ["does not depend on any parameter"]),
    "detached": (lambda o, y: mean(o, y).detach(), ["does not depend on any parameter"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_loss_may_not_return_is_refused_with_the_remedy(name):
    loss_fn, words = REFUSED[name]
    setup = {"optimizer": sgd, "backend": "inprocess"}
    with pytest.raises(CaptureError) as error:
        piper.compile(Two().double(), loss_fn, strategy(), (X, Y), **setup).close()
    for word in words:
        assert word in str(error.value)


def test_a_weight_may_depend_on_outputs_through_which_no_gradient_goes():
    """Hard examples alone: how many there are depends on what the model says."""

    def hard(outputs, targets):
        errors = (outputs - targets).square().sum(1)
        chosen = errors.detach() > 0.5
        return (errors * chosen).sum(), chosen.sum()

    assert_same(trained(hard, 2), plainly_trained(hard))


def test_a_weighted_cross_entropy_as_a_sum_and_its_weight():
    """A mean over rows whose classes count differently divides by the weights of the classes that
    are there.
    """
    classes, labels = torch.tensor([1.0, 5.0], dtype=torch.float64), randint(2, 8)

    def pair(outputs, targets):
        total = functional.cross_entropy(outputs, targets, weight=classes, reduction="sum")
        return total, classes[targets].sum()

    batch = (X, labels)
    report = piper.check(Two(), pair, strategy(2), batch, optimizer=sgd)
    assert report.ok
    assert report.whole_batch_difference < 1e-12

"""Batches that are new in each step: said once, with the remedy, and bounded."""

import warnings

import pytest
import torch
from tests.cases.equal import mse, randn, sgd
from torch import nn

import piper
from piper.api import kinds, programs, trainer
from piper.errors import PiperWarning

STRATEGY = [piper.Place({}, [0]), piper.Split({}, num_microbatches=2)]


class Scaled(nn.Module):
    """Uses a number of the batch."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x, scale=1.0, name=None):
        return self.a(x) * scale


def batch(**others):
    return {"x": randn(4, 4), **others}, randn(4, 4, seed=1)


def said(batches, **options):
    """The warnings of training on *batches*, and what training came to."""
    torch.manual_seed(0)
    model = Scaled().double()
    with (
        warnings.catch_warnings(record=True) as found,
        piper.compile(
            model, mse, STRATEGY, batches[0], optimizer=sgd, backend="inprocess", **options
        ) as trained,
    ):
        warnings.simplefilter("always")
        losses = [trained.step(*each).loss for each in batches]
        texts = [str(w.message) for w in found if issubclass(w.category, PiperWarning)]
        return texts, losses, trained


def test_a_number_that_changes_is_named_with_the_remedy():
    (text,), *_ = said([batch(scale=i / 100) for i in range(1, 9)])
    assert "'inputs.scale' is a number" in text
    assert "0.05" in text
    assert "torch.tensor(value)" in text
    assert "batch_dims={'inputs.scale': None}" in text


def test_text_that_changes_is_named():
    (text,), *_ = said([batch(name=f"row {i}") for i in range(6)])
    assert "'inputs.name' is no tensor" in text


def test_lengths_that_change_are_named():
    batches = [({"x": randn(4, n, 4)}, randn(4, n, 4, seed=1)) for n in range(1, 7)]
    (text,), *_ = said(batches)
    assert "'inputs.x' has several shapes" in text
    assert "pad" in text


def test_a_few_kinds_and_tensors_that_change_are_not_spoken_of():
    assert said([batch(scale=float(i % kinds.FEW)) for i in range(8)])[0] == []
    wide = [batch(scale=torch.tensor(i / 100).double()) for i in range(8)]
    assert said(wide, batch_dims={"inputs.scale": None})[0] == []


def test_plans_that_are_kept_are_bounded_and_training_stays_equal(monkeypatch):
    monkeypatch.setattr(programs, "KEPT", 2)
    monkeypatch.setattr(trainer, "KEPT", 2)
    scales = [1.0, 2.0, 3.0, 1.0, 1.0, 2.0]
    _, losses, trained = said([batch(scale=s) for s in scales])
    assert len(trained._programs._made) == len(trained._programs._captured) == 2
    assert list(trained._backend._known) == list(trained._loaded)
    assert len(trained._loaded) == 2
    torch.manual_seed(0)
    model = Scaled().double()
    optimizer = sgd(model.parameters())
    for scale, found in zip(scales, losses, strict=True):
        inputs, targets = batch(scale=scale)
        loss = mse(model(**inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert found == pytest.approx(loss.item(), rel=1e-12)

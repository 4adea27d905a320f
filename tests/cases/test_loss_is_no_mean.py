"""A loss that is no mean over rows is pointed out before the first step, with the remedy; one that
is a mean never is.
"""

import random
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from tests.cases.equal import randint, randn, sgd
from torch import nn
from torch.nn import functional

import piper
from piper.errors import CheckError, PiperWarning

pytestmark = pytest.mark.timeout(90)

ROWS, IGNORED = 16, -100


class Model(nn.Module):
    """Two stages; *head* makes what the model returns of the last activations (float64 [B, 6])."""

    def __init__(self, head=lambda h: h) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(3, 6), nn.Linear(6, 6), head

    def forward(self, x, labels=None):
        with piper.annotate("PP", 0):
            h = self.first(x).tanh()
        with piper.annotate("PP", 1):
            h = self.second(h)
            return self.head(h) if labels is None else self.head(h, labels)


def warned(model, loss_fn, targets, inputs=None, microbatches=4, batch=None):
    """What compile says of the loss: one warning's text, or an empty one."""
    inputs = randn(ROWS, 3) if inputs is None else inputs
    strategy = [piper.Split({}, num_microbatches=microbatches)]
    setup = {"optimizer": sgd, "backend": "inprocess"}
    batch = batch or (inputs, targets)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        piper.compile(model.double(), loss_fn, strategy, batch, **setup).close()
    texts = [str(w.message) for w in found if issubclass(w.category, PiperWarning)]
    assert {w.filename for w in found if issubclass(w.category, PiperWarning)} <= {__file__}
    assert len(texts) <= 1
    return "".join(texts)


def tokens(outputs):
    """Two tokens of three classes per row."""
    return outputs.unflatten(1, (2, 3))


def uneven():
    """Labels of [B, 2], ever fewer of them valid."""
    labels = randint(3, ROWS, 2)
    labels[9:, 0] = IGNORED
    labels[13:] = IGNORED
    labels[15, 1] = 1
    return labels


def contrastive(outputs, _targets):
    """Other rows are the negatives."""
    a, b = functional.normalize(outputs[:, :3]), functional.normalize(outputs[:, 3:])
    return functional.cross_entropy(a @ b.T / 0.1, torch.arange(a.shape[0]))


Y, CLASSES, BITS = randn(ROWS, 6, seed=1), randint(6, ROWS), randint(2, ROWS, 6).double()
WEIGHTS = torch.tensor([1.0, 9.0, 2.0, 1.0, 1.0, 5.0])
SUM, COUNTS, TOGETHER = (
    "it is a sum over rows",
    "divides by something that differs",
    "rows together",
)
PAIR, WEIGHT = "both must be sums over rows", "the second depends on the model's outputs"

FOUND = {
    "sum": (lambda o, t: functional.mse_loss(o, t, reduction="sum"), Y, SUM),
    "sum of labels": (lambda o, t: functional.cross_entropy(o, t, reduction="sum"), CLASSES, SUM),
    "mean over tokens": (
        lambda o, t: functional.cross_entropy(tokens(o).flatten(0, 1), t.flatten()),
        uneven(),
        COUNTS,
    ),
    "mean over masked tokens": (
        lambda o, t: ((o - t[0]).square() * t[1]).sum() / t[1].sum(),
        (Y, BITS),
        COUNTS,
    ),
    "class weights": (
        lambda o, t: functional.cross_entropy(o, t, weight=WEIGHTS.double()),
        CLASSES,
        COUNTS,
    ),
    "class weights in float32": (
        lambda o, t: functional.cross_entropy(o.float(), t, weight=WEIGHTS),
        CLASSES,
        COUNTS,
    ),
    "root of a mean": (lambda o, t: functional.mse_loss(o, t).sqrt(), Y, "root of a mean"),
    "negatives": (contrastive, Y, TOGETHER),
    "maximum": (lambda o, t: (o - t).square().sum(1).max(), Y, TOGETHER),
    "norm of the batch": (lambda o, t: ((o - t) / t.square().sum().sqrt()).abs().mean(), Y, ""),
    "statistics": (lambda o, t: (o - o.mean(0)).square().mean() + 0 * t.sum(), Y, TOGETHER),
    "mean and count": (lambda o, t: (functional.mse_loss(o, t), t.shape[0]), Y, PAIR),
    "pair of a sum and one": (lambda o, t: ((o - t).square().sum(), 1.0), Y, PAIR),
    "detached figure": (
        lambda o, t: (functional.mse_loss(o, t), o.detach().square().mean()),
        Y,
        WEIGHT,
    ),
    "accuracy": (
        lambda o, t: (functional.cross_entropy(o, t), (o.argmax(1) == t).double().mean() + 0.1),
        CLASSES,
        WEIGHT,
    ),
}
QUICK = {"sum", "mean over tokens", "negatives", "detached figure"}


def in_full(names, quick):
    return [n if n in quick else pytest.param(n, marks=pytest.mark.full) for n in names]


@pytest.mark.parametrize("name", in_full(FOUND, QUICK))
def test_what_microbatches_change_is_said_with_the_remedy(name):
    loss_fn, targets, words = FOUND[name]
    text = warned(Model(), loss_fn, targets)
    assert words in text
    assert "(sum, weight)" in text


@pytest.mark.parametrize("name", in_full(FOUND, {"sum"}))
def test_check_fails_by_a_loss_that_is_no_mean(name):
    loss_fn, targets, words = FOUND[name]
    strategy = piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 2)
    report = piper.check(Model(), loss_fn, strategy, (randn(ROWS, 3), targets), optimizer=sgd)
    assert not report.ok
    assert max(report.max_loss_error, report.max_grad_error, report.max_param_error) < 1e-10
    assert words in str(report.loss_finding)
    with pytest.raises(CheckError, match="something else than the whole batch in one piece"):
        report.require()
    assert "whole batch" in str(report)


def pair_of(reduction):
    def loss_fn(outputs, targets):
        rows, labels = tokens(outputs).flatten(0, 1), targets.flatten()
        total = functional.cross_entropy(rows, labels, reduction=reduction)
        return total, (labels != IGNORED).sum()

    return loss_fn


def hard(outputs, targets):
    """Only errors above a bound: how many there are depends on the outputs."""
    errors = (outputs - targets).square().sum(1)
    chosen = errors.detach() > 3
    return (errors * chosen).sum(), chosen.sum()


class Counting(nn.Module):
    """Remembers, as loss modules with moving averages do."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, outputs, targets):
        self.calls += 1
        return functional.mse_loss(outputs, targets)


def noisy(outputs, targets):
    return functional.mse_loss(outputs + 0.1 * torch.randn_like(outputs), targets)


MEANS = {
    "mean": (functional.mse_loss, Y),
    "labels": (functional.cross_entropy, CLASSES),
    "smoothed": (lambda o, t: functional.cross_entropy(o, t, label_smoothing=0.1), CLASSES),
    "even tokens": (
        lambda o, t: functional.cross_entropy(tokens(o).flatten(0, 1), t.flatten()),
        randint(3, ROWS, 2),
    ),
    "sum and count": (pair_of("sum"), uneven()),
    "hard examples": (hard, Y),
    "divergence": (
        lambda o, t: functional.kl_div(o.log_softmax(1), t.softmax(1), reduction="batchmean"),
        Y,
    ),
    "signed": (lambda o, t: (o * t).mean(), Y),
    "a mean and one": (lambda o, t: (functional.mse_loss(o, t), 1), Y),
    "a module": (nn.SmoothL1Loss(), Y),
    "float32 inside": (lambda o, t: functional.mse_loss(o.float(), t.float()), Y),
    "noise": (noisy, Y),
    "remembers": (Counting(), Y),
    "two targets": (lambda o, t: functional.mse_loss(o, t["a"]) + (o * t["b"]).mean(), None),
}


@pytest.mark.parametrize("name", in_full(MEANS, {"mean", "sum and count"}))
def test_a_mean_is_never_pointed_out(name):
    loss_fn, targets = MEANS[name]
    targets = {"a": Y, "b": Y.flip(0)} if targets is None else targets
    assert warned(Model(), loss_fn, targets) == ""


@dataclass
class Hidden:
    """A container that torch does not know."""

    logits: torch.Tensor


def mse(outputs, targets):
    return functional.mse_loss(outputs, targets)


HEADS = {
    "probabilities": (torch.sigmoid, functional.binary_cross_entropy, BITS),
    "flattened tokens": (
        lambda h: tokens(h).flatten(0, 1),
        lambda o, t: functional.cross_entropy(o, t.flatten()),
        randint(3, ROWS, 2),
    ),
    "tokens first": (
        lambda h: tokens(h).transpose(0, 1),
        lambda o, t: functional.cross_entropy(o.flatten(0, 1), t.T.flatten()),
        randint(3, ROWS, 2),
    ),
    "tokens first, flattened": (
        lambda h: tokens(h).transpose(0, 1).flatten(0, 1),
        lambda o, t: functional.cross_entropy(o, t.T.flatten()),
        randint(3, ROWS, 2),
    ),
    "one number per row": (lambda h: h.sum(1), lambda o, t: mse(o, t[:, 0]), Y),
    "auxiliary number": (
        lambda h: (h, h.softmax(1).mean(0).square().sum()),
        lambda o, t: mse(o[0], t) + o[1],
        Y,
    ),
    "weights": (
        lambda h: {"h": h, "bias": torch.arange(6.0)},
        lambda o, t: mse(o["h"] + o["bias"], t),
        Y,
    ),
    "as many as rows": (
        lambda h: (h, torch.arange(4.0)),
        lambda o, t: mse(o[0], t) + o[1].sum() * o[0].mean(),
        Y,
    ),
    "choices": (
        lambda h: (h, h.argmax(1)),
        lambda o, t: mse(o[0], t) + functional.cross_entropy(o[0], o[1]),
        Y,
    ),
    "in an object": (lambda h: SimpleNamespace(y=h), lambda o, t: mse(o.y, t), Y),
    "in a dataclass": (Hidden, lambda o, t: mse(o.logits, t), Y),
}


@pytest.mark.parametrize("name", in_full(HEADS, {"tokens first, flattened", "as many as rows"}))
def test_outputs_of_every_kind_give_no_false_alarm(name):
    head, loss_fn, targets = HEADS[name]
    assert warned(Model(head), loss_fn, targets) == ""


@pytest.mark.parametrize("name", in_full(HEADS, {"tokens first"}))
def test_and_hide_no_sum(name):
    head, loss_fn, targets = HEADS[name]

    def twice(outputs, targets):
        return loss_fn(outputs, targets) * targets.shape[0]

    assert SUM in warned(Model(head), twice, targets)


def test_weights_that_the_model_passes_on_are_those_of_the_batch():
    """A mean over what a mask among the inputs leaves."""

    class Masked(Model):
        def forward(self, x, mask):
            return super().forward(x), mask

    mask = (torch.arange(ROWS) % 7 > 2).double()

    def loss_fn(outputs, targets):
        y, m = outputs
        return ((y - targets).square().mean(1) * m).sum() / m.sum()

    assert COUNTS in warned(Masked(), loss_fn, Y, (randn(ROWS, 3), mask))


def own(reduction):
    def head(h, labels):
        logits = tokens(h)
        flat = logits.flatten(0, 1), labels.flatten()
        return {"loss": functional.cross_entropy(*flat, reduction=reduction), "logits": logits}

    return head


@pytest.mark.parametrize(
    ("reduction", "labels", "words"),
    [
        ("mean", uneven(), "ignored"),
        ("sum", randint(3, ROWS, 2), SUM),
        ("mean", randint(3, ROWS, 2), ""),
    ],
)
def test_a_loss_that_the_model_computes_itself(reduction, labels, words):
    batch = {"x": randn(ROWS, 3), "labels": labels}
    text = warned(Model(own(reduction)), None, None, batch=batch)
    assert words in text
    assert ("loss_fn=None" in text) == bool(words)


@pytest.mark.parametrize("microbatches", [1, 16])
def test_one_microbatch_is_the_batch_and_one_row_is_a_microbatch(microbatches):
    text = warned(Model(), FOUND["sum"][0], Y, microbatches=microbatches)
    assert (SUM in text) == (microbatches > 1)
    assert warned(Model(), mse, Y, microbatches=microbatches) == ""


def test_nothing_of_the_model_or_of_random_numbers_is_changed():
    class Steps(Model):
        def __init__(self) -> None:
            super().__init__(lambda h: tokens(h).transpose(0, 1))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    model = Steps()
    before = torch.get_rng_state(), random.getstate()
    loss_fn = HEADS["tokens first"][1]
    assert SUM in warned(model, lambda o, t: loss_fn(o, t) * t.shape[0], randint(3, ROWS, 2))
    assert float(model.calls) == 0
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert model.training


class Normed(nn.Module):
    def __init__(self, norm) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(3, 6, bias=False), norm, nn.Linear(6, 6)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


@pytest.mark.parametrize(
    ("model", "loss_fn", "words"),
    [
        (Normed(nn.BatchNorm1d(6)), mse, "depend on the other rows: batch statistics of 'norm'"),
        (Normed(nn.Dropout(0.5)), mse, "random numbers (dropout) are drawn by microbatch"),
        (Model(HEADS["auxiliary number"][0]), HEADS["auxiliary number"][1], "of a microbatch"),
        (Normed(nn.LayerNorm(6)), mse, ""),
    ],
)
def test_what_microbatches_change_in_a_model_is_a_note_and_no_failure(model, loss_fn, words):
    """The report says how far the whole batch in one piece is, and why."""
    split = [piper.Split({}, num_microbatches=4)]
    report = piper.check(model, loss_fn, split, (randn(ROWS, 3), Y), optimizer=sgd, steps=1)
    report.require()
    assert report.loss_finding is None
    text = " ".join(str(report).split())
    assert words in text
    assert ("note" in text) == bool(words)
    whole = model.double().train()
    outputs = whole(randn(ROWS, 3))
    if not words:
        assert report.whole_batch.loss < 1e-12
        assert report.whole_batch.gradients.worst < 1e-10
    elif "dropout" not in words:
        loss = loss_fn(outputs, Y)
        assert report.whole_batch.loss > 1e-8
        assert report.whole_batch.gradients.worst > 1e-8
        assert float(loss.detach()) > 0

"""Batches that are one mapping, and models that compute their own loss, as Hugging Face's are."""

from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from tests.cases.equal import randint, randn, sgd
from torch import nn
from torch.nn import functional

import piper
from piper.errors import BatchError, CaptureError, PiperError

pytestmark = pytest.mark.timeout(90)

STRATEGY = piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 2)
INPROCESS = {"optimizer": sgd, "backend": "inprocess"}


class Classifier(nn.Module):
    """Computes its own loss if it is given labels; *form* says in what it returns it."""

    def __init__(self, form=lambda loss, logits: {"loss": loss, "logits": logits}) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.form = form

    def forward(self, x, labels=None):
        with piper.annotate("PP", 0):
            h = self.first(x).tanh()
        with piper.annotate("PP", 1):
            logits = self.second(h)
            loss = None if labels is None else functional.cross_entropy(logits, labels)
            return self.form(loss, logits)


class Dots(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Classifier(lambda loss, logits: SimpleNamespace(loss=loss, logits=logits))

    def forward(self, **arguments):
        return self.inner(**arguments)


def batches(count=3):
    return [{"x": randn(8, 3, seed=i), "labels": randint(2, 8, seed=i)} for i in range(count)]


def plainly_trained(data, model=None):
    """Losses and parameters of plain PyTorch on whole batches, and the loss of the first batch at
    the end.
    """
    model = model or Classifier(lambda loss, logits: loss).double()
    optimizer, losses = sgd(model.parameters()), []
    for batch in data:
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    with torch.no_grad():
        return losses, model.state_dict(), float(model.eval()(**data[0]))


def assert_same(results, state, evaluated, expected, prefix=""):
    losses, parameters, held_out = expected
    assert [r.loss for r in results] == pytest.approx(losses, rel=1e-12)
    assert evaluated.loss == pytest.approx(held_out, rel=1e-12)
    for name, tensor in parameters.items():
        torch.testing.assert_close(state[prefix + name], tensor, rtol=1e-11, atol=1e-12)


@dataclass
class Fields:
    x: torch.Tensor
    labels: torch.Tensor


class Rows:
    """Data that workers call."""

    def __call__(self, step):
        return batches(step + 1)[step]


def full(*values):
    """Values of a parameter for the full tests."""
    return [pytest.param(value, marks=pytest.mark.full) for value in values]


@pytest.mark.parametrize("wrap", [UserDict, *full(dict, lambda batch: Fields(**batch))])
def test_a_batch_of_one_mapping_trains_the_models_own_loss(wrap):
    data, model = [wrap(batch) for batch in batches()], Classifier().double()
    with piper.compile(model, None, STRATEGY, data[0], **INPROCESS) as trainer:
        results = [trainer.step(data[0]), *trainer.fit(data[1:], steps=2)]
        evaluated = trainer.evaluate(data[0])
        assert_same(results, trainer.state_dict(), evaluated, plainly_trained(batches()))


def test_a_loader_and_a_function_of_the_step_may_give_mappings():
    rows = [{"x": x, "labels": y} for b in batches() for x, y in zip(*b.values(), strict=True)]
    expected = plainly_trained(batches())
    loader = torch.utils.data.DataLoader(rows, batch_size=8)
    for data in (loader, Rows()):
        model = Dots().double()
        with piper.compile(model, None, STRATEGY, batches()[0], **INPROCESS) as trainer:
            results = trainer.fit(data, steps=3)
            state = trainer.state_dict()
            assert_same(results, state, trainer.evaluate(batches()[0]), expected, "inner.")


@pytest.mark.full
def test_gradients_of_mappings_are_kept_and_profiled_too():
    data = batches(2)
    with piper.compile(Classifier().double(), None, STRATEGY, data[0], **INPROCESS) as trainer:
        trainer.step(data[0], update=False)
        trainer.step(data[1])
        assert trainer.profile(data[0], steps=1).num_devices == 4
        assert trainer.steps_done == 2


@pytest.mark.full
def test_check_takes_a_mapping_and_a_function_of_the_step():
    for batch in (batches()[0], Rows()):
        report = piper.check(Classifier(), None, STRATEGY, batch, optimizer=sgd)
        assert report.ok, str(report)
        assert report.whole_batch_difference < 1e-12
    assert piper.capture(Classifier(), None, batches()[0]).batch


def test_with_a_loss_function_the_labels_are_its_targets():
    def loss_fn(outputs, labels):
        return functional.cross_entropy(outputs["logits"], labels)

    data = batches()
    with piper.compile(Classifier().double(), loss_fn, STRATEGY, data[0], **INPROCESS) as trainer:
        results = trainer.fit(data, steps=3)
        evaluated = trainer.evaluate(data[0])
        assert_same(results, trainer.state_dict(), evaluated, plainly_trained(data))


FORMS = {
    "loss": lambda loss, logits: loss,
    "loss first": lambda loss, logits: (loss, logits),
    "loss last": lambda loss, logits: (logits, loss),
    "pair": lambda loss, logits: (loss * logits.shape[0], logits.shape[0] * torch.ones(())),
    "attribute": lambda loss, logits: SimpleNamespace(loss=loss),
}


@pytest.mark.parametrize(
    "name", ["attribute", *full(*(name for name in FORMS if name != "attribute"))]
)
def test_a_model_returns_its_loss_in_many_forms(name):
    data, model = batches(1), Classifier(FORMS[name]).double()
    with piper.compile(model, None, STRATEGY, data[0], **INPROCESS) as trainer:
        result = trainer.step(data[0])
        assert_same(
            [result], trainer.state_dict(), trainer.evaluate(data[0]), plainly_trained(data)
        )


class Three(NamedTuple):
    x: torch.Tensor
    labels: torch.Tensor
    more: torch.Tensor


X, Y = batches(1)[0].values()
LOGITS = Classifier(lambda loss, logits: logits)
WRONG = {
    "nothing computes a loss": (Classifier(), None, {"x": X}, ["dict with loss None", "'labels'"]),
    "no loss": (LOGITS, None, {"x": X}, ["Tensor with no loss", "loss_fn(outputs, targets)"]),
    "two losses": (
        Classifier(lambda loss, logits: (loss, loss, logits)),
        None,
        {"x": X, "labels": Y},
        ["tuple of 3 with 2 scalar tensors"],
    ),
    "an auxiliary loss": (
        Classifier(lambda loss, logits: (loss, loss)),
        None,
        {"x": X, "labels": Y},
        ["weight depends on trained parameters"],
    ),
    "targets that nothing reads": (Classifier(), None, (X, Y), ["nothing would read", "None)"]),
    "no labels": (LOGITS, functional.cross_entropy, {"x": X, "y": Y}, ["'labels'", "'x', 'y'"]),
    "an empty one": (LOGITS, functional.cross_entropy, {}, ["'labels'", "nothing"]),
    "a tensor": (LOGITS, functional.cross_entropy, X, ["pair (inputs, targets) or one mapping"]),
    "three": (LOGITS, functional.cross_entropy, (X, Y, X), ["mapping", "found tuple of 3"]),
    "a named tuple": (LOGITS, functional.cross_entropy, Three(X, Y, X), ["Three of 3", "_asdict"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_forms_are_refused_with_those_there_are(name):
    model, loss_fn, batch, words = WRONG[name]
    calls = (
        lambda: piper.compile(model.double(), loss_fn, STRATEGY, batch, **INPROCESS),
        lambda: piper.capture(model, loss_fn, batch),
    )
    for call in calls:
        with pytest.raises((BatchError, CaptureError)) as error:
            call()
        for word in words:
            assert word in str(error.value)


def test_a_later_batch_of_another_form_is_answered_and_training_goes_on():
    first = batches(1)[0]
    with piper.compile(Classifier().double(), None, STRATEGY, first, **INPROCESS) as trainer:
        for wrong in (X, [first], (X, Y)):
            with pytest.raises(PiperError):
                trainer.step(wrong)
        with pytest.raises(BatchError, match="nothing would read"):
            trainer.step(X, Y)
        assert trainer.step(first).loss == pytest.approx(plainly_trained([first])[0][0])


@pytest.mark.full
@pytest.mark.timeout(400)
def test_what_hugging_faces_collators_give():
    """A causal model, BatchEncodings with padding and labels of -100, which are as many in each
    microbatch.
    """
    from transformers import BatchEncoding, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).double()
    for i, layer in enumerate(model.model.layers):
        piper.annotate_module(layer, "PP", i)

    def encoding(seed, length):
        ids = randint(32, 8, length, seed=seed)
        mask = torch.ones_like(ids)
        mask[:, -1] = 0
        labels = ids.where(mask.bool(), torch.full_like(ids, -100))
        return BatchEncoding({"input_ids": ids, "attention_mask": mask, "labels": labels})

    data = [encoding(0, 6), encoding(1, 6), encoding(2, 6)]
    assert piper.check(model, None, STRATEGY, data[0], optimizer=sgd).ok
    with piper.compile(model, None, STRATEGY, data[0], **INPROCESS) as trainer:
        results = trainer.fit(data, steps=3)
        evaluated, state = trainer.evaluate(data[0]), trainer.state_dict()
    optimizer = sgd(model.parameters())
    for batch, result in zip(data, results, strict=True):
        loss = model(**batch).loss
        assert result.loss == pytest.approx(float(loss.detach()), rel=1e-11)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert evaluated.loss == pytest.approx(float(model.eval()(**data[0]).loss.detach()), rel=1e-10)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-10)

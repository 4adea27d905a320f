"""What cannot run in plain PyTorch is answered by PyTorch's own error and the user's line."""

import warnings

import pytest
import torch
from tests.cases.equal import randn
from torch import nn

import piper
from piper.api.trial import warn_of_evaluation_mode
from piper.api.trial.rows import likely_rows
from piper.errors import CaptureError, ConfigError, PiperWarning

F = nn.functional
STRATEGY = piper.strategies.pipeline("1f1b", [[0], [1]], 2)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def first(self, x):
        return self.a(x)

    def last(self, h):
        return self.b(h)

    def forward(self, x):
        with piper.annotate("PP", 0):
            h = self.first(x)
        with piper.annotate("PP", 1):
            return self.last(h)


def refused(model, loss_fn=F.mse_loss, x=None, y=None, error=CaptureError, **options):
    x = randn(8, 8).float() if x is None else x
    y = randn(8, 8, seed=1).float() if y is None else y
    with pytest.raises(error) as raised:
        piper.compile(
            model,
            loss_fn,
            STRATEGY,
            (x, y),
            optimizer=None,
            **{"backend": "inprocess", **options},
        )
    return str(raised.value)


class Positions(Two):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 8)

    def first(self, x):
        return self.a(x) + self.table(torch.arange(x.shape[1]))  # too long


def test_a_sequence_longer_than_the_table_names_the_line():
    x = randn(8, 6, 8).float()
    text = refused(Positions(), x=x, y=x)
    assert "# too long" in text
    assert __file__ in text
    assert "in the model" in text
    assert "IndexError: index out of range" in text


def test_a_wrong_type_of_targets_is_the_losss_mistake():
    text = refused(Two(), F.cross_entropy, y=torch.zeros(8, dtype=torch.int32))
    assert "in the loss" in text
    assert "got Int" in text
    assert "targets: int32[4]" in text
    assert "piper body" not in text


def test_a_wrong_layout_of_targets_is_the_losss_mistake():
    text = refused(Two(), F.cross_entropy, y=torch.zeros(8, 3, dtype=torch.int64))
    assert "in the loss" in text
    assert "outputs: float32[4, 8]; targets: int64[4, 3]" in text


def test_the_class_of_a_loss_is_no_loss():
    text = refused(Two(), nn.MSELoss, error=ConfigError)
    assert "loss_fn" in text
    assert "MSELoss()" in text


class Mistaken(Two):
    def last(self, h):
        return self.b(h.flatten())  # wrong shape


@pytest.mark.parametrize("verify_capture", [True, False])
def test_a_mistake_in_the_model_is_said_whether_or_not_the_capture_is_verified(verify_capture):
    text = refused(Mistaken(), verify_capture=verify_capture)
    assert "# wrong shape" in text
    assert "in plain PyTorch too" in text


def test_a_loss_that_is_no_number_in_pytorch_either():
    labels = torch.zeros(8, dtype=torch.int64)
    labels[:4] = -100  # all of the first microbatch
    text = refused(Two(), F.cross_entropy, y=labels)
    assert "nan in plain PyTorch as well" in text
    assert "(sum, weight)" in text


def test_a_microbatch_without_weight_is_passed_over():
    def loss_fn(outputs, labels):
        total = F.cross_entropy(outputs, labels, ignore_index=-100, reduction="sum")
        return total, (labels != -100).sum()

    labels = torch.zeros(8, dtype=torch.int64)
    labels[:4] = -100
    batch = randn(8, 8).float(), labels
    with piper.compile(
        Two(), loss_fn, STRATEGY, batch, optimizer=None, backend="inprocess"
    ) as trainer:
        assert trainer.evaluate(*batch).loss > 0


class Dropping(Two):
    def __init__(self):
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(8)

    def last(self, h):
        return self.norm(self.b(self.drop(h)))


def opened(model, batch=None, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)):
    batch = batch or (randn(8, 8).float(), randn(8, 8, seed=1).float())
    return piper.compile(
        model, F.mse_loss, STRATEGY, batch, optimizer=optimizer, backend="inprocess"
    )


def test_a_model_in_evaluation_mode_is_warned_of_once():
    with pytest.warns(PiperWarning, match="evaluation mode") as found, opened(Dropping().eval()):
        pass
    assert len(found) == 1
    assert "drop (Dropout), norm (BatchNorm1d)" in str(found[0].message)


def frozen_part(model):
    model.a.requires_grad_(requires_grad=False)
    model.a = nn.Sequential(model.a, nn.Dropout(0.5)).eval()
    return model


def frozen_statistics(model):
    model.norm.eval()
    return model


@pytest.mark.parametrize(
    "model",
    [frozen_part(Two()), frozen_statistics(Dropping()), Two().eval(), Dropping()],
    ids=["a frozen part", "statistics alone", "nothing to switch off", "training mode"],
)
def test_what_is_in_evaluation_mode_on_purpose_is_not_warned_of(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error", PiperWarning)
        warn_of_evaluation_mode(model)


@pytest.mark.full
def test_a_later_batch_that_fails_in_plain_pytorch_names_the_line():
    short = randn(8, 3, 8).float(), randn(8, 3, 8).float()
    with opened(Positions(), short) as trainer:
        trainer.step(*short)
        with pytest.raises(CaptureError, match=r"# too long.*IndexError"):
            trainer.step(randn(8, 6, 8).float(), randn(8, 6, 8).float())
        trainer.step(*short)


@pytest.mark.parametrize(
    ("strategy", "rows"),
    [
        ([], 12),
        ([piper.Split({}, num_microbatches=3)], 4),
        (piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 3), 2),
        ([piper.Replicate({}, devices=[[0, 1], [2, 3]])], 3),
        ([piper.Split({}, num_microbatches=24)], 1),
    ],
)
def test_rows_of_a_microbatch_are_read_off_the_strategy(strategy, rows):
    assert likely_rows(strategy, 12) == rows

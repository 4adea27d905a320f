"""Parameters that training comes to use, or uses elsewhere, in a later step."""

import copy

import pytest
import torch
from tests.cases.equal import adamw, mse, randn
from torch import nn

import piper


class Branching(nn.Module):
    """The second stage uses a layer, a buffer, and the first stage's layer, where the batch says so."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, x, branch=False, tied=False):
        with piper.annotate("PP", 0):
            h = self.a(x).tanh()
        with piper.annotate("PP", 1):
            out = self.b(h)
            out = out + self.scale * self.c(h) if branch else out
            return out + self.a(h) if tied else out


def pipeline(zero=None):
    if zero is None:
        return piper.strategies.pipeline("1f1b", [[0], [1]], 2)
    return piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 2, zero=zero)


def batches(*options):
    return [
        ({"x": randn(8, 3, seed=i), **given}, randn(8, 3, seed=50 + i))
        for i, given in enumerate(options)
    ]


def plain(model, data, pieces, make=adamw):
    """Losses and state of plain PyTorch; *model* is trained."""
    optimizer = make(model.parameters())
    losses = []
    for inputs, targets in data:
        optimizer.zero_grad()
        options = {k: v for k, v in inputs.items() if k != "x"}
        rows = zip(inputs["x"].chunk(pieces), targets.chunk(pieces), strict=True)
        parts = [mse(model(x, **options), y) / pieces for x, y in rows]
        sum(parts).backward()
        optimizer.step()
        losses.append(sum(part.item() for part in parts))
    return losses, model.state_dict()


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)


def model():
    torch.manual_seed(0)
    return Branching().double()


NOT, BRANCH, TIED = {}, {"branch": True}, {"tied": True}
ORDERS = {
    "used from the third step on": (NOT, NOT, BRANCH, BRANCH),
    "used again and again": (NOT, BRANCH, NOT, BRANCH),
    "another stage uses it too": (NOT, TIED, NOT, TIED, BRANCH, NOT),
}


QUICK = {
    (None, "another stage uses it too"),
    (2, "used again and again"),
    (3, "used from the third step on"),
}


@pytest.mark.parametrize(
    ("zero", "order"),
    [
        pytest.param(z, ORDERS[o], id=f"{z}-{o}", marks=[] if (z, o) in QUICK else pytest.mark.full)
        for z in (None, 0, 1, 2, 3)
        for o in ORDERS
    ],
)
def test_a_parameter_first_used_in_a_later_step(zero, order):
    start, data = model(), batches(*order)
    losses, wanted = plain(copy.deepcopy(start), data, 2 if zero is None else 4)
    with piper.compile(
        start, mse, pipeline(zero), data[0], optimizer=adamw, backend="inprocess"
    ) as trainer:
        assert [trainer.step(*each).loss for each in data] == pytest.approx(losses, rel=1e-10)
        assert_same(trainer.state_dict(), wanted)


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.full), 3])
def test_its_state_goes_through_checkpoints(zero, tmp_path):
    start, data = model(), batches(NOT, BRANCH, NOT, BRANCH)
    _, wanted = plain(copy.deepcopy(start), data, 4)
    options = {"optimizer": adamw, "backend": "inprocess"}
    with piper.compile(start, mse, pipeline(zero), data[0], **options) as trainer:
        for each in data[:2]:
            trainer.step(*each)
        trainer.save(tmp_path / "saved")
    with piper.compile(model(), mse, pipeline(zero), data[0], **options) as trainer:
        trainer.load(tmp_path / "saved")
        for each in data[2:]:
            trainer.step(*each)
        assert_same(trainer.state_dict(), wanted)


class Counting(nn.Module):
    """Writes a buffer in some steps only."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x, branch=False):
        with piper.annotate("PP", 0):
            h = self.a(x).tanh()
        with piper.annotate("PP", 1):
            if branch:
                self.seen.add_(1.0)
                h = h + self.seen
            return self.b(h)


def test_a_buffer_that_is_first_written_in_a_later_step():
    torch.manual_seed(0)
    start, data = Counting().double(), batches(NOT, BRANCH, NOT, BRANCH)
    losses, wanted = plain(copy.deepcopy(start), data, 2)
    with piper.compile(
        start, mse, pipeline(), data[0], optimizer=adamw, backend="inprocess"
    ) as trainer:
        assert [trainer.step(*each).loss for each in data] == pytest.approx(losses, rel=1e-10)
        assert trainer.evaluate(*data[1]).loss == trainer.evaluate(*data[1]).loss
        assert_same(trainer.state_dict(), wanted)


def test_evaluation_between_steps_may_use_what_training_does_not():
    start, data = model(), batches(NOT, NOT, NOT)
    _, wanted = plain(copy.deepcopy(start), data, 4)
    with piper.compile(
        start, mse, pipeline(3), data[0], optimizer=adamw, backend="inprocess"
    ) as trainer:
        for each in data:
            trainer.step(*each)
            state = trainer.state_dict()
            inputs, targets = batches(BRANCH)[0]
            reference = Branching().double()
            reference.load_state_dict(state)
            expected = mse(reference(**inputs), targets).item()
            assert trainer.evaluate(inputs, targets).loss == pytest.approx(expected, rel=1e-10)
        assert_same(trainer.state_dict(), wanted)


@pytest.mark.full
def test_under_a_precision_the_first_steps_leave_no_trace():
    """Against a trainer whose plans are loaded in another order."""
    data = batches(NOT, BRANCH, TIED, NOT)
    data = [({**i, "x": i["x"].float()}, t.float()) for i, t in data]
    found = []
    for first in (0, 1, 2):
        torch.manual_seed(0)
        with piper.compile(
            Branching(),
            mse,
            pipeline(2),
            data[first],
            optimizer=adamw,
            backend="inprocess",
            precision="bf16",
        ) as trainer:
            for each in data:
                trainer.step(*each)
            found.append(trainer.state_dict())
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


@pytest.mark.ray
def test_state_moves_between_processes_too():
    start, data = model(), batches(NOT, TIED, NOT, BRANCH)
    losses, wanted = plain(copy.deepcopy(start), data, 2)
    with piper.compile(start, mse, pipeline(), data[0], optimizer=adamw, backend="ray") as trainer:
        assert [trainer.step(*each).loss for each in data] == pytest.approx(losses, rel=1e-10)
        assert_same(trainer.state_dict(), wanted)


def test_gradients_that_are_kept_stay_when_state_moves():
    start, data = model(), batches(NOT, BRANCH)
    reference = copy.deepcopy(start)
    optimizer = adamw(reference.parameters())
    for inputs, targets in data:
        mse(reference(**inputs), targets).backward()
    optimizer.step()
    with piper.compile(
        start, mse, pipeline(), data[0], optimizer=adamw, backend="inprocess"
    ) as trainer:
        trainer.step(*data[0], update=False)
        trainer.step(*data[1])
        assert_same(trainer.state_dict(), reference.state_dict())


def test_an_optimizer_that_needs_whole_matrices_sees_what_is_cut_later():
    """Nothing that the first plan cuts into slices is a matrix of Muon's."""

    def make():
        return {"c.weight": lambda p: torch.optim.Muon(p, lr=0.1), "*": adamw}

    data = batches(NOT, BRANCH)
    with piper.compile(
        model(), mse, pipeline(2), data[0], optimizer=make(), backend="inprocess"
    ) as trainer:
        trainer.step(*data[0])
        with pytest.raises(
            piper.errors.ConfigError, match=r"Muon .*needs whole parameters.*c\.weight"
        ):
            trainer.step(*data[1])
        trainer.step(*data[0])

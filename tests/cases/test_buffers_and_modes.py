"""Buffers that the forward writes in every way, and the modes and threads of the caller."""

import threading

import pytest
import torch
from tests.cases.equal import assert_equal, mse, randn, sgd
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

import piper
from piper.errors import CaptureError, DirectiveError

PIPELINE = piper.strategies.pipeline("1f1b", [[0], [1]], 4)
X, Y = randn(8, 4), randn(8, 4, seed=1)


def replicas(zero: int = 0, **options):
    return piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 2, zero=zero, **options)


class Two(nn.Module):
    """Two stages; ``first`` and ``last`` may do something else."""

    def __init__(self, first=None, last=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("stat", torch.zeros(4))
        self._first = first or (lambda s, x: s.a(x))
        self._last = last or (lambda s, h: s.b(h))

    def forward(self, x):
        with piper.annotate("PP", 0):
            h = self._first(self, x)
        with piper.annotate("PP", 1):
            return self._last(self, h)


def writing(write):
    def first(module, x):
        h = module.a(x)
        write(module, h.detach(), h)
        return h

    return Two(first)


OVERWRITES = {
    "out": lambda s, d, _: torch.mean(d, 0, out=s.stat),
    "one of two outs": lambda s, d, _: torch.max(d, 0, out=(s.stat, torch.empty(4).long())),
}


@pytest.mark.parametrize("how", OVERWRITES)
@pytest.mark.parametrize("strategy", [PIPELINE, replicas(), replicas(1, replicated_buffers="sum")])
def test_a_buffer_that_is_written_and_never_read(how, strategy):
    """Replicas keep the value of the last one, which is the last in one process too."""
    assert_equal(writing(OVERWRITES[how]), mse, strategy, (X, Y))


def test_a_buffer_that_passes_through_the_norm_of_a_weight():
    model = Two()
    nn.utils.parametrizations.spectral_norm(model.a)
    assert_equal(model, mse, PIPELINE, (X, Y))


@pytest.mark.parametrize(
    "write",
    [
        lambda s, d, _: s.stat.mul_(0.9).add_(d.mean(0)),
        lambda s, d, _: s.stat.lerp_(d.mean(0), 0.1),
        lambda s, d, _: s.stat.__setitem__(slice(0, 2), d.mean(0)[:2]),
        lambda s, d, _: s.stat[1:3].add_(d.mean(0)[:2]),
        lambda s, d, _: s.stat.index_add_(0, torch.tensor([0, 2]), d[0, :2]),
        lambda s, d, _: s.stat.scatter_(0, torch.tensor([1, 2]), d[0, :2]),
        lambda s, d, _: torch._foreach_add_([s.stat], [d.mean(0)]),
    ],
)
def test_a_buffer_that_is_written_in_place(write):
    assert_equal(writing(write), mse, PIPELINE, (X, Y))
    with pytest.raises(DirectiveError, match="'stat'"):
        assert_equal(writing(write), mse, replicas(), (X, Y))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda s, _, h: s.stat.copy_(h.mean(0)), r"'stat'.*detach"),
        (lambda s, _, __: setattr(s, "stat", None), "removes buffer 'stat'"),
        (lambda s, d, _: s.register_buffer("new", d.mean(0)), "new buffer 'new'"),
        (lambda s, d, _: setattr(s, "stat", d.mean(0, keepdim=True)), "'stat'.*shape"),
    ],
)
def test_writes_that_a_graph_cannot_have_name_the_buffer(write, message):
    with pytest.raises(CaptureError, match=message):
        piper.capture(writing(write).double(), mse, (X, Y))


MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_modes_of_the_caller_do_not_matter(mode):
    def run(around) -> list[float]:
        with (
            around(),
            piper.compile(
                Two().double(), mse, PIPELINE, (X, Y), optimizer=sgd, backend="inprocess"
            ) as trainer,
        ):
            return [trainer.step(X, Y).loss, trainer.evaluate(X, Y).loss]

    model = Two().double()
    if mode != "device":  # (there the model would have no values)
        assert run(MODES[mode]) == run(torch.enable_grad)
        return
    with piper.compile(model, mse, PIPELINE, (X, Y), optimizer=sgd, backend="inprocess") as trainer:
        expected = trainer.evaluate(X, Y).loss
        with MODES[mode]():
            assert trainer.evaluate(X, Y).loss == expected
            piper.capture(model, mse, (X, Y))


def test_what_a_capture_sets_is_seen_by_its_own_thread_only():
    """Another thread registers a hook that returns nothing, and asks whether it is traced."""
    seen: list[object] = []

    def look() -> None:
        tensor = torch.ones(1, requires_grad=True)
        tensor.register_hook(lambda gradient: seen.append(gradient.item()))
        tensor.sum().backward()
        seen.append(bool(torch.compiler.is_compiling()))

    def loss(outputs, targets):
        seen.append(bool(torch.compiler.is_compiling()))
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return mse(outputs, targets)

    piper.capture(Two().double(), loss, (X, Y))
    assert seen[:3] == [True, 1.0, False]
    assert "apply" not in vars(CheckpointFunction)

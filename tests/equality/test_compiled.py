"""Compiled chunks equal plain PyTorch: with split backwards, dropout, sharding, tied weights."""

import pytest
import torch
from tests.equality.zero_bubble_matrix import Mixed
from torch.nn import functional

import piper
from piper.api.strategies import pipeline
from piper.backends.inprocess import InProcessBackend
from piper.models import (
    MLP,
    MLPConfig,
    Transformer,
    TransformerConfig,
    UNet,
    UNetConfig,
    mlp_loss,
    transformer_loss,
    unet_loss,
)
from piper.runtime import compiled

TOLERANCE = 1e-10


@pytest.fixture
def pieces(monkeypatch):
    """The bodies that were compiled."""
    found = []
    real = compiled.compile_body

    def compile_body(body, *rest):
        found.append(body)
        return real(body, *rest)

    compiled._of_body.cache_clear()
    monkeypatch.setattr(compiled, "compile_body", compile_body)
    yield found
    compiled._of_body.cache_clear()


@pytest.fixture
def compiled_before_runs(monkeypatch, pieces):
    """How many pieces were compiled before each call that runs steps."""
    found = []
    run = InProcessBackend.run

    def counting(self, *arguments, **options):
        found.append(len(pieces))
        return run(self, *arguments, **options)

    monkeypatch.setattr(InProcessBackend, "run", counting)
    return found


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def mlp(stages):
    model = MLP(
        MLPConfig(
            in_features=3,
            width=4,
            out_features=2,
            num_layers=stages,
            num_stages=stages,
            dropout=0.2,
        )
    )
    return model, mlp_loss, lambda rows: (torch.randn(rows, 3), torch.randn(rows, 2))


def transformer(stages):
    config = TransformerConfig(
        vocab_size=7,
        context=3,
        width=4,
        num_layers=stages,
        num_heads=2,
        dropout=0.1,
        tied_embedding=True,
        num_stages=stages,
    )

    def batch(rows):
        return tuple(torch.randint(0, 7, (rows, 3)) for _ in range(2))

    return Transformer(config), transformer_loss, batch


def unet(stages):
    model = UNet(UNetConfig(channels=1, width=2, num_stages=stages))
    return model, unet_loss, lambda rows: tuple(torch.randn(rows, 1, 8, 8) for _ in range(2))


def mixed(stages):
    return Mixed(stages), functional.mse_loss, lambda rows: tuple(torch.randn(2, rows, 4))


def check(make, schedule, groups, microbatches, zero=0, **options):
    torch.manual_seed(0)
    strategy = pipeline(schedule, groups, microbatches, zero=zero)
    stages = len({d.filter["PP"] for d in strategy if isinstance(d, piper.Place)})
    model, loss_fn, batch = make(stages)
    data = batch(2 * microbatches * len(groups[0]))
    options = {"optimizer": sgd, "compile": True, **options}
    return piper.check(model, loss_fn, strategy, data, **options)


@pytest.mark.timeout(600)
def test_split_backwards_with_dropout(pieces, compiled_before_runs):
    report = check(mlp, "zb_h1", [[0], [1]], 2)
    assert max(report.max_loss_error, report.max_grad_error, report.max_param_error) <= TOLERANCE
    # Each distinct piece once: forwards, backwards and their halves, not one per microbatch or
    # step.
    assert len(set(pieces)) == len(pieces) > 4
    # All of them before a device may wait for another. (The check of the capture runs first,
    # uncompiled.)
    assert compiled_before_runs == [0, len(pieces), len(pieces)]


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("make", [mlp, transformer, unet, mixed])
@pytest.mark.parametrize(
    ("schedule", "groups", "microbatches", "zero"),
    [
        ("1f1b", [[0, 1], [2, 3]], 2, 2),
        ("zbv", [[0, 1], [2, 3]], 2, 3),
        ("dualpipev", [[0], [1]], 4, 0),
        ("dualpipe", [[0, 1], [2, 3]], 4, 1),
    ],
)
def test_compiled_equals_plain_pytorch(
    make, schedule, groups, microbatches, zero, pieces, compiled_before_runs
):
    report = check(make, schedule, groups, microbatches, zero)
    assert max(report.max_loss_error, report.max_grad_error, report.max_param_error) <= TOLERANCE
    assert compiled_before_runs == [0, len(pieces), len(pieces)]


def test_a_chunk_that_cannot_be_compiled_is_named_and_falls_back_when_asked(monkeypatch):
    def broken(*_):
        raise piper.errors.CompileError("out of registers")

    compiled._of_body.cache_clear()
    monkeypatch.setattr(compiled, "compile_body", broken)
    with pytest.raises(piper.errors.CompileError, match=r"chunk 'F PP=0 MB=0' cannot be compiled"):
        check(mlp, "1f1b", [[0], [1]], 2)
    with pytest.warns(UserWarning, match=r"chunk 'F PP=0 MB=0' cannot .*it runs uncompiled"):
        check(mlp, "1f1b", [[0], [1]], 2, compile="fallback").require()
    compiled._of_body.cache_clear()


@pytest.mark.parametrize("option", ["yes", None, 2])
def test_other_options_are_refused(option):
    with pytest.raises(piper.errors.ConfigError, match='compile is False, True or "fallback"'):
        check(mlp, "1f1b", [[0], [1]], 2, compile=option)

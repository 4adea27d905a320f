"""Processes and gloo instead of threads: the same numbers."""

import pytest
import torch
from tests.cases.equal import sgd

import piper
from piper.models import (
    Transformer,
    TransformerConfig,
    UNet,
    UNetConfig,
    transformer_loss,
    unet_loss,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

GROUPS = [[0, 1], [2, 3]]


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2, eps=1e-3)


def transformer(num_stages):
    config = TransformerConfig(
        vocab_size=7,
        context=4,
        width=8,
        num_layers=num_stages,
        num_heads=2,
        dropout=0.1,
        tied_embedding=True,
        num_stages=num_stages,
    )
    ids = torch.randint(0, 7, (16, 4))
    return Transformer(config), transformer_loss, (ids, ids.roll(1, 1))


def unet():
    images = torch.randn(16, 1, 8, 8)
    return UNet(UNetConfig(channels=1, width=2, num_stages=2)), unet_loss, (images, images.flip(0))


def sharded(zero):
    return piper.strategies.pipeline("1f1b", GROUPS, 4, zero=zero, bucket_size=1e-3)


CASES = {
    "transformer, interleaved": (
        lambda: transformer(4),
        piper.strategies.pipeline("interleaved_1f1b", GROUPS, 4, num_virtual_stages=2),
        sgd,
    ),
    "unet, gpipe": (unet, piper.strategies.pipeline("gpipe", GROUPS, 4), sgd),
    **{
        f"transformer, ZeRO-{zero}": (lambda: transformer(2), sharded(zero), adam)
        for zero in (1, 2, 3)
    },
}


@pytest.mark.parametrize("case", CASES)
def test_ray_and_threads_agree(case):
    """Float32. Bitwise, unless the reductions over replicas round differently."""
    build, strategy, optimizer = CASES[case]

    def run(backend: str):
        torch.manual_seed(0)
        model, loss_fn, batch = build()
        with piper.compile(
            model, loss_fn, strategy, batch, optimizer=optimizer, backend=backend
        ) as trainer:
            losses = [trainer.step(*batch).loss for _ in range(3)]
            losses.append(trainer.evaluate(*batch).loss)
            return losses, trainer.state_dict()

    (found, state), (expected, reference) = run("ray"), run("inprocess")
    assert found == pytest.approx(expected, rel=1e-6)
    assert state.keys() == reference.keys()
    for name, tensor in reference.items():
        error = (state[name] - tensor).norm() / tensor.norm().clamp(min=1e-3)
        assert error <= 1e-6, name

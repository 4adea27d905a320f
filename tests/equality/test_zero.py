"""Sharded strategies equal plain PyTorch: in `make test` a part in which every pair of factor values occurs, with `-m full` all."""

import time
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from tests.equality import zero_matrix
from tests.equality.zero_matrix import (
    FACTORS,
    TOLERANCE,
    Case,
    all_cases,
    covering_cases,
    run,
    sharded,
)

import piper
from piper.models import Transformer, TransformerConfig, transformer_loss

RESULTS = Path(__file__).parents[2] / "docs"


def pairs(cases: list[Case]) -> set[tuple[object, ...]]:
    return {pair for case in cases for pair in case.pairs}


def test_every_pair_of_factor_values_is_covered():
    chosen = list(covering_cases())
    wanted = {
        ((i, x), (j, y))
        for (i, a), (j, b) in combinations(enumerate(FACTORS), 2)
        for x, y in product(FACTORS[a], FACTORS[b])
    }
    assert pairs(chosen) == wanted
    names = list(FACTORS)
    nothing = {(names.index("zero"), 0), (names.index("dp"), 1)}
    among = {pair for pair in wanted if not nothing.intersection(pair)}
    assert pairs([c for c in chosen if sharded(c)]) == among
    assert len(set(chosen)) == len(chosen) < len(all_cases()) == 432


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "case", sorted(covering_cases(), key=lambda c: (c.num_stages, c.tied, str(c))), ids=str
)
def test_equal_to_plain_pytorch(case: Case):
    assert run(case).worst <= TOLERANCE


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_the_whole_matrix():
    """Writes the results to docs/zero_matrix.md and .csv."""
    began = time.monotonic()
    measured = zero_matrix.measure(all_cases())
    zero_matrix.write(measured, RESULTS, time.monotonic() - began)
    wrong = [str(m.case) for m in measured if not m.worst.worst <= TOLERANCE]
    assert not wrong


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2, eps=1e-3)


@pytest.mark.ray
@pytest.mark.timeout(180)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_ray_and_threads_agree(zero: int):
    """Float32, processes and gloo. Sums over two replicas are the same either way round."""

    def train(backend: str):
        torch.manual_seed(0)
        config = TransformerConfig(
            vocab_size=7,
            context=4,
            width=8,
            num_layers=2,
            num_heads=2,
            dropout=0.1,
            tied_embedding=True,
            num_stages=2,
        )
        ids = torch.randint(0, 7, (16, 4))
        batch = (ids, ids.roll(1, 1))
        strategy = piper.strategies.pipeline(
            "1f1b", [[0, 1], [2, 3]], 4, zero=zero, bucket_size=1e-3
        )
        with piper.compile(
            Transformer(config),
            transformer_loss,
            strategy,
            batch,
            optimizer=adam,
            backend=backend,
        ) as trainer:
            losses = [trainer.step(*batch).loss for _ in range(3)]
            losses.append(trainer.evaluate(*batch).loss)
            return losses, trainer.state_dict()

    (found, state), (expected, reference) = train("ray"), train("inprocess")
    assert found == pytest.approx(expected, rel=1e-6)
    assert state.keys() == reference.keys()
    for name, tensor in reference.items():
        error = (state[name] - tensor).norm() / tensor.norm().clamp(min=1e-3)
        assert error <= 1e-6, name

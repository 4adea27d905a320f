"""Shapes and constants that change from step to step, and evaluation in between."""

import copy

import pytest
import torch
from tests.cases.equal import mse, randint, randn, sgd
from tests.equality import eager
from torch import nn

import piper
from piper.backends.inprocess import InProcessBackend
from piper.models import Transformer, TransformerConfig, transformer_loss

pytestmark = pytest.mark.timeout(120)


def transformer() -> Transformer:
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=7, context=12, width=4, num_layers=2, num_heads=2, num_stages=2
    )
    return Transformer(config).double()


def tokens(rows: int, length: int, seed: int) -> eager.Batch:
    return randint(7, rows, length, seed=seed), randint(7, rows, length, seed=seed + 50)


def test_sequences_and_batches_of_other_lengths():
    """S = 12, then 9, a last batch that is smaller, and the first shape again."""
    model = transformer()
    plain, strategy = copy.deepcopy(model), piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 2)
    reference = sgd(list(plain.parameters()))
    batches = [
        tokens(8, 12, 0),
        tokens(8, 9, 1),
        tokens(4, 9, 2),
        tokens(8, 12, 3),
    ]
    with piper.compile(
        model, transformer_loss, strategy, batches[0], optimizer=sgd, backend="inprocess"
    ) as trainer:
        for batch in batches:
            expected = eager.one_step(plain, transformer_loss, batch, 4, reference)
            assert trainer.step(*batch).loss == pytest.approx(expected.loss, rel=1e-11)
        for name, tensor in trainer.state_dict().items():
            torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=1e-9, atol=1e-11)


def test_a_batch_that_does_not_divide_leaves_the_trainer_unchanged():
    model, strategy = transformer(), piper.strategies.pipeline("1f1b", [[0], [1]], 4)
    batch = tokens(8, 5, 0)
    with piper.compile(
        model, transformer_loss, strategy, batch, optimizer=sgd, backend="inprocess"
    ) as trainer:
        trainer.step(*batch)
        before = trainer.state_dict()
        with pytest.raises(piper.errors.SplitError, match=r"6 rows.*4 microbatches"):
            trainer.step(*tokens(6, 5, 1))
        assert all(torch.equal(before[n], t) for n, t in trainer.state_dict().items())
        assert trainer.steps_done == 1
        trainer.step(*tokens(4, 5, 2))  # it goes on


class Dropped(nn.Module):
    """Behaves differently in evaluation: dropout and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x):
        with piper.annotate("PP", 0):
            h = self.norm(self.a(x)).tanh()
        with piper.annotate("PP", 1):
            return self.b(self.dropout(h))


@pytest.mark.parametrize("rows", [16, 8, 6, 5, 1])
def test_evaluation_between_training_steps(rows):
    """Twice the training batch, the same, fewer rows, a number that divides nothing, one. Training
    goes on as if nothing had been.
    """
    torch.manual_seed(0)
    model = Dropped().double()
    batches = [(randn(8, 3, seed=s), randn(8, 2, seed=s + 9)) for s in range(4)]
    test_batch = (randn(rows, 3, seed=20), randn(rows, 2, seed=21))
    strategy = piper.strategies.pipeline("1f1b", [[0], [1]], 2)

    def train(evaluate: bool) -> dict[str, torch.Tensor]:
        backend = InProcessBackend()
        with piper.compile(
            model, mse, strategy, batches[0], optimizer=sgd, backend=backend
        ) as trainer:
            for batch in batches:
                trainer.step(*batch)
                if evaluate:
                    before = trainer.state_dict()
                    loss = trainer.evaluate(*test_batch).loss
                    assert loss == pytest.approx(_loss_of(model, before, test_batch), rel=1e-12)
                    after = trainer.state_dict()
                    assert all(torch.equal(before[n], after[n]) for n in before)
                    _assert_nothing_kept(backend)
            return trainer.state_dict()

    with_evaluation, without = train(evaluate=True), train(evaluate=False)
    assert all(torch.equal(with_evaluation[n], without[n]) for n in without)
    assert model.training


def _loss_of(model: nn.Module, state: dict[str, torch.Tensor], batch: eager.Batch) -> float:
    model = copy.deepcopy(model).eval()
    model.load_state_dict(state)
    with torch.no_grad():
        return float(mse(model(batch[0]), batch[1]))


def _assert_nothing_kept(backend: InProcessBackend) -> None:
    for worker in backend._workers:
        assert all(p.grad is None for p in worker._state.parameters.values())
        for loaded in worker._plans.values():
            transient = loaded.program._transient
            assert all(loaded.program._slots[slot] is None for slot in transient)
            assert not loaded.context.leaves


def test_a_weighted_loss_in_evaluation():
    """Rows that only fill up a wave, and microbatches of no weight, do not count."""
    model = transformer()

    def loss_fn(outputs, targets):
        kept = targets > 2
        error = nn.functional.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
        return (error * kept).sum(), kept.sum()

    strategy = piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 2)
    with piper.compile(
        model, loss_fn, strategy, tokens(8, 5, 0), optimizer=sgd, backend="inprocess"
    ) as trainer:
        for rows in (8, 10, 3):
            inputs, targets = tokens(rows, 5, rows)
            with torch.no_grad():
                total, weight = loss_fn(model(inputs), targets)
            loss = trainer.evaluate(inputs, targets).loss
            assert loss == pytest.approx(float(total / weight), rel=1e-12)

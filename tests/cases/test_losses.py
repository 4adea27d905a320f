"""How the loss of a microbatch enters the step's gradients."""

import pytest
import torch
from tests.cases.equal import adamw, assert_equal, randint, randn, sgd
from torch import nn
from torch.nn import functional

import piper
from piper.errors import PiperError
from piper.models import MLP, MLPConfig, Transformer, TransformerConfig, mlp_loss

pytestmark = pytest.mark.timeout(90)

VOCABULARY, LENGTH, IGNORED = 7, 4, -100


def per_valid_token(outputs, targets):
    """Sum over valid tokens, and their number."""
    total = functional.cross_entropy(
        outputs.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total, (targets != IGNORED).sum()


def padded_targets(rows: int) -> torch.Tensor:
    """Row r has r mod (LENGTH + 1) valid tokens; row 0 has none."""
    labels = randint(VOCABULARY, rows, LENGTH, seed=1)
    valid = torch.arange(LENGTH)[None] < (torch.arange(rows) % (LENGTH + 1))[:, None]
    return labels.where(valid, torch.full_like(labels, IGNORED))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_a_mean_over_valid_tokens_that_differ_from_row_to_row(tied, optimizer):
    """Averaging the microbatches' means would weight a token by how few there are in its
    microbatch.

    One of the microbatches (one row each) has no valid token at all.
    """
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=VOCABULARY,
        context=LENGTH,
        width=8,
        num_layers=2,
        num_heads=2,
        tied_embedding=tied,
        num_stages=2,
    )
    batch = (randint(VOCABULARY, 8, LENGTH), padded_targets(8))
    strategy = piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 4)
    assert_equal(Transformer(config), per_valid_token, strategy, batch, optimizer=optimizer)


class Sums(nn.Module):
    """Two stages; the weight of a row comes with the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x, weight):
        with piper.annotate("PP", 0):
            h = self.first(x).tanh()
        with piper.annotate("PP", 1):
            return self.second(h), weight


@pytest.mark.parametrize("kind", ["tensor", "rows", "constant"])
def test_weights_of_every_kind(kind):
    """The weight may be a tensor of the batch, a number of rows, or a constant."""

    def loss_fn(outputs, targets):
        y, weight = outputs
        total = (weight[:, None] * (y - targets).square()).sum()
        weights = {"tensor": weight.sum(), "rows": y.shape[0], "constant": 3.0}
        return total, weights[kind]

    batch = ((randn(8, 3), randn(8, seed=1).abs()), randn(8, 2, seed=2))
    strategy = piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 2)
    assert_equal(Sums(), loss_fn, strategy, batch)


def test_a_batch_without_any_valid_token_is_not_a_number_as_in_pytorch():
    """0 / 0: neither silently skipped nor an exception out of the middle of a run."""
    torch.manual_seed(0)
    model = Transformer(
        TransformerConfig(vocab_size=VOCABULARY, context=LENGTH, width=4, num_layers=1, num_heads=1)
    )
    nothing = torch.full((4, LENGTH), IGNORED)
    batch = (randint(VOCABULARY, 4, LENGTH), nothing)
    split = [piper.Split({}, num_microbatches=2)]
    report = piper.check(model, per_valid_token, split, batch, optimizer=sgd)
    assert not report.ok
    with piper.compile(
        model, per_valid_token, split, batch, optimizer=sgd, backend="inprocess"
    ) as trainer:
        assert torch.tensor(trainer.step(*batch).loss).isnan()


def test_a_first_microbatch_without_any_valid_token():
    """Compiling compares one microbatch with PyTorch; one without weight says nothing and divides
    by nothing.
    """
    torch.manual_seed(0)
    model = Transformer(
        TransformerConfig(vocab_size=VOCABULARY, context=LENGTH, width=4, num_layers=1, num_heads=1)
    )
    batch = (randint(VOCABULARY, 4, LENGTH), padded_targets(4))
    split = [piper.Split({}, num_microbatches=4)]
    assert piper.check(model, per_valid_token, split, batch, optimizer=sgd).ok
    with piper.compile(
        model, per_valid_token, split, batch, optimizer=sgd, backend="inprocess"
    ) as trainer:
        assert torch.tensor(trainer.step(*batch).loss).isfinite()


@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_the_scale_of_gradients_does_not_depend_on_stages_or_microbatches(microbatches):
    """SGD without clipping shows a gradient that is scaled once per stage, or not at all, on each
    of three stages.
    """
    torch.manual_seed(0)
    model = MLP(MLPConfig(in_features=3, width=4, out_features=2, num_layers=3, num_stages=3))
    strategy = piper.strategies.pipeline("1f1b", [[0], [1], [2]], microbatches)
    assert_equal(
        model,
        mlp_loss,
        strategy,
        (randn(8, 3), randn(8, 2, seed=1)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        steps=3,
    )


@pytest.mark.parametrize(("rows", "microbatches"), [(10, 4), (5, 4), (3, 4)])
def test_a_batch_that_the_microbatches_do_not_divide_is_refused(rows, microbatches):
    model = MLP(MLPConfig(in_features=3, width=4, out_features=2, num_layers=2, num_stages=2))
    strategy = piper.strategies.pipeline("1f1b", [[0], [1]], microbatches)
    batch = (randn(rows, 3), randn(rows, 2))
    with pytest.raises(PiperError, match=rf"\b{rows} rows.*\b{microbatches} microbatches"):
        assert_equal(model, mlp_loss, strategy, batch)


def test_a_batch_that_the_replicas_do_not_divide_is_refused():
    """12 rows in 3 microbatches of 4, but 8 replicas' microbatches."""
    model = MLP(MLPConfig(in_features=3, width=4, out_features=2, num_layers=1, num_stages=1))
    strategy = piper.strategies.pipeline("gpipe", [list(range(8))], 3)
    with pytest.raises(PiperError, match=r"12 rows.*8 replicas × 3 microbatches"):
        assert_equal(model, mlp_loss, strategy, (randn(12, 3), randn(12, 2)))


def test_an_auxiliary_loss_of_an_inner_stage():
    """A router's loss, computed in stage 0, added in the last: weighted like the rest, whatever M
    is.
    """

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.middle, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x):
            with piper.annotate("PP", 0):
                gates = self.router(x).softmax(-1)
                auxiliary = gates.mean(0).square().sum()
            with piper.annotate("PP", 1):
                h = self.middle(x * gates).tanh()
            with piper.annotate("PP", 2):
                return self.last(h), auxiliary

    def loss_fn(outputs, targets):
        y, auxiliary = outputs
        return functional.mse_loss(y, targets) + 0.1 * auxiliary

    batch = (randn(8, 3), randn(8, 2, seed=1))
    for groups in ([[0], [1], [2]], [[0, 1], [2, 3], [4, 5]]):
        assert_equal(Routed(), loss_fn, piper.strategies.pipeline("1f1b", groups, 4), batch)

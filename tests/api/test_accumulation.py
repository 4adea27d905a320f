"""``step(update=False)``: several backward calls, then one update, against the same in plain PyTorch."""

import copy
import math

import pytest
import torch
from tests.api.test_clipping import Model, sgd, strategy, weighted
from tests.cases.equal import mse, randn
from tests.equality import eager
from torch import nn

import piper
from piper.errors import BatchError, FilterError

pytestmark = pytest.mark.timeout(120)

GROUPS = [[0, 1], [2, 3]]
COUNT = 4
"""Microbatches in all."""

PATTERN = [False, False, True, True, False, True]
"""Which calls update."""


def batch_of(call: int, rows: int = 8) -> eager.Batch:
    return randn(rows, 3, seed=call), randn(rows, 2, seed=call + 100)


class Plain:
    """Plain PyTorch: each call divides its own gradients by its own weight and adds them to ``.grad``."""

    def __init__(self, model, loss_fn, count=COUNT, max_norm=None, norm_type=2.0, optimizer=sgd):
        self.model, self.loss_fn, self.count = copy.deepcopy(model).double(), loss_fn, count
        self.max_norm, self.norm_type = max_norm, norm_type
        self.optimizer = optimizer([p for p in self.model.parameters() if p.requires_grad])
        self.norm = None

    def step(self, batch, *, update=True) -> float:
        size = eager.count_rows(batch[0]) // self.count
        cuts = [(m * size, (m + 1) * size) for m in range(self.count)]
        parts = [tuple(eager.rows(t, *cut) for t in batch) for cut in cuts]
        found = [self.loss_fn(eager.call(self.model, x), y) for x, y in parts]
        pairs = [f if isinstance(f, tuple) else (f, torch.tensor(1.0)) for f in found]
        total = sum(weight for _, weight in pairs)
        loss = sum(own for own, _ in pairs) / total
        loss.backward()
        if update:
            if self.max_norm is not None:
                parameters = self.model.parameters()
                self.norm = nn.utils.clip_grad_norm_(parameters, self.max_norm, self.norm_type)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def compiled(model, loss_fn, how, batch, **options):
    given = {"optimizer": sgd, "backend": "inprocess", **options}
    return piper.compile(copy.deepcopy(model).double(), loss_fn, how, batch, **given)


def assert_state(trainer, plain: Plain) -> None:
    state = trainer.state_dict()
    for name, tensor in eager.state_of(plain.model).items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-13, msg=name)


def assert_accumulates_equal(model, loss_fn, how, *, count=COUNT, norm=None, **options):
    plain = Plain(model, loss_fn, count, *(norm or ()))
    if norm is not None:
        options |= {"max_grad_norm": norm[0], "norm_type": norm[1]}
    with compiled(model, loss_fn, how, batch_of(0), **options) as trainer:
        for call, update in enumerate(PATTERN):
            before = trainer.state_dict()
            result = trainer.step(*batch_of(call), update=update)
            assert result.loss == pytest.approx(
                plain.step(batch_of(call), update=update), rel=1e-11
            )
            assert trainer.steps_done == sum(PATTERN[: call + 1])
            if update:
                assert_state(trainer, plain)
                if norm is not None:
                    assert result.grad_norm == pytest.approx(float(plain.norm), rel=1e-11)
            else:
                assert result.grad_norm is None
                assert all(torch.equal(before[n], t) for n, t in trainer.state_dict().items())
        for parameter in trainer._backend.copies():
            for name, tensor in parameter.parameters.items():
                torch.testing.assert_close(
                    tensor, eager.state_of(plain.model)[name], rtol=1e-10, atol=1e-13
                )


@pytest.mark.parametrize("loss_fn", [mse, weighted])
@pytest.mark.parametrize(
    "flags", [{}, {"shard_optimizer": True}, {"shard_grads": True}, {"shard_params": True}]
)
@pytest.mark.parametrize("tied", [False, True])
def test_two_backwards_and_one_update(loss_fn, flags, tied):
    """Earlier gradients are not rescaled by later calls: case 12 of those that other frameworks get wrong."""
    how = strategy(GROUPS, bucket_size=1e-4, **flags)
    assert_accumulates_equal(Model(3.0, tied=tied), loss_fn, how)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("loss_fn", [mse, weighted])
@pytest.mark.parametrize("flags", [{}, {"shard_grads": True}])
def test_the_sum_is_clipped(norm_type, loss_fn, flags):
    how = strategy(GROUPS, **flags)
    model = Model(30.0, tied=True)
    assert_accumulates_equal(model, loss_fn, how, norm=(0.3, norm_type))


@pytest.mark.parametrize("groups", [[[0]], [[0], [1]], [[0, 1]]])
def test_on_few_devices(groups):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    piper.annotate_module(model[0], "PP", 0)
    piper.annotate_module(model[2], "PP", len(groups) - 1)
    count = 2 * len(groups[0])
    assert_accumulates_equal(model, mse, strategy(groups), count=count)


@pytest.mark.parametrize("as_function", [True, False])
def test_fit_begins_with_what_was_kept(as_function):
    model, how = Model(3.0), strategy(GROUPS, shard_grads=True)
    plain = Plain(model, mse)
    with compiled(model, mse, how, batch_of(0)) as trainer:
        trainer.step(*batch_of(7), update=False)
        plain.step(batch_of(7), update=False)
        data = batch_of if as_function else iter([batch_of(s) for s in range(3)])
        results = trainer.fit(data, 3)
        losses = [plain.step(batch_of(s)) for s in range(3)]
        assert [r.step for r in results] == [0, 1, 2]
        assert [r.loss for r in results] == pytest.approx(losses, rel=1e-11)
        assert_state(trainer, plain)


def test_evaluation_and_other_shapes_between():
    """Each call's loss is a mean over its own rows; evaluating keeps what is kept."""
    model, how = Model(3.0), strategy(GROUPS)
    plain = Plain(model, mse)
    with compiled(model, mse, how, batch_of(0)) as trainer:
        for rows in (8, 12):
            trainer.step(*batch_of(rows, rows), update=False)
            plain.step(batch_of(rows, rows), update=False)
            trainer.evaluate(*batch_of(1, 16))
        trainer.step(*batch_of(3))
        plain.step(batch_of(3))
        assert_state(trainer, plain)


def test_loading_weights_drops_what_was_kept():
    model, how = Model(3.0), strategy(GROUPS, shard_params=True)
    plain = Plain(model, mse)
    with compiled(model, mse, how, batch_of(0)) as trainer:
        state = trainer.state_dict()
        trainer.step(*batch_of(1), update=False)
        trainer.load_state_dict(state)
        for call in (2, 3):
            trainer.step(*batch_of(call), update=call == 3)
            plain.step(batch_of(call), update=call == 3)
        assert_state(trainer, plain)


class Branches(nn.Module):
    """The second layer has a gradient only where the constant says so."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x, both):
        return self.first(x) + self.second(x) if both else self.first(x)


def test_a_gradient_that_begins_late_or_ends_early():
    x, y = batch_of(0)
    whole, part = ((x, True), y), ((x, False), y)
    model = Branches()
    plain = Plain(model, mse, 2)
    with compiled(model, mse, [piper.Split({}, num_microbatches=2)], whole) as trainer:
        for batch, update in ((part, False), (whole, True), (part, True)):
            trainer.step(*batch, update=update)
            plain.step(batch, update=update)
            assert_state(trainer, plain)
        trainer.step(*whole, update=False)
        with pytest.raises(BatchError, match=r"'second.* has a gradient from step.update=False"):
            trainer.step(*part)


def test_every_call_draws_random_numbers_of_its_own():
    """Dropout under another strategy drops the same elements; two calls of one optimizer step drop different ones."""
    model = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5), nn.Linear(64, 2))
    piper.annotate_module(model[0], "PP", 0)
    piper.annotate_module(model[2], "PP", 1)
    losses, states = [], []
    for how in ([piper.Split({}, num_microbatches=2)], strategy([[0], [1]])):
        with compiled(model, mse, how, batch_of(0)) as trainer:
            calls = [trainer.step(*batch_of(0), update=update).loss for update in (False, True)]
            losses.append(calls)
            states.append(trainer.state_dict())
    assert losses[0][0] != losses[0][1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kind", ["refresh", "all_reduce", "reduce_scatter"])
def test_an_order_may_name_communication_that_only_the_update_has(kind):
    flags = {"all_reduce": {}, "refresh": {"shard_optimizer": True}}
    how = strategy(GROUPS, **flags.get(kind, {"shard_optimizer": True}))
    how.append(piper.Order([[{"PASS": "B"}], [{"COMM": kind}]]))
    assert_accumulates_equal(Model(3.0), mse, how)


def test_an_order_that_names_unknown_communication_is_refused():
    how = [*strategy(GROUPS), piper.Order([[{"COMM": "refersh"}]])]
    with pytest.raises(FilterError, match="is unknown"):
        compiled(Model(3.0), mse, how, batch_of(0))

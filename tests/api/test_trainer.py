"""The trainer: what a user calls between compile and close, each thing against plain PyTorch."""

import copy
import threading

import pytest
import torch
from tests.cases.equal import mse, randn
from tests.equality import eager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import piper
from piper.errors import BatchError, ConfigError, PiperError, RunError, StateError
from piper.models import MLP, MLPConfig, Transformer, TransformerConfig, mlp_loss

pytestmark = pytest.mark.timeout(120)

PIPELINE = piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 2)
COUNT = 4
"""Microbatches in all of :data:`PIPELINE`."""


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def mlp() -> MLP:
    torch.manual_seed(0)
    config = MLPConfig(in_features=3, width=4, out_features=2, num_layers=2, num_stages=2)
    return MLP(config).double()


def batch_of(step: int, rows: int = 8) -> eager.Batch:
    return randn(rows, 3, seed=step), randn(rows, 2, seed=step + 100)


def compiled(model: nn.Module | None = None, **options):
    given = {"optimizer": sgd, "backend": "inprocess", **options}
    return piper.compile(model or mlp(), mlp_loss, PIPELINE, batch_of(0), **given)


def plain(model: nn.Module, steps: int, optimizer=sgd) -> list[eager.Step]:
    return eager.train(model, mlp_loss, [batch_of(s) for s in range(steps)], COUNT, optimizer)


def assert_state(trainer: piper.Trainer, expected: eager.Step) -> None:
    state = trainer.state_dict()
    assert expected.state.keys() <= state.keys()
    for name, tensor in expected.state.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-13)


# --- training ---------------------------------------------------------------------------------------


def test_step():
    expected = plain(mlp(), 3)
    with compiled() as trainer:
        for number, wanted in enumerate(expected):
            result = trainer.step(*batch_of(number))
            assert (result.step, trainer.steps_done) == (number, number + 1)
            assert result.loss == pytest.approx(wanted.loss, rel=1e-12)
            assert result.seconds > 0
            assert result.tokens == 8
            assert result.tokens_per_second == pytest.approx(8 / result.seconds)
            assert_state(trainer, wanted)


def test_fit_with_a_function_of_the_step():
    """Called by the workers; the step counts all steps of the trainer."""
    expected = plain(mlp(), 5)
    seen: list[int] = []
    with compiled() as trainer:
        first = trainer.step(*batch_of(0))
        results = trainer.fit(batch_of, 4, on_steps=lambda done: seen.extend(r.step for r in done))
        assert [r.step for r in results] == seen == [1, 2, 3, 4]
        losses = [first.loss, *(r.loss for r in results)]
        assert losses == pytest.approx([w.loss for w in expected], rel=1e-12)
        assert_state(trainer, expected[-1])


def test_fit_with_an_iterable():
    """More batches than one call ships; the iterable may be longer than the number of steps."""
    expected = plain(mlp(), 20)
    with compiled() as trainer:
        endless = (batch_of(step) for step in range(10**6))
        results = trainer.fit(endless, 20)
        assert [r.loss for r in results] == pytest.approx([w.loss for w in expected], rel=1e-11)
        assert_state(trainer, expected[-1])
        assert next(endless)[0].equal(batch_of(20)[0]), "took batches that it did not use"


def test_fit_with_a_data_loader():
    data = TensorDataset(randn(24, 3), randn(24, 2, seed=1))
    with compiled() as trainer:
        results = trainer.fit(DataLoader(data, batch_size=8), 3)
    batches = [tuple(t[i : i + 8] for t in data.tensors) for i in (0, 8, 16)]
    expected = eager.train(mlp(), mlp_loss, batches, COUNT, sgd)
    assert [r.loss for r in results] == pytest.approx([w.loss for w in expected], rel=1e-12)


@pytest.mark.parametrize("as_function", [True, False])
def test_fit_with_shapes_that_change(as_function):
    """The last batch of an epoch is smaller; then the next epoch begins."""
    rows = [8, 8, 4, 8, 12, 12]
    batches = [batch_of(step, n) for step, n in enumerate(rows)]
    expected = eager.train(mlp(), mlp_loss, batches, COUNT, sgd)
    with compiled() as trainer:
        data = batches.__getitem__ if as_function else batches
        results = trainer.fit(data, len(rows))
        assert [r.step for r in results] == list(range(len(rows)))
        assert [r.loss for r in results] == pytest.approx([w.loss for w in expected], rel=1e-11)
        assert [r.tokens for r in results] == rows
        assert_state(trainer, expected[-1])


def test_fit_with_too_little_data():
    with compiled() as trainer:
        with pytest.raises(BatchError, match="after 2 of 3 steps"):
            trainer.fit([batch_of(0), batch_of(1)], 3)
        assert trainer.steps_done == 2
        with pytest.raises(BatchError, match="at least 0"):
            trainer.fit([], -1)
        assert trainer.fit(batch_of, 0) == []


def test_a_flag_that_changes():
    """A constant of the batch is part of the plan: a new value is captured anew, an old one is
    found again.
    """

    class Flagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x, *, scale, twice):
            y = self.linear(x) * scale
            return self.linear(y @ self.linear.weight) if twice else y

    torch.manual_seed(0)
    model = Flagged().double()
    batches = [
        ({"x": randn(8, 3, seed=i), "scale": scale, "twice": twice}, randn(8, 2, seed=i + 9))
        for i, (scale, twice) in enumerate([(1.0, False), (2.0, False), (1.0, True), (1.0, False)])
    ]
    expected = eager.train(model, mse, batches, 2, sgd)
    split = [piper.Split({}, num_microbatches=2)]
    with piper.compile(
        model, mse, split, batches[0], optimizer=sgd, backend="inprocess"
    ) as trainer:
        first = trainer.program
        losses = [trainer.step(*b).loss for b in batches]
        assert losses == pytest.approx([w.loss for w in expected], rel=1e-12)
        assert trainer.program is first
        assert_state(trainer, expected[-1])


class Switched(nn.Module):
    """Dropout in the first of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.dropout = nn.Linear(3, 8), nn.Linear(8, 2), nn.Dropout(0.5)

    def forward(self, x):
        with piper.annotate("PP", 0):
            h = self.dropout(self.a(x).tanh())
        with piper.annotate("PP", 1):
            return self.b(h)


def still(parameters):
    return torch.optim.SGD(parameters, lr=0.0)


def test_the_models_mode_is_looked_at_in_every_step():
    """A step after ``model.eval()`` has no dropout, as in PyTorch; after ``model.train()`` it has
    again.
    """
    model = Switched().double()
    batch = batch_of(0)
    with compiled(model, optimizer=still) as trainer:
        assert trainer.step(*batch).loss != trainer.step(*batch).loss
        model.eval()
        quiet = mse(model(batch[0]), batch[1]).item()
        assert [trainer.step(*batch).loss for _ in range(2)] == pytest.approx([quiet] * 2)
        model.train()
        assert trainer.step(*batch).loss != trainer.step(*batch).loss


def test_parameters_that_are_frozen_later():
    """From the next step on they keep their values; thawing what the optimizer never saw is
    refused.
    """
    model = mlp()
    with compiled(model) as trainer:
        trainer.step(*batch_of(0))
        model.layers[0].requires_grad_(False)
        before = trainer.state_dict()
        trainer.step(*batch_of(1))
        after = trainer.state_dict()
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == {"layers.1.weight", "layers.1.bias"}
        model.layers[0].requires_grad_(True)
        trainer.step(*batch_of(2))
        assert not torch.equal(after["layers.0.weight"], trainer.state_dict()["layers.0.weight"])
    model.layers[0].requires_grad_(False)
    with compiled(model) as trainer:
        trainer.step(*batch_of(0))
        model.layers[0].requires_grad_(True)
        with pytest.raises(StateError, match=r"layers\.0\.bias.*did not require a gradient"):
            trainer.step(*batch_of(1))


@pytest.mark.parametrize("kind", ["iterator", "random"])
def test_data_that_does_not_depend_on_the_step_alone(kind):
    """Called on each device that loads inputs: the inputs of one batch would meet the targets of
    another, of equal shape.
    """
    iterator = (batch_of(step) for step in range(10**6))
    lock = threading.Lock()

    def data(_step: int) -> eager.Batch:
        with lock:
            if kind == "iterator":
                return next(iterator)
            return torch.randn(8, 3).double(), torch.randn(8, 2).double()

    with compiled() as trainer, pytest.raises(RunError, match="depend on the step alone"):
        trainer.fit(data, 3)


# --- evaluation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [8, 16, 20, 7, 2, 1])
def test_evaluate_any_number_of_rows(rows):
    model = mlp()
    with compiled(model) as trainer:
        result = trainer.evaluate(*batch_of(5, rows))
        assert trainer.steps_done == 0
    inputs, targets = batch_of(5, rows)
    assert result.loss == pytest.approx(mlp_loss(model(inputs), targets).item(), rel=1e-12)
    assert result.tokens == rows


def test_evaluate_without_an_optimizer():
    with compiled(optimizer=None) as trainer:
        assert trainer.evaluate(*batch_of(0)).loss > 0
        with pytest.raises(PiperError, match="optimizer=None"):
            trainer.step(*batch_of(0))


# --- state ---------------------------------------------------------------------------------------------


class Stateful(nn.Module):
    """Tied weights, buffers of several types, one not persistent, a frozen and an unused
    parameter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2, 5))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.register_buffer("idle", torch.ones(1, 2, dtype=torch.bool))

    def forward(self, x):
        with piper.annotate("PP", 0):
            h = self.a(x).tanh() * self.frozen * self.scratch
            self.steps.add_(1)
        with piper.annotate("PP", 1):
            return self.b(h)


STAGES = piper.strategies.pipeline("1f1b", [[0], [1]], 2)


def stateful(dtype: torch.dtype = torch.float32) -> tuple[Stateful, eager.Batch]:
    torch.manual_seed(0)
    return Stateful().to(dtype), (randn(4, 3).to(dtype), randn(4, 3, seed=1).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_state_dict_has_the_models_names_shapes_and_types(dtype):
    model, batch = stateful(dtype)
    with piper.compile(model, mse, STAGES, batch, optimizer=sgd, backend="inprocess") as trainer:
        fresh = trainer.state_dict()
        trainer.step(*batch)
        trained = trainer.state_dict()
    wanted = model.state_dict()
    for state in (fresh, trained):
        assert state.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert (state[name].shape, state[name].dtype) == (tensor.shape, tensor.dtype), name
            assert state[name].device.type == "cpu"
        assert torch.equal(state["a.weight"], state["b.weight"])
    assert all(torch.equal(fresh[n], t) for n, t in wanted.items())
    assert not torch.equal(trained["a.weight"], wanted["a.weight"])
    assert int(trained["steps"]) == 2
    assert torch.equal(trained["unused"], wanted["unused"])


def test_a_state_dict_is_a_copy():
    with compiled() as trainer:
        state = trainer.state_dict()
        state["layers.0.weight"].zero_()
        assert trainer.state_dict()["layers.0.weight"].abs().sum() > 0


def test_load_state_dict():
    """Another model's weights, under the same strategy: training goes on from them, on every
    copy.
    """
    torch.manual_seed(7)
    other = MLP(mlp().config).double()
    with compiled() as trainer:
        trainer.load_state_dict(other.state_dict())
        results = [trainer.step(*batch_of(s)) for s in range(2)]
        expected = plain(other, 2)
        assert [r.loss for r in results] == pytest.approx([w.loss for w in expected], rel=1e-12)
        assert_state(trainer, expected[-1])


def test_load_state_dict_refuses_what_does_not_fit_and_changes_nothing():
    model, batch = stateful()
    state = model.state_dict()
    with piper.compile(model, mse, STAGES, batch, optimizer=sgd, backend="inprocess") as trainer:
        bad = {
            r"unexpected.*'a\.wieght'.*a\.weight": {**state, "a.wieght": state["a.weight"]},
            r"lacks 1.*a\.bias": {n: t for n, t in state.items() if n != "a.bias"},
            r"a\.bias.*expected.*\[3\].*found.*\[4\]": {**state, "a.bias": torch.ones(4)},
            r"a\.bias.*float32.*float64": {**state, "a.bias": state["a.bias"].double()},
            r"b\.weight.*a\.weight.*tied": {**state, "b.weight": state["b.weight"] + 1},
        }
        for message, wrong in bad.items():
            changed = {n: t + 1 if t.is_floating_point() else t for n, t in wrong.items()}
            with pytest.raises(StateError, match=f"(?s){message}"):
                trainer.load_state_dict(changed)
        assert all(torch.equal(state[n], t) for n, t in trainer.state_dict().items())
        trainer.step(*batch)


def test_copy_to():
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    with compiled(model) as trainer:
        trainer.step(*batch_of(0))
        assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
        weight = model.layers[0].weight
        trainer.copy_to(model)
        assert model.layers[0].weight is weight
        assert all(torch.equal(t, model.state_dict()[n]) for n, t in trainer.state_dict().items())
    assert_plain = plain(mlp(), 1)[0].state
    torch.testing.assert_close(
        weight, nn.Parameter(assert_plain["layers.0.weight"]), rtol=1e-10, atol=0
    )


def test_the_model_may_be_changed_after_compile():
    """The trainer has copies."""
    model = mlp()
    expected = plain(model, 1)
    with compiled(model) as trainer:
        with torch.no_grad():
            model.layers[0].weight.zero_()
        assert trainer.step(*batch_of(0)).loss == pytest.approx(expected[0].loss, rel=1e-12)


# --- the optimizer ---------------------------------------------------------------------------------------


def test_param_groups_by_name():
    """Options of their own for biases; the last group takes the rest."""

    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.5)

    def grouped(parameters: list[nn.Parameter]):
        biases = [p for p in parameters if p.dim() == 1]
        weights = [p for p in parameters if p.dim() > 1]
        return adamw([{"params": biases, "lr": 0.1, "weight_decay": 0.0}, {"params": weights}])

    expected = plain(mlp(), 3, grouped)
    groups = [{"names": ["*.bias"], "lr": 0.1, "weight_decay": 0.0}]
    with compiled(optimizer=adamw, param_groups=groups) as trainer:
        for step in range(3):
            trainer.step(*batch_of(step))
        assert_state(trainer, expected[-1])


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"names": ["*.biass"]}], "matches no parameter"),
        ([{"names": ["*.bias"]}, {"names": ["layers.0.*"]}], "already in"),
        ([{"lr": 0.1}], "names"),
        ([{"names": "*.bias"}], "names"),
    ],
)
def test_param_groups_that_do_not_fit(groups, message):
    with pytest.raises(ConfigError, match=message):
        compiled(param_groups=groups)


def test_a_learning_rate_schedule():
    """A factor on every group's own rate, by the number of the step."""

    def decay(step: int) -> float:
        return 0.5**step

    def grouped(parameters):
        return torch.optim.SGD(
            [{"params": parameters[:1], "lr": 0.2}, {"params": parameters[1:]}],
            lr=0.05,
            momentum=0.9,
        )

    model = mlp()
    optimizer = grouped(list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    groups = [{"names": ["layers.0.weight"], "lr": 0.2}]
    with compiled(param_groups=groups, lr_schedule=decay) as trainer:
        for step in range(4):
            wanted = eager.one_step(model, mlp_loss, batch_of(step), COUNT, optimizer)
            scheduler.step()
            trainer.fit(batch_of, 1) if step % 2 else trainer.step(*batch_of(step))
            assert_state(trainer, wanted)


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.NAdam,
    ],
)
def test_torchs_optimizers(make):
    def optimizer(parameters):
        return make(parameters, lr=1e-2, eps=1e-3)

    expected = plain(mlp(), 3, optimizer)
    with compiled(optimizer=optimizer) as trainer:
        for step in range(3):
            trainer.step(*batch_of(step))
        assert_state(trainer, expected[-1])


def test_optimizers_that_cannot_serve():
    with pytest.raises(PiperError, match="closure"):
        compiled(optimizer=torch.optim.LBFGS)
    with pytest.raises(PiperError, match=r"torch\.optim\.Optimizer"):
        compiled(optimizer=lambda parameters: parameters)


# --- the end ---------------------------------------------------------------------------------------------


def test_close_and_context_manager():
    threads = threading.active_count()
    with compiled() as trainer:
        trainer.step(*batch_of(0))
    trainer.close()
    for call in (
        lambda: trainer.step(*batch_of(0)),
        lambda: trainer.fit(batch_of, 1),
        lambda: trainer.evaluate(*batch_of(0)),
        trainer.state_dict,
        lambda: trainer.load_state_dict(mlp().state_dict()),
    ):
        with pytest.raises((StateError, RunError), match="closed"):
            call()
    assert threading.active_count() == threads


def test_an_exception_inside_the_context_closes_it_and_is_not_replaced():
    with pytest.raises(ZeroDivisionError), compiled() as trainer:
        1 / 0  # noqa: B018
    with pytest.raises((StateError, RunError), match="closed"):
        trainer.state_dict()


def test_data_that_raises_on_a_worker():
    def data(step: int) -> eager.Batch:
        if step == 2:
            raise OSError("disk gone")
        return batch_of(step)

    with compiled() as trainer:
        with pytest.raises(RunError, match=r"(?s)step 2.*disk gone"):
            trainer.fit(data, 5)
        with pytest.raises((StateError, RunError), match="closed"):
            trainer.step(*batch_of(0))


def test_a_tied_embedding_in_the_users_hands():
    """The tied name of either side is in the state_dict; a model loaded from it computes the
    trained loss.
    """
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=7,
        context=4,
        width=4,
        num_layers=2,
        num_heads=2,
        tied_embedding=True,
        num_stages=2,
    )
    model = Transformer(config).double()
    ids = torch.randint(0, 7, (8, 4))

    def loss_fn(outputs, targets):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    with piper.compile(
        model, loss_fn, PIPELINE, (ids, ids), optimizer=sgd, backend="inprocess"
    ) as trainer:
        trainer.step(ids, ids)
        trained = Transformer(config).double()
        trained.load_state_dict(trainer.state_dict())
        assert trained.head.weight is trained.token_embedding.weight
        loss = trainer.evaluate(ids, ids).loss
    assert loss == pytest.approx(loss_fn(trained(ids), ids).item(), rel=1e-12)

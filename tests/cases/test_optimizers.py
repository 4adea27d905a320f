"""Functions that make optimizers, in the forms in which users write them: equal to PyTorch, or an
error that says what to write.
"""

import copy
import random

import numpy as np
import pytest
import torch
from tests.cases.equal import mse, randn
from torch import nn

import piper
from piper.errors import ConfigError


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 6, bias=False)

    def forward(self, x):
        with piper.annotate("PP", 0):
            x = self.norm(self.a(x)).tanh()
        with piper.annotate("PP", 1):
            return self.b(x)


BATCH = randn(8, 6), randn(8, 6, seed=1)
PIPELINE = piper.strategies.pipeline("1f1b", [[0], [1]], 2)


def replicated(zero):
    return piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 2, zero=zero)


def plain(build, model, batches, pieces):
    """Plain PyTorch on *model*, in place; *build* is given its parameters. The losses."""
    optimizers = build(model)
    losses = []
    for x, y in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        parts = zip(x.chunk(pieces), y.chunk(pieces), strict=True)
        total = sum(mse(model(rows), targets) for rows, targets in parts) / pieces
        total.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(total.item())
    return losses


def assert_equal_to_plain(build, optimizer, strategy, model=None, steps=3, **given):
    """*build* makes the optimizers of plain PyTorch from a model, *optimizer* is piper's."""
    model = (Two() if model is None else model).double()
    batches = [(randn(8, 6, seed=s), randn(8, 6, seed=s + 50)) for s in range(steps)]
    with piper.compile(
        model, mse, strategy, batches[0], optimizer=optimizer, backend="inprocess", **given
    ) as trainer:
        plan = trainer.program.plan
        found = [trainer.step(*batch).loss for batch in batches]
        state = trainer.state_dict()
    pieces = plan.num_replicas * plan.num_microbatches
    assert found == pytest.approx(plain(build, model, batches, pieces), rel=1e-10)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-9, atol=1e-12)


def one(optimizer):
    return lambda model: [optimizer(list(model.parameters()))]


# --- what a function captured stays as it is --------------------------------------------------------


@pytest.mark.parametrize("strategy", [PIPELINE, replicated(0), replicated(3)])
def test_a_tensor_as_learning_rate_is_never_written(strategy):
    rate, decay = torch.tensor(0.3), torch.tensor(0.1, dtype=torch.float64)

    def optimizer(params):
        return torch.optim.SGD(params, lr=rate, weight_decay=decay, foreach=False)

    assert_equal_to_plain(one(optimizer), optimizer, strategy)
    assert (rate.item(), decay.item()) == (torch.tensor(0.3).item(), 0.1)


def test_learning_rates_of_groups_are_tensors_of_each_device(tmp_path):
    rate, groups = torch.tensor(0.3), [{"names": ["a.*"], "lr": torch.tensor(0.2)}]
    given = {
        "optimizer": lambda params: torch.optim.SGD(params, lr=rate, foreach=False),
        "param_groups": groups,
        "lr_schedule": lambda step: 1 / (1 + step),
        "backend": "inprocess",
    }
    with piper.compile(Two().double(), mse, replicated(1), BATCH, **given) as trainer:
        for _ in range(3):
            trainer.step(*BATCH)
        trainer.lr_factor = 0.5
        trainer.save(tmp_path / "saved")
        trainer.step(*BATCH)
        expected = trainer.state_dict()
        trainer.load(tmp_path / "saved")
        assert trainer.lr_factor == 0.5
        trainer.step(*BATCH)
        found = trainer.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert rate.item() == torch.tensor(0.3).item()
    assert groups[0]["lr"].item() == torch.tensor(0.2).item()


class Lion(torch.optim.Optimizer):
    """An optimizer that is tried before it is used, and changes the options of its groups."""

    def __init__(self, params, lr, history):
        super().__init__(params, {"lr": lr, "history": history})
        random.random()
        np.random.rand()  # noqa: NPY002 (what users write)
        torch.rand(())

    def step(self):
        with torch.no_grad():
            for group in self.param_groups:
                group["history"]["calls"].append(1)
                group["lr"].add_(0)
                for p in (p for p in group["params"] if p.grad is not None):
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    average.lerp_(p.grad, 0.1)
                    p.sub_(group["lr"] * average.sign())


def test_an_optimizer_is_tried_without_a_trace():
    history, rate = {"calls": []}, torch.tensor(0.3)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    expected = random.random(), np.random.rand(), torch.rand(())  # noqa: NPY002
    model = Two().double()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    with piper.compile(
        model,
        mse,
        replicated(2),
        BATCH,
        optimizer=lambda params: Lion(params, rate, history),
        backend="inprocess",
    ) as trainer:
        assert (random.random(), np.random.rand(), torch.rand(())) == expected  # noqa: NPY002
        trainer.step(*BATCH)
    assert history == {"calls": []}
    assert rate.item() == torch.tensor(0.3).item()


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_state_that_a_function_loads_is_cut_like_the_parameters(zero):
    model = Two().double()
    warm = torch.optim.Adam(model.parameters(), lr=0.1, eps=1e-3)
    for parameter in model.parameters():
        parameter.grad = randn(*parameter.shape, seed=7)
    warm.step()
    warm.zero_grad()
    saved = warm.state_dict()
    before = saved["state"][0]["exp_avg"].clone()

    def optimizer(params):
        made = torch.optim.Adam(params, lr=0.1, eps=1e-3)
        made.load_state_dict(saved)
        return made

    def unshared(model):
        made = torch.optim.Adam(model.parameters(), lr=0.1, eps=1e-3)
        made.load_state_dict(copy.deepcopy(saved))  # torch itself would share and write it
        return [made]

    assert_equal_to_plain(unshared, optimizer, replicated(zero), model)
    assert torch.equal(saved["state"][0]["exp_avg"], before)


# --- which tensors it holds -------------------------------------------------------------------------


def always(made):
    return lambda _: made


def refused(optimizer, match, strategy=PIPELINE, **given):
    model = Two()
    factory = optimizer(model) if given.pop("of_model", False) else optimizer
    setup = {"optimizer": factory, **given}
    batch = BATCH[0].float(), BATCH[1].float()
    with pytest.raises(ConfigError, match=match):
        piper.compile(model, mse, strategy, batch, backend="inprocess", **setup)
    with pytest.raises(ConfigError, match=match):
        piper.check(model, mse, strategy, batch, **setup)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda m: lambda _: torch.optim.SGD(m.parameters(), lr=0.5),
        lambda m: lambda p: torch.optim.SGD([*p, m.a.weight], lr=0.5),
        lambda m: always(torch.optim.SGD(m.parameters(), lr=0.5)),
        lambda m: lambda p: torch.optim.SGD([t.detach().clone() for t in p], lr=0.5),
    ],
    ids=["ignores its argument", "adds one", "an optimizer made before", "copies"],
)
def test_tensors_that_it_was_not_given(optimizer):
    refused(
        optimizer, r"SGD over \d tensors that it was not given.*over the argument", of_model=True
    )


@pytest.mark.parametrize(
    ("optimizer", "match"),
    [
        (
            lambda p: torch.optim.SGD(p[1:], lr=0.5),
            r"without 1 of the 5.*'a.weight'.*requires_grad",
        ),
        (lambda p: torch.optim.SGD([t for t in p if t.ndim > 1], lr=0.5), "without 3 of the 5"),
    ],
)
def test_tensors_that_it_leaves_out(optimizer, match):
    refused(optimizer, match)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_tensor_that_it_has_twice():
    refused(lambda p: torch.optim.SGD([*p, p[0]], lr=0.5), r"'a.weight' twice")


# --- groups that it makes itself --------------------------------------------------------------------


def by_dimensions(params):
    """The recipe of nanoGPT."""
    params = list(params)
    return torch.optim.AdamW(
        [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.5},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
        eps=1e-3,
    )


def by_data(params):
    """Many look at ``p.data``."""
    big = [p for p in params if p.data.numel() > 20 and len(p.data.shape) == 2]
    rest = [p for p in params if all(p is not b for b in big)]
    groups = [{"params": big, "lr": 0.2}, {"params": rest}]
    return torch.optim.Adagrad(groups, lr=0.1, initial_accumulator_value=0.5)


def by_position(params):
    """A rate of its own for each."""
    groups = [{"params": [p], "lr": 0.1 * 0.7**i} for i, p in enumerate(params)]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def by_shape(params):
    return torch.optim.SGD(
        [{"params": [p], "lr": p.shape[0] / 50 + p.numel() / 999} for p in params]
    )


def by_type(params):
    wide = [p for p in params if p.dtype is torch.float64 and p.is_leaf and p.requires_grad]
    return torch.optim.SGD([{"params": wide, "lr": 0.2}])


@pytest.mark.parametrize("optimizer", [by_dimensions, by_data, by_position, by_shape, by_type])
@pytest.mark.parametrize(
    "zero", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full), 3]
)
def test_groups_by_what_parameters_are(optimizer, zero):
    assert_equal_to_plain(one(optimizer), optimizer, replicated(zero))


def by_attribute(params):
    return torch.optim.AdamW(
        [
            {"params": [p for p in params if not getattr(p, "no_decay", False)]},
            {"params": [p for p in params if hasattr(p, "no_decay")], "weight_decay": 0.0},
        ],
        weight_decay=0.5,
        lr=0.01,
        eps=1e-3,
    )


@pytest.mark.parametrize("zero", [0, 2])
def test_attributes_that_users_set_on_parameters(zero):
    model = Two()
    model.a.weight.no_decay = True
    assert_equal_to_plain(one(by_attribute), by_attribute, replicated(zero), model)
    assert model.a.weight.no_decay


def test_an_attribute_that_devices_do_not_get():
    model = Two().double()
    model.a.weight.owner = object()
    with pytest.raises(ConfigError, match=r"attribute 'owner' .*param_groups="):
        piper.compile(
            model,
            mse,
            PIPELINE,
            BATCH,
            optimizer=lambda ps: torch.optim.SGD(
                [{"params": [p], "lr": 0.1 * hasattr(p, "owner")} for p in ps]
            ),
            backend="inprocess",
        )


def test_parameters_known_by_identity():
    def of(model):
        decayed = {id(model.a.weight)}

        def optimizer(params):
            groups = [
                {"params": [p for p in params if id(p) in decayed], "weight_decay": 0.5},
                {"params": [p for p in params if id(p) not in decayed]},
            ]
            return torch.optim.SGD(groups, lr=0.1)

        return optimizer

    refused(
        of,
        r"'a.weight' gets weight_decay=0.5 among its own, weight_decay=0.*param_groups=",
        of_model=True,
    )


def test_groups_of_a_functions_own_are_in_a_checkpoint(tmp_path):
    """And fit any layout."""
    model, given = Two().double(), {"optimizer": by_dimensions, "backend": "inprocess"}
    with piper.compile(model, mse, replicated(3), BATCH, **given) as trainer:
        trainer.step(*BATCH)
        trainer.save(tmp_path / "saved")
        trainer.step(*BATCH)
        expected = trainer.state_dict()
    strategy = piper.strategies.pipeline("1f1b", [[0], [1]], 4)
    with piper.compile(Two().double(), mse, strategy, BATCH, **given) as trainer:
        trainer.load(tmp_path / "saved")
        trainer.step(*BATCH)
        found = trainer.state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_optimizers_that_look_at_shapes_as_they_step(name, zero):
    refused(
        {("a.weight", "b.weight"): getattr(torch.optim, name), "*": torch.optim.SGD},
        rf"{name} .*whole parameters, but the strategy shards .*zero=0",
        replicated(zero),
    )


# --- several ----------------------------------------------------------------------------------------


def muon(params):
    return torch.optim.Muon(params, lr=0.02, weight_decay=0.1)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01, eps=1e-3)


MUON_BESIDE_ADAMW = {("a.weight", "b.*"): muon, "*": adamw}


def muon_beside_adamw(model):
    matrices = [model.a.weight, model.b.weight]
    rest = [model.a.bias, *model.norm.parameters()]
    return [muon(matrices), adamw(rest)]


@pytest.mark.parametrize("strategy", [PIPELINE, replicated(0)])
def test_one_optimizer_for_matrices_and_one_for_the_rest(strategy):
    assert_equal_to_plain(muon_beside_adamw, MUON_BESIDE_ADAMW, strategy)
    report = piper.check(
        Two(), mse, strategy, BATCH, optimizer=MUON_BESIDE_ADAMW, max_grad_norm=0.1
    )
    report.require()


@pytest.mark.parametrize("zero", [1, 3])
def test_several_elementwise_optimizers_are_sharded(zero):
    optimizer = {"*.weight": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "*": adamw}

    def build(model):
        weights = [model.a.weight, model.norm.weight, model.b.weight]
        return [optimizer["*.weight"](weights), adamw([model.a.bias, model.norm.bias])]

    assert_equal_to_plain(build, optimizer, replicated(zero))


def test_several_optimizers_with_groups_a_schedule_and_checkpoints(tmp_path):
    given = {
        "optimizer": MUON_BESIDE_ADAMW,
        "param_groups": [{"names": ["*.bias", "b.*"], "lr": 0.05}],
        "lr_schedule": lambda step: 1 / (1 + step),
        "backend": "inprocess",
    }
    with piper.compile(Two().double(), mse, replicated(0), BATCH, **given) as trainer:
        trainer.step(*BATCH)
        trainer.save(tmp_path / "saved")
        for _ in range(2):
            trainer.step(*BATCH)
        expected = trainer.state_dict()
    strategy = piper.strategies.pipeline("1f1b", [[0], [1]], 4)
    with piper.compile(Two().double(), mse, strategy, BATCH, **given) as trainer:
        trainer.load(tmp_path / "saved")
        for _ in range(2):
            trainer.step(*BATCH)
        found = trainer.state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)


def test_a_checkpoint_of_other_optimizers_does_not_fit(tmp_path):
    given = {"backend": "inprocess"}
    with piper.compile(
        Two().double(), mse, PIPELINE, BATCH, optimizer=MUON_BESIDE_ADAMW, **given
    ) as trainer:
        trainer.step(*BATCH)
        trainer.save(tmp_path / "saved")
    with piper.compile(Two().double(), mse, PIPELINE, BATCH, optimizer=adamw, **given) as trainer:
        with pytest.raises(piper.errors.CheckpointError, match=r"groups|Muon"):
            trainer.load(tmp_path / "saved")
        trainer.step(*BATCH)


@pytest.mark.parametrize(
    ("optimizer", "match"),
    [
        ({"*": adamw, "*.bias": muon}, r"pattern '\*.bias' matches.*belong to patterns before it"),
        ({"a.*": adamw}, r"no pattern matches parameter 'norm.weight' \(3 such"),
        ({"c.*": adamw, "*": adamw}, r"pattern 'c.\*' matches no parameter"),
        ({"*": "adamw"}, "mapping from patterns .*found str"),
        ({3: adamw}, "found the key 3"),
        ({}, "empty mapping"),
        ({"*": muon}, r"Muon only supports 2D parameters whereas.*\[4\]"),
    ],
)
def test_mappings_that_make_no_sense(optimizer, match):
    refused(optimizer, match)

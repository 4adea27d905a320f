"""Parameters, optimizer and schedules of one device, against plain torch."""

import pytest
import torch

from piper.dtypes import DType
from piper.errors import ConfigError, StateError
from piper.ir.body import TensorSpec
from piper.ir.dag import Parameter
from piper.runtime.optimizer import OptimizerSpec
from piper.runtime.snapshot import StateSnapshot
from piper.runtime.state import ModelState

CPU = torch.device("cpu")
SPEC = TensorSpec((3,), DType.FLOAT64)


def parameter(name: str, *aliases: str, trained: bool = True) -> Parameter:
    return Parameter(name, SPEC, trained, aliases)


MODEL = {
    p.name: p
    for p in (
        parameter("wte.weight", "head.weight"),
        parameter("h.0.weight"),
        parameter("h.0.bias"),
        parameter("h.1.weight"),
        parameter("h.1.bias"),
        parameter("frozen.weight", trained=False),
    )
}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(3, dtype=torch.float64, generator=generator) for n in MODEL}


def gradients(step: int, names=None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 + step)
    every = {n: torch.randn(3, dtype=torch.float64, generator=generator) for n in MODEL}
    trained = [n for n, p in MODEL.items() if p.requires_grad]
    return {n: every[n] for n in (trained if names is None else names)}


def state(build, names=None, **options) -> ModelState:
    own = {n: t for n, t in tensors().items() if names is None or n in names}
    return ModelState(own, {}, MODEL, OptimizerSpec(build, **options), CPU)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.1, weight_decay=0.1)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


OPTIMIZERS = [
    sgd,
    adamw,
    lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    lambda params: torch.optim.RMSprop(params, lr=0.1),
    lambda params: torch.optim.Adagrad(params, lr=0.1),
    lambda params: torch.optim.NAdam(params, lr=0.1),
    torch.optim.Adadelta,
    lambda params: torch.optim.RAdam(params, lr=0.1),
]


@pytest.mark.parametrize("build", OPTIMIZERS)
def test_updates_equal_torch_and_skip_parameters_without_gradient(build):
    mine = state(build)
    plain = {n: t.clone().requires_grad_(MODEL[n].requires_grad) for n, t in tensors().items()}
    optimizer = build([p for p in plain.values() if p.requires_grad])
    for step, names in enumerate([None, ["h.0.bias", "h.1.weight"], None, ["h.1.bias"]]):
        given = gradients(step, names)
        mine.update(given, None)
        optimizer.zero_grad(set_to_none=True)
        for name, gradient in given.items():
            plain[name].grad = gradient.clone()
        optimizer.step()
        for name, tensor in plain.items():
            assert torch.equal(mine.parameters[name], tensor), (name, step)
    assert all(p.grad is None for p in mine.parameters.values())


def test_the_update_may_come_in_parts():
    whole, parts = state(adamw), state(adamw)
    for step in range(3):
        given = gradients(step)
        whole.update(given, None)
        for name, gradient in given.items():
            parts.update({name: gradient}, None)
    for name, tensor in whole.parameters.items():
        assert torch.equal(parts.parameters[name], tensor)


def test_gradients_are_divided_by_the_scale_and_left_as_they_were():
    mine, other = state(sgd), state(sgd)
    given = gradients(0)
    kept = {n: g.clone() for n, g in given.items()}
    mine.update(given, torch.tensor(4.0, dtype=torch.float64))
    other.update({n: g / 4 for n, g in kept.items()}, None)
    assert all(torch.equal(given[n], kept[n]) for n in given)
    assert all(torch.equal(mine.parameters[n], t) for n, t in other.parameters.items())


def test_learning_rates_follow_the_factor_from_each_groups_own():
    groups = ({"names": ["*.bias"], "lr": 1.0},)
    mine = state(sgd, param_groups=groups)
    plain = {n: t.clone().requires_grad_() for n, t in tensors().items() if MODEL[n].requires_grad}
    biases = [p for n, p in plain.items() if n.endswith("bias")]
    rest = [p for n, p in plain.items() if not n.endswith("bias")]
    optimizer = sgd([{"params": biases, "lr": 1.0}, {"params": rest}])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for step in range(4):
        given = gradients(step)
        mine.begin_step(0.5**step)
        mine.update(given, None)
        for name, gradient in given.items():
            plain[name].grad = gradient.clone()
        optimizer.step()
        scheduler.step()
    for name, tensor in plain.items():
        assert torch.equal(mine.parameters[name], tensor)


def test_a_device_may_hold_no_parameter_of_a_group():
    groups = ({"names": ["h.0.*"], "lr": 1.0},)
    mine = state(sgd, names=["h.1.bias"], param_groups=groups)
    before = mine.parameters["h.1.bias"].clone()
    mine.update({"h.1.bias": torch.ones(3, dtype=torch.float64)}, None)
    assert torch.equal(mine.parameters["h.1.bias"], before - 0.1)
    assert [g.get("lr") for g in mine.snapshot([], optimizer=True).optimizer.groups] == [1.0, 0.1]


def test_a_device_with_nothing_to_train_has_no_optimizer():
    mine = state(lambda params: pytest.fail("not called"), names=["frozen.weight"])
    assert mine.snapshot(["frozen.weight"], optimizer=True).optimizer is None


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (torch.optim.LBFGS, "LBFGS.* needs a closure"),
        (lambda params: "adam", "must return a torch.optim.Optimizer, found str"),
    ],
)
def test_optimizers_that_cannot_serve_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        state(build)


def test_without_an_optimizer_an_update_says_so():
    mine = ModelState(tensors(), {}, MODEL, None, CPU)
    with pytest.raises(StateError, match="pass optimizer="):
        mine.update(gradients(0), None)


@pytest.mark.parametrize("build", OPTIMIZERS)
def test_training_goes_on_from_a_snapshot_on_devices_that_split_the_parameters(build):
    mine = state(build)
    for step in range(2):
        mine.begin_step(1 / (1 + step))
        mine.update(gradients(step), None)
    snapshot = mine.snapshot(MODEL, optimizer=True)
    assert snapshot.optimizer.groups[0]["lr"] == build([torch.zeros(1)]).defaults["lr"]
    halves = []
    for names in (
        ["wte.weight", "h.0.bias", "frozen.weight"],
        ["h.0.weight", "h.1.weight", "h.1.bias"],
    ):
        half = state(build, names=names)
        half.restore(snapshot)
        halves.append(half)
    for step in range(2, 4):
        given = gradients(step)
        for part in (mine, *halves):
            part.begin_step(1 / (1 + step))
            part.update({n: g for n, g in given.items() if n in part.parameters}, None)
    for half in halves:
        for name, tensor in half.parameters.items():
            assert torch.equal(tensor, mine.parameters[name])


def test_restoring_writes_into_the_same_tensors():
    mine = state(sgd)
    held = mine.parameters["h.0.bias"]
    mine.restore(StateSnapshot({n: t + 1 for n, t in tensors().items()}, {}, None))
    assert mine.tensor("h.0.bias") is held
    assert torch.equal(held, tensors()["h.0.bias"] + 1)


def test_a_parameter_of_another_shape_or_type_is_refused():
    bad = {**tensors(), "h.0.bias": torch.zeros(4, dtype=torch.float64)}
    with pytest.raises(StateError, match=r"'h.0.bias': expected float64\[3\], found float64\[4\]"):
        ModelState(bad, {}, MODEL, None, CPU)
    bad = {**tensors(), "h.0.bias": torch.zeros(3)}
    with pytest.raises(StateError, match=r"expected float64\[3\], found float32\[3\]"):
        ModelState(bad, {}, MODEL, None, CPU)


def test_buffers_are_copied_in_place():
    given = {"mean": torch.zeros(3)}
    mine = ModelState({}, given, MODEL, None, CPU)
    held = mine.tensor("mean")
    mine.write_buffer("mean", torch.ones(3))
    assert held.tolist() == [1.0] * 3
    assert given["mean"].tolist() == [0.0] * 3
    with pytest.raises(StateError, match="holds no parameter or buffer 'var'"):
        mine.tensor("var")

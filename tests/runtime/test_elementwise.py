"""Which optimizers may update slices, or the parameters of one device alone; those that may do so
equal single-process training.
"""

import pytest
import torch
from tests.cases.equal import mse, randn
from torch import nn

import piper
from piper.backends import InProcessBackend
from piper.dtypes import DType
from piper.errors import ConfigError
from piper.ir.body import TensorSpec
from piper.ir.dag import Parameter
from piper.runtime.device_optimizer import outline
from piper.runtime.elementwise import ELEMENTWISE, _representatives, _Trial, check_optimizer
from piper.runtime.optimizer import OptimizerSpec

pytestmark = pytest.mark.timeout(120)


def parameter(name: str, *shape: int, trained: bool = True) -> Parameter:
    return Parameter(name, TensorSpec(shape, DType.FLOAT64), trained)


MODEL = {
    p.name: p
    for p in (
        parameter("a.weight", 64, 32),
        parameter("a.bias", 64),
        parameter("b.weight", 32, 64),
        parameter("b.gain"),
        parameter("frozen", 9, trained=False),
    )
}
WEIGHTS = ["a.weight", "b.weight"]
ALL = [*WEIGHTS, "a.bias", "b.gain"]


class Custom(torch.optim.Optimizer):
    """A new optimizer whose update is ``direction(gradient, state)``."""

    def __init__(self, params, lr=0.0):
        super().__init__(params, {"lr": lr})

    def step(self):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(group["lr"] * self.direction(p.grad, self.state[p]))

    def direction(self, gradient, state):
        raise NotImplementedError


class Lion(Custom):
    def direction(self, gradient, state):
        average = state.setdefault("average", torch.zeros_like(gradient))
        average.mul_(0.9).add_(gradient, alpha=0.1)
        return average.sign()


class Normed(Custom):
    """Each parameter's gradient by its norm."""

    def direction(self, gradient, state):
        return gradient / gradient.norm()


class Late(Custom):
    """As plain as SGD for ten steps."""

    def direction(self, gradient, state):
        state["count"] = state.get("count", 0) + 1
        return gradient if state["count"] <= 10 else gradient / gradient.norm()


class Clipped(Custom):
    """All gradients by their common norm."""

    def step(self):
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(
            [p for g in self.param_groups for p in g["params"]],
            0.1,
            torch.nn.utils.get_total_norm(grads),
        )
        super().step()

    def direction(self, gradient, state):
        return gradient


class NoisySGD(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.grad.add_(torch.randn(p.shape, dtype=p.dtype))
        super().step()


def hooked(params):
    optimizer = torch.optim.SGD(params, lr=0.1)

    def clip(optimizer, *_):
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def rate(name, **options):
    return lambda params: getattr(torch.optim, name)(params, lr=0.01, **options)


def check(build, sharded=(), num_devices=4, **options):
    check_optimizer(OptimizerSpec(build, **options), MODEL, sharded, num_devices)


@pytest.mark.parametrize("cls", sorted(ELEMENTWISE, key=lambda c: c.__name__))
@pytest.mark.parametrize("sharded", [ALL, []])
def test_the_known_ones_pass_the_trial_too(cls, sharded):
    spec = OptimizerSpec(type("Unknown", (cls,), {}))
    check(spec.build, sharded)
    (part,) = outline(spec, MODEL).parts
    trial = _Trial(spec, MODEL, _representatives(part, MODEL, sharded), sharded)
    trial.run("Unknown", alone=False)


@pytest.mark.parametrize("build", [Lion, lambda ps: Lion(ps, torch.tensor(0.0)), rate("Adam")])
def test_an_elementwise_optimizer_may_update_slices(build):
    check(build, ALL)


@pytest.mark.parametrize(
    ("build", "name"),
    [(rate("Adafactor"), "Adafactor"), (Normed, "Normed"), (Late, "Late")],
)
def test_whole_parameters_are_given_or_the_optimizer_is_refused(build, name):
    check(build)
    with pytest.raises(ConfigError, match=rf"optimizer {name} .*needs whole.*'a.weight'.*zero=0"):
        check(build, WEIGHTS)


def test_matrices_are_given_whole_or_refused():
    matrices = {name: MODEL[name] for name in WEIGHTS}
    spec = OptimizerSpec(rate("Muon"))
    check_optimizer(spec, matrices, [], 4)
    with pytest.raises(ConfigError, match=r"Muon cannot update a slice.*without shard_optimizer"):
        check_optimizer(spec, matrices, WEIGHTS, 4)


def test_groups_are_tried_with_their_options():
    """Only what is sharded must be elementwise, and each group has its own options."""

    class PerGroup(Normed):
        def __init__(self, params):
            torch.optim.Optimizer.__init__(self, params, {"lr": 0.1, "whole": False})

        def step(self):
            for group in self.param_groups:
                for p in (p for p in group["params"] if p.grad is not None):
                    p.data.sub_(p.grad / p.grad.norm() if group["whole"] else p.grad)

    groups = ({"names": ["*.weight"], "whole": True},)
    check(PerGroup, ["a.bias", "b.gain"], param_groups=groups)
    with pytest.raises(ConfigError, match=r"PerGroup"):
        check(PerGroup, WEIGHTS, param_groups=groups)
    check(PerGroup, WEIGHTS)


@pytest.mark.parametrize("build", [Clipped, NoisySGD, hooked])
def test_parameters_that_depend_on_each_other_are_refused_on_several_devices(build):
    check(build, num_devices=1)
    with pytest.raises(ConfigError, match=r"when it is alone.*max_grad_norm="):
        check(build)


def test_an_optimizer_that_cannot_be_tried():
    def picky(params):
        assert all(p.numel() > 100 for p in params), "only large parameters"
        return Lion(params)

    with pytest.raises(ConfigError, match=r"optimizer= failed over .*only large parameters"):
        check(picky)


def test_a_function_may_look_at_the_size_of_the_models_parameters():
    """The small tensors on which it is tried are not what it sees."""

    def picky(params):
        assert sorted(p.numel() for p in params) == [1, 64, 2048, 2048]
        return Lion(params)

    check(picky, ALL)


def test_an_optimizer_that_counts_its_calls_is_refused():
    """A device updates parameters as soon as their gradients are there: several calls a step."""

    class Counting(Custom):
        def __init__(self, params):
            torch.optim.Optimizer.__init__(self, params, {"lr": 0.1, "calls": 0})

        def step(self):
            for group in self.param_groups:
                group["calls"] += 1
            super().step()

        def direction(self, gradient, state):
            return gradient * self.param_groups[0]["calls"]

    with pytest.raises(ConfigError, match=r"Counting .*such as a count of calls"):
        check(Counting)


# --- in training ------------------------------------------------------------------------------------


class Two(nn.Module):
    """The gradient of ``shift`` is one number in memory; the last parameters are smaller than the
    group.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 2)
        self.shift = nn.Parameter(torch.randn(2, 3))
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        with piper.annotate("PP", 0):
            x = self.first(x).tanh()
        with piper.annotate("PP", 1):
            return self.second(x) * self.gain + self.shift.sum()


BATCH = randn(12, 3), randn(12, 2, seed=1)
NAMES = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_sharded_training_with_any_of_them_is_equal(name):
    strategy = piper.strategies.pipeline("1f1b", [[0, 1, 2]], 1, zero=1)
    strategy[0] = piper.Place({}, devices=[0, 1, 2])
    strategy = strategy[:3]
    piper.check(Two(), mse, strategy, BATCH, optimizer=rate(name), steps=3).require()


@pytest.mark.parametrize("name", ["Adam", "SGD", "Adagrad"])
@pytest.mark.parametrize("variant", ["fused", "foreach"])
@pytest.mark.parametrize(("groups", "zero"), [([[0], [1]], 0), ([[0, 1], [2, 3]], 2)])
def test_fused_and_foreach(name, variant, groups, zero):
    strategy = piper.strategies.pipeline("1f1b", groups, len(groups[0]), zero=zero)
    build = rate(name, **{variant: True})
    piper.check(Two(), mse, strategy, BATCH, optimizer=build, steps=3).require()


def test_refused_before_any_worker_starts():
    started = []

    class Backend(InProcessBackend):
        def start(self, num_devices):
            started.append(num_devices)

    strategy = piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 2, zero=3)
    with pytest.raises(ConfigError, match=r"Adafactor"):
        piper.compile(
            Two().double(), mse, strategy, BATCH, optimizer=rate("Adafactor"), backend=Backend()
        )
    assert not started


@pytest.mark.parametrize("name", ["NAdam", "ASGD", "Adagrad"])
@pytest.mark.parametrize(("first", "second"), [(2, 0), (0, 3)])
def test_optimizer_state_moves_between_layouts(name, first, second):
    """Also what an optimizer keeps once per parameter."""
    trained = []
    for zero in (first, second):
        strategy = piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 1, zero=zero)
        trainer = piper.compile(
            Two().double(), mse, strategy, BATCH, optimizer=rate(name), backend="inprocess"
        )
        with trainer:
            if trained:
                trainer._backend.restore(trained[0])
                trainer._step = 2
            for _ in range(2 if not trained else 1):
                trainer.step(*BATCH)
            trained.append(trainer._backend.snapshot())
    strategy = piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 1)
    trainer = piper.compile(
        Two().double(), mse, strategy, BATCH, optimizer=rate(name), backend="inprocess"
    )
    with trainer:
        for _ in range(3):
            trainer.step(*BATCH)
        expected = trainer._backend.snapshot()
    for parameter, tensor in expected.parameters.items():
        torch.testing.assert_close(trained[1].parameters[parameter], tensor, rtol=1e-12, atol=0)
        for key, value in expected.optimizer.state[parameter].items():
            found = trained[1].optimizer.state[parameter][key]
            torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(value))

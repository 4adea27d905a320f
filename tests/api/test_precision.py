"""Mixed precision as users meet it: compile, check, evaluate, saved weights, accumulation, a scaled
loss.
"""

import copy
import math

import pytest
import torch
from torch import nn

import piper
from piper.api.programs import Programs, model_tensors
from piper.backends.inprocess import InProcessBackend
from piper.backends.measured import measure
from piper.capture.precision import make_precision
from piper.errors import CheckError, ConfigError
from piper.ir.dag import Role
from piper.plan.account import account, adam_bytes
from piper.runtime.optimizer import OptimizerSpec
from piper.schedules.placements import chain

FP16 = piper.Precision(
    compute=torch.float16, loss_scale=piper.LossScale(init=2.0**10, growth_interval=2)
)


def data(step=0, rows=8):
    make = torch.Generator().manual_seed(step)
    return torch.randn(rows, 4, generator=make), torch.randn(rows, 3, generator=make)


class Model(nn.Module):
    """A scalar, a weight shared by both stages, a frozen weight, one that is read but not trained
    through, one that nothing uses, a buffer; sizes that no group divides.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        self.gain, self.shared = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(5))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("offset", torch.randn(5))

    def forward(self, x):
        with piper.annotate("PP", 0):
            x = self.first(x).tanh() * self.shared * self.frozen
        with piper.annotate("PP", 1):
            x = x + self.offset.to(x.dtype) * self.shared.tanh() + self.first.bias.detach()
            return self.second(x) * self.gain


def mse(outputs, targets):
    return nn.functional.mse_loss(outputs, targets)


def weighted(outputs, targets):
    weight = (targets > 0).float()
    return (weight * (outputs - targets) ** 2).sum(), weight.sum()


def counted(outputs, targets):
    """The weight is an integer."""
    return ((outputs - targets) ** 2).sum(), torch.tensor(targets.shape[0])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.02, eps=1e-3)


def strategy(groups=((0, 1), (2, 3)), microbatches=2, **options):
    replicate = [piper.Replicate({}, **options)] if len(groups[0]) > 1 else []
    split = piper.Split({}, num_microbatches=microbatches)
    return [*chain([list(g) for g in groups]), *replicate, split]


ZERO = [{}, {"shard_optimizer": True}, {"shard_grads": True}, {"shard_params": True}]
SOME = [
    ZERO[0],
    pytest.param(ZERO[1], marks=pytest.mark.full),
    pytest.param(ZERO[2], marks=pytest.mark.full),
    ZERO[3],
]
"""The extremes; all of them in `make test-full`."""

HYBRID = [
    piper.Place({}, devices=[0, 1, 2, 3]),
    piper.Replicate({}, devices=[[0, 1], [2, 3]], shard_params=True),
    piper.Split({}, num_microbatches=2),
]


ALONE = [piper.Split({}, num_microbatches=4)]
"""On one device, in as many microbatches."""


def compiled(how, batch=None, loss=mse, model=None, **options):
    options = {"optimizer": adam, "precision": "bf16", "backend": "inprocess", **options}
    return piper.compile(model or Model(), loss, how, batch or data(), **options)


@pytest.mark.parametrize(
    "how", [*(strategy(**options) for options in ZERO), HYBRID], ids=[0, 1, 2, 3, "hybrid"]
)
def test_equal_to_one_process(how):
    """What is shared between stages, frozen, only read, not used; sliced where a group shards,
    whole where not.
    """
    precision = FP16 if "shard_grads=True" in str(how) else "bf16"
    report = piper.check(Model(), mse, how, data, optimizer=adam, steps=3, precision=precision)
    report.require()
    assert report.tolerance == 1e-5


@pytest.mark.parametrize(
    ("loss", "max_grad_norm"), [(weighted, None), (counted, 0.1), (weighted, math.inf)]
)
def test_a_weighted_scaled_loss(loss, max_grad_norm):
    """Divided by the weight and the scale, once each."""
    options = {"steps": 2, "optimizer": sgd, "precision": FP16, "max_grad_norm": max_grad_norm}
    how = strategy(shard_grads=True)
    report = piper.check(Model(), loss, how, data, norm_type=math.inf, **options)
    report.require()
    assert report.steps[0].gradients.by_name


def test_tables_name_the_policy():
    report = piper.check(Model(), mse, ALONE, data(), optimizer=sgd, steps=1, precision="bf16")
    assert report.precision == make_precision("bf16")
    exact = piper.check(Model(), mse, ALONE, data(), optimizer=sgd, steps=1)
    assert (exact.precision, exact.tolerance) == (None, 1e-10)


def test_the_comparison_is_not_satisfied_with_anything():
    """A policy that one side alone follows is told apart."""
    how, batch = ALONE, data()
    with compiled(how, optimizer=sgd) as trainer:
        short = trainer.step(*batch).loss
    with compiled(how, optimizer=sgd, precision=None) as trainer:
        long = trainer.step(*batch).loss
    assert abs(short - long) > 1e-5 * abs(long)
    report = piper.check(
        Model(), mse, how, batch, optimizer=sgd, steps=2, precision=FP16, tolerance=0.0
    )
    with pytest.raises(CheckError):
        report.require()


def test_the_reference_is_plain_pytorch_where_that_is_simple():
    """Torch's own scaler and one float16 copy per step, on a model that uses everything once."""
    torch.manual_seed(1)
    model, policy = nn.Linear(4, 3), FP16
    plain = copy.deepcopy(model)
    optimizer = adam(plain.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        for part in zip(*(t.chunk(2) for t in data(step)), strict=True):
            short = {n: p.half() for n, p in plain.named_parameters()}
            out = torch.func.functional_call(plain, short, (part[0].half(),)).float()
            scaler.scale(mse(out, part[1]) / 2).backward()
            losses.append(float(mse(out.detach(), part[1])))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    how = [piper.Split({}, num_microbatches=2)]
    with compiled(how, model=model, precision=policy, max_grad_norm=0.1) as trainer:
        results = [trainer.step(*data(step)) for step in range(4)]
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(trainer.state_dict()[name], tensor, rtol=1e-6, atol=1e-8)
    assert [r.loss for r in results] == pytest.approx(
        [(losses[2 * i] + losses[2 * i + 1]) / 2 for i in range(4)], rel=1e-6
    )
    assert trainer.loss_scaler.scale == scaler.get_scale() == 2.0**12


# --- saved weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", SOME, ids=str)
def test_saved_weights_are_the_master_weights(options):
    """More than bfloat16 holds, under the user's names; equal under every layout; loaded
    everywhere.
    """
    with compiled(strategy(**options)) as trainer:
        start = trainer.state_dict()
        for name, tensor in Model().state_dict().items():
            kept = tensor.bfloat16().float() if name == "frozen" else tensor
            assert torch.equal(start[name], kept), name
        trainer.step(*data())
        state = trainer.state_dict()
        assert {t.dtype for t in state.values()} == {torch.float32}
        assert not torch.equal(state["first.weight"], state["first.weight"].bfloat16().float())
        target = Model()
        trainer.copy_to(target)
        assert all(torch.equal(t, state[n]) for n, t in target.state_dict().items())
        expected = trainer.evaluate(*data(7)).loss
    with compiled(ALONE, precision=None) as single:
        single.load_state_dict(state)
        assert all(torch.equal(t, state[n]) for n, t in single.state_dict().items())
        back = single.state_dict()
    with compiled(strategy(**options)) as other:
        other.step(*data(3))
        other.load_state_dict(back)
        assert all(torch.equal(t, state[n]) for n, t in other.state_dict().items())
        assert other.evaluate(*data(7)).loss == expected
        other.load_state_dict({n: t.double() for n, t in back.items()} | {"offset": back["offset"]})
        assert other.evaluate(*data(7)).loss == expected


def test_a_snapshot_moves_between_layouts_and_precisions():
    """Optimizer state included: training goes on alike."""
    how = {"sharded": strategy(shard_params=True), "single": [piper.Split({}, num_microbatches=4)]}
    trainers = {
        "bf16 sharded": compiled(how["sharded"]),
        "bf16 single": compiled(how["single"]),
        "float32 single": compiled(how["single"], precision=None),
    }
    first = trainers["bf16 sharded"]
    first.step(*data())
    snapshot = first._backend.snapshot()
    found = {}
    for name, trainer in trainers.items():
        with trainer:
            trainer._backend.restore(snapshot)
            trainer.step(*data(1))
            found[name] = trainer.state_dict()
    for name, tensor in found["bf16 sharded"].items():
        if name != "frozen":
            torch.testing.assert_close(found["bf16 single"][name], tensor, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(found["float32 single"][name], tensor, rtol=0.1, atol=0.05)


def test_chunks_read_the_rounded_weights_after_every_update():
    with compiled(strategy(shard_optimizer=True)) as trainer:
        trainer.step(*data())
        state = trainer.state_dict()
        for held in trainer._backend.copies():
            for name, tensor in held.parameters.items():
                assert tensor.dtype == torch.bfloat16
                assert torch.equal(tensor, state[name].bfloat16()), name


def test_evaluation_computes_in_the_compute_type():
    model, batch = nn.Linear(4, 3), data()
    with compiled([piper.Split({}, num_microbatches=2)], model=model) as trainer:
        found = trainer.evaluate(*batch)
    out = [
        copy.deepcopy(model).bfloat16()(x.bfloat16()).float().detach() for x in batch[0].chunk(2)
    ]
    assert found.loss == pytest.approx(float(mse(torch.cat(out), batch[1])), rel=1e-6)
    assert (found.loss_scale, found.skipped) == (None, False)


# --- what varies ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "options"), [(mse, ZERO[3]), (weighted, ZERO[0])])
def test_accumulation_under_a_scaled_loss(options, loss):
    """Each call's gradients are divided by the scale of that call, and kept; a sum that is not
    finite updates nothing and is dropped.
    """
    bad = (data(5)[0] * math.inf, data(5)[1])

    def train(precision):
        how = strategy(**options)
        with compiled(how, loss=loss, optimizer=sgd, precision=precision) as trainer:
            kept = trainer.step(*data(0), update=False)
            results = [trainer.step(*data(1)), trainer.step(*data(2))]
            if precision is FP16:
                before = trainer.state_dict()
                trainer.step(*bad, update=False)
                assert trainer.step(*data(3)).skipped
                after = trainer.state_dict()
                assert all(torch.equal(t, after[n]) for n, t in before.items())
            results.append(trainer.step(*data(4)))
            return kept, results, trainer.state_dict()

    kept, results, state = train(FP16)
    assert (kept.loss_scale, kept.skipped, kept.grad_norm) == (2.0**10, False, None)
    assert [r.loss_scale for r in results] == [2.0**10, 2.0**10, 2.0**10]
    assert not any(r.skipped for r in results)
    _, plain, expected = train(None)
    assert results[-1].loss == pytest.approx(plain[-1].loss, rel=0.02)
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=0.05, atol=0.01)


class Optional(nn.Module):
    """Uses ``other`` only where it is told to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x, both):
        return self.always(x) + (self.other(x) if both else self.other(x).detach())


def test_a_weight_that_is_trained_only_later():
    """It has a master copy from the beginning, which is what is saved."""
    (x, y), how = data(), [piper.Split({}, num_microbatches=2)]
    start = Optional().state_dict()
    with compiled(how, model=Optional(), batch=((x, False), y)) as trainer:
        trainer.step((x, False), y)
        assert torch.equal(trainer.state_dict()["other.weight"], start["other.weight"])
        trainer.step((x, True), y)
        moved = trainer.state_dict()["other.weight"] - start["other.weight"]
        assert 0 < moved.abs().max() < 0.1


@pytest.mark.parametrize("options", SOME, ids=str)
def test_a_weight_that_is_frozen_later(options):
    model = Model()
    with compiled(strategy(**options), model=model) as trainer:
        trainer.step(*data())
        before = trainer.state_dict()
        model.second.requires_grad_(False)
        trainer.step(*data(1))
        after = trainer.state_dict()
        assert torch.equal(after["second.weight"], before["second.weight"])
        assert not torch.equal(after["first.weight"], before["first.weight"])


def test_optimizers_that_look_at_whole_matrices_see_them():
    """A master copy of a parameter that is not sharded has its shape."""
    shapes = []

    class Looking(torch.optim.SGD):
        def step(self, closure=None):
            shapes.extend(p.shape for g in self.param_groups for p in g["params"])
            return super().step()

    model = nn.Linear(4, 3)
    with compiled([], model=model, optimizer=lambda p: Looking(p, lr=0.1)) as trainer:
        shapes.clear()  # of trials on small tensors
        trainer.step(*data())
    assert set(shapes) == {torch.Size([3, 4]), torch.Size([3])}


@pytest.mark.parametrize(
    ("precision", "options"),
    [("bf16", ZERO[0]), (FP16, ZERO[1]), ("bf16", ZERO[2]), (None, ZERO[3])],
    ids=str,
)
def test_a_step_uses_the_memory_that_the_plan_says(options, precision):
    policy = None if precision is None else make_precision(precision)
    batch, model = data(), Model()
    program = Programs(model, mse, strategy(**options), precision=policy).training(batch)
    spec = OptimizerSpec(torch.optim.Adam)
    found = measure(program.plan, batch, model_tensors(model), spec, program.constants)
    assert account(program.plan, adam_bytes) == found


def test_random_numbers_do_not_depend_on_the_strategy():
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x):
            with piper.annotate("PP", 0):
                x = nn.functional.dropout(self.first(x), 0.5)
            with piper.annotate("PP", 1):
                return self.second(x)

    report = piper.check(
        Dropping(), mse, strategy(shard_params=True), data, optimizer=sgd, precision="bf16"
    )
    report.require()


# --- plans, refusals ------------------------------------------------------------------------------


def test_without_a_policy_nothing_changes():
    """A model in the types of the policy has the same plan, but for the policy."""
    plain = Programs(Model(), mse, strategy()).training(data()).plan
    same = Programs(Model(), mse, strategy(), precision=make_precision("float32"))
    planned = same.training(data()).plan
    assert [d.instructions for d in plain.devices] == [d.instructions for d in planned.devices]
    assert not any(i.role is Role.SHARD for d in planned.devices for i in d.slots)


def test_plans_with_a_policy_are_files(tmp_path):
    plan = (
        Programs(Model(), weighted, strategy(shard_grads=True), precision=FP16)
        .training(data())
        .plan
    )
    piper.save_plan(plan, tmp_path)
    assert piper.load_plan(tmp_path) == plan
    piper.verify(piper.load_plan(tmp_path))


class NoWorker(InProcessBackend):
    def start(self, num_devices):
        raise AssertionError("a worker was started")


@pytest.mark.parametrize(
    ("precision", "model", "words"),
    [
        ("bf61", Model(), "precision is .*'bf61'.*did you mean 'bf16'"),
        ("bf16", Model().double(), "torch.float64.*torch.float32"),
    ],
)
def test_refused_before_any_worker_starts(precision, model, words):
    with pytest.raises(ConfigError, match=words):
        compiled([], model=model, precision=precision, backend=NoWorker())

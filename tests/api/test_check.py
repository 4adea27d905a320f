"""Can ``piper.check`` be fooled? Each test breaks one thing on the way from plan to result, in a
way that trains without an error.
"""

import io
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from msgspec.structs import replace as with_fields
from rich.console import Console
from torch import nn

import piper
from piper.api.check_report import CheckReport
from piper.api.compare import compare, scalar_error
from piper.backends.inprocess import InProcessBackend
from piper.errors import CheckError
from piper.models import MLP, MLPConfig, mlp_loss
from piper.ops.accumulate import Accumulate
from piper.ops.all_reduce import AllReduceBucket
from piper.ops.base import Instruction
from piper.ops.compute import Compute
from piper.ops.load_input import LoadInput
from piper.ops.update import OptimizerStep
from piper.ops.write_buffer import WriteBuffer
from piper.plan.model import DevicePlan, Plan

pytestmark = pytest.mark.timeout(60)

Change = Callable[[Plan], Plan]
INF = float("inf")


class Tampered(InProcessBackend):
    """Runs another plan than it was given."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self._change = change

    def load(self, key, plan, *rest):
        changed = self._change(plan)
        assert changed != plan, "the change changes nothing"
        super().load(key, changed, *rest)


def instructions(
    change: Callable[[int, Instruction], Instruction], first_only: type[Instruction] | None = None
) -> Change:
    """A change of instructions: each (with *first_only*, the first of that type only), given its
    device.
    """

    def changed(plan: Plan) -> Plan:
        done = False
        devices: list[DevicePlan] = []
        for mine in plan.devices:
            made: list[Instruction] = []
            for instruction in mine.instructions:
                applies = first_only is None or (isinstance(instruction, first_only) and not done)
                new = change(int(mine.device), instruction) if applies else instruction
                done = done or new != instruction
                made.append(new)
            devices.append(with_fields(mine, instructions=tuple(made)))
        return replace(plan, devices=tuple(devices))

    return changed


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)


def batch(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(1)
    return torch.randn(rows, 8, generator=make), torch.randn(rows, 4, generator=make)


def strategy(schedule: str = "1f1b", **options):
    return piper.strategies.pipeline(schedule, [[0, 1], [2, 3]], 2, **options)


def run(
    change: Change | None = None, *, optimizer=sgd, steps: int = 2, dropout: float = 0.0
) -> CheckReport:
    """check of a two-stage MLP with two replicas and two microbatches."""
    torch.manual_seed(0)
    model = MLP(MLPConfig(num_layers=2, num_stages=2, dropout=dropout))
    backend = None if change is None else Tampered(change)
    return piper.check(
        model, mlp_loss, strategy(), batch(), optimizer=optimizer, steps=steps, backend=backend
    )


def test_an_honest_strategy_is_equal():
    report = run(steps=3)
    assert report.ok
    assert max(report.max_loss_error, report.max_grad_error, report.max_param_error) <= 1e-10
    report.require()
    assert len(report.steps) == 3
    assert set(report.steps[0].gradients.by_name) == set(MLP(MLPConfig(num_layers=2)).state_dict())


# --- broken plans -----------------------------------------------------------------------------------


def scaled(plan: Plan) -> Plan:
    return replace(plan, seed_value=plan.seed_value * 2)


@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_a_constant_factor_in_the_gradients(optimizer):
    """Adam hides it in the parameters; the gradients show it whatever the optimizer."""
    report = run(scaled, optimizer=optimizer)
    assert not report.ok
    assert report.max_grad_error == pytest.approx(1.0, rel=1e-6)
    with pytest.raises(CheckError, match="differs from single-process training"):
        report.require()


def first_one_twice(_device: int, instruction: Instruction) -> Instruction:
    return with_fields(instruction, right=instruction.left)


def test_a_lost_contribution():
    assert not run(instructions(first_one_twice, Accumulate), steps=1).ok


def average(_device: int, instruction: Instruction) -> Instruction:
    is_reduction = isinstance(instruction, AllReduceBucket)
    return with_fields(instruction, average=True) if is_reduction else instruction


def test_a_mean_instead_of_a_sum_over_replicas():
    assert not run(instructions(average), steps=1).ok


def same_rows(_device: int, instruction: Instruction) -> Instruction:
    is_load = isinstance(instruction, LoadInput)
    return with_fields(instruction, microbatch=0) if is_load else instruction


def test_every_microbatch_given_the_same_rows():
    assert not run(instructions(same_rows), steps=1).ok


def swapped_targets(_device: int, instruction: Instruction) -> Instruction:
    if not isinstance(instruction, LoadInput) or instruction.leaf != 1:
        return instruction
    return with_fields(instruction, microbatch=3 - instruction.microbatch)


def test_outputs_paired_with_the_targets_of_another_microbatch():
    assert not run(instructions(swapped_targets), steps=1).ok


def idle(plan: Plan, device: int, name: str) -> Plan:
    """*device* does not update *name*: another one of its parameters twice, instead."""

    def change(mine: int, instruction: Instruction) -> Instruction:
        if mine != device or not isinstance(instruction, OptimizerStep):
            return instruction
        keep = [i for i, n in enumerate(instruction.names) if n != name]
        return with_fields(
            instruction,
            names=tuple(instruction.names[i] for i in keep),
            parameters=tuple(instruction.parameters[i] for i in keep),
            gradients=tuple(instruction.gradients[i] for i in keep),
        )

    return instructions(change)(plan)


@pytest.mark.parametrize("device", [0, 1])
def test_one_replica_does_not_update_a_parameter_in_the_last_step(device):
    """The other replica's copy, from which the state is read, is right."""
    report = run(lambda plan: idle(plan, device, "layers.0.bias"), steps=1)
    assert not report.ok
    assert report.steps[0].gradients.by_name["layers.0.bias"] == INF
    assert report.steps[0].parameters.by_name["layers.0.bias"] > 1e-3


@pytest.mark.parametrize("device", [0, 1])
def test_one_replica_has_another_learning_rate_in_the_last_step(device):
    def uneven(parameters):
        mine = threading.current_thread().name == f"piper device {device}"
        return torch.optim.SGD(parameters, lr=0.06 if mine else 0.05)

    report = run(optimizer=uneven, steps=1)
    assert report.max_grad_error <= 1e-10
    assert not report.ok


def test_one_replica_has_other_optimizer_state():
    def uneven(parameters):
        mine = threading.current_thread().name == "piper device 1"
        return torch.optim.SGD(parameters, lr=0.0, momentum=0.8 if mine else 0.9)

    report = run(optimizer=uneven, steps=2)
    assert report.steps[1].parameters.worst == 0.0
    assert report.steps[1].optimizer.worst == pytest.approx(0.1 / 1.9, rel=0.5)
    assert not report.ok


def test_a_parameter_that_is_never_updated():
    report = run(lambda plan: idle(idle(plan, 0, "layers.0.weight"), 1, "layers.0.weight"), steps=1)
    assert report.steps[0].gradients.by_name["layers.0.weight"] == INF
    assert not report.ok


def other_masks(_device: int, instruction: Instruction) -> Instruction:
    return with_fields(instruction, rng=tuple(n + 1 for n in instruction.rng))


def test_another_dropout_mask():
    def has_random(plan: Plan) -> Plan:
        return instructions(
            lambda d, i: other_masks(d, i) if isinstance(i, Compute) and i.rng else i
        )(plan)

    assert run(dropout=0.3, steps=1).ok
    assert not run(has_random, dropout=0.3, steps=1).ok


class Counting(nn.Module):
    """A model with a buffer that its forward writes; *persistent* or not."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("rows", torch.zeros(()), persistent=persistent)

    def forward(self, x):
        self.rows.add_(x.shape[0])
        return self.linear(x)


def wrong_buffer(_device: int, instruction: Instruction) -> Instruction:
    return with_fields(instruction, value=instruction.buffer)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_is_not_written(persistent):
    split = [piper.Split({}, num_microbatches=2)]

    def checked(backend: InProcessBackend | None) -> CheckReport:
        model = Counting(persistent)
        return piper.check(model, mlp_loss, split, batch(), optimizer=sgd, steps=1, backend=backend)

    assert checked(None).ok
    report = checked(Tampered(instructions(wrong_buffer, WriteBuffer)))
    assert report.steps[0].buffers.by_name["rows"] > 0.1
    assert not report.ok


# --- numbers that compare badly ----------------------------------------------------------------------


class Blown(nn.Module):
    """*fill* reaches loss and gradients of one parameter."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.full((), fill))

    def forward(self, x):
        return self.linear(x) * self.scale


def test_nan_on_both_sides_is_not_equality():
    with pytest.raises(piper.PiperError):  # already refused when the capture is compared
        piper.check(Blown(float("nan")), mlp_loss, [], batch(), optimizer=sgd)


def test_nan_that_appears_later_is_not_equality():
    def exploding(parameters):
        return torch.optim.SGD(parameters, lr=1e300)

    report = piper.check(Blown(1.0), mlp_loss, [], batch(), optimizer=exploding, steps=4)
    assert not report.ok
    assert "different" in _printed(report)


def test_the_metric_never_returns_a_number_that_compares_as_small():
    one, nan, inf = torch.ones(2), torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.inf])
    for found, expected in [
        (nan, one),
        (one, nan),
        (nan, nan),
        (one, inf),
        (inf, one),
        (inf, -inf),
    ]:
        errors = compare({"good": one, "w": found}, {"good": one, "w": expected})
        assert errors.by_name["w"] == INF
        assert errors.worst == INF
    assert scalar_error(float("nan"), float("nan")) == INF
    assert scalar_error(1.0, INF) == INF
    assert scalar_error(INF, 1.0) == INF
    assert scalar_error(0.0, 0.0) == 0.0
    assert scalar_error(1e-300, 0.0) == INF


def test_the_metric_sees_missing_unexpected_and_misshapen_tensors():
    one = torch.ones(2)
    assert compare({}, {"w": one}).by_name == {"w": INF}
    assert compare({"w": one}, {}).by_name == {"w": INF}
    assert compare({"w": one}, {"w": torch.ones(2, 1)}).by_name == {"w": INF}


def test_a_small_gradient_that_is_missing_counts():
    """Relative to the largest gradient it is tiny; a result that leaves it out is still wrong."""
    expected = {"large": torch.ones(4).double(), "small": torch.full((4,), 1e-9).double()}
    found = {**expected, "small": torch.zeros(4).double()}
    assert compare(found, expected).worst > 1e-4
    noise = {**expected, "small": expected["small"] + 1e-18}
    assert compare(noise, expected).worst < 1e-10


# --- refusals, extent, report ----------------------------------------------------------------------------


def test_no_steps_are_refused():
    with pytest.raises(CheckError, match="at least 1"):
        run(steps=0)


def test_batch_statistics_are_pointed_out():
    """BatchNorm over microbatches is another model than BatchNorm over the batch: equal to the
    reference, with a note.
    """

    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 4)

        def forward(self, x):
            return self.linear(self.norm(x))

    split = [piper.Split({}, num_microbatches=2)]
    report = piper.check(Normalised(), mlp_loss, split, batch(), optimizer=sgd)
    assert report.ok
    assert set(report.steps[0].buffers.by_name) == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    assert report.whole_batch_difference > 1e-3
    assert "batch statistics of 'norm'" in " ".join(_printed(report).split())


def test_a_mean_over_unequal_counts_is_pointed_out():
    def careless(outputs, targets):
        kept = targets > -0.5
        return ((outputs - targets).square() * kept).sum() / kept.sum()

    report = piper.check(
        MLP(MLPConfig(num_layers=1)),
        careless,
        [piper.Split({}, num_microbatches=2)],
        batch(),
        optimizer=sgd,
    )
    assert report.max_grad_error < 1e-10
    assert report.whole_batch_difference > 1e-4
    assert not report.ok  # microbatches do not train what the loss says
    with pytest.raises(CheckError, match=r"divides by something that differs.*\(sum, weight\)"):
        report.require()


def test_the_users_model_is_left_alone():
    torch.manual_seed(0)
    model = MLP(MLPConfig(num_layers=2, num_stages=2))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    piper.check(model, mlp_loss, strategy(), batch(), optimizer=sgd, steps=1)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model.layers[0].weight.dtype is torch.float32


def test_the_table_names_the_worst_gradient():
    text = _printed(run(lambda plan: idle(plan, 1, "layers.0.bias"), steps=1))
    assert "layers.0.bias" in text
    assert "different" in text
    assert "equal" in _printed(run(steps=1))


def _printed(report: CheckReport) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(report)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_report_prints_as_a_table():
    text = str(run(steps=1))
    lines = text.splitlines()
    assert lines[0].strip() == "against single-process training, float64"
    assert any("gradients" in line for line in lines)
    assert lines[-1] == "equal"
    assert max(map(len, lines)) <= 100

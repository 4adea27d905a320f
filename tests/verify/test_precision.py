"""Plans of mixed precision that were changed are found out."""

from dataclasses import replace

import pytest
import torch
from msgspec.structs import replace as change
from torch import nn

import piper
from piper.api.programs import Programs
from piper.ops.all_gather import RefreshBucket
from piper.ops.grad_norm import MeasureGradients
from piper.ops.product import Multiply
from piper.ops.round_masters import RoundMasters, StoreRounded
from piper.ops.update import OptimizerStep
from piper.verify import find_problems

SCALED = piper.Precision(compute=torch.float16, loss_scale=piper.LossScale())


def mean(outputs, targets):
    return nn.functional.mse_loss(outputs, targets)


def weighted(outputs, targets):
    return ((outputs - targets) ** 2).sum(), torch.tensor(float(len(targets)))


def make(loss, precision, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    how = [piper.Place({}, devices=[0, 1]), piper.Replicate({}, **options)]
    program = Programs(
        model, loss, [*how, piper.Split({}, num_microbatches=2)], None, None, precision
    )
    plan = program.training((torch.randn(8, 4), torch.randn(8, 3))).plan
    assert find_problems(plan) == []
    return plan


def problems(plan, kind, edit):
    """The text of what is wrong once device 0's first instruction of *kind* is what *edit* makes of
    it; ``None`` removes it.
    """
    mine = plan.devices[0]
    position, found = next((i, x) for i, x in enumerate(mine.instructions) if isinstance(x, kind))
    made = edit(found, mine)
    changed = [*mine.instructions]
    changed[position : position + 1] = [] if made is None else [made]
    devices = (change(mine, instructions=tuple(changed)), plan.devices[1])
    return "\n".join(problem.text for problem in find_problems(replace(plan, devices=devices)))


def test_weights_that_are_never_brought_up_to_date():
    plan = make(mean, piper.Precision())
    text = problems(plan, StoreRounded, lambda _, __: None)
    assert "is never executed" in text


def test_weights_that_are_remade_of_other_masters():
    plan = make(mean, piper.Precision())
    text = problems(plan, StoreRounded, lambda found, _: change(found, masters=found.masters[::-1]))
    assert "reads %" in text
    assert "expected shard" in text


def test_whole_weights_that_are_gathered_in_another_type():
    plan = make(mean, piper.Precision(), shard_optimizer=True)
    long = piper.dtypes.DType.FLOAT32

    def edit(found, _):
        messages = tuple(change(message, dtype=long) for message in found.messages)
        return change(found, messages=messages)

    assert "expected messages" in problems(plan, RefreshBucket, edit)


def test_an_update_that_does_not_ask_whether_gradients_are_finite():
    plan = make(mean, SCALED)
    text = problems(plan, OptimizerStep, lambda found, _: change(found, only_finite=False))
    assert "expected only_finite True, found False" in text


def test_an_update_that_asks_though_the_loss_is_not_scaled():
    plan = make(mean, piper.Precision())
    text = problems(plan, OptimizerStep, lambda found, _: change(found, only_finite=True))
    assert "expected only_finite False, found True" in text


@pytest.mark.parametrize("loss", [mean, weighted])
@pytest.mark.parametrize(
    ("kind", "words"),
    [(OptimizerStep, "expected a scale"), (MeasureGradients, "reads 4 values, expected 5")],
)
def test_gradients_that_are_not_divided(loss, kind, words):
    text = problems(make(loss, SCALED), kind, lambda found, _: change(found, scale=None))
    assert words in text


def test_gradients_that_are_divided_by_the_weight_alone():
    """The device's own sum of weights is there too."""

    def edit(found, mine):
        multiply = next(x for x in mine.instructions if isinstance(x, Multiply))
        return change(found, scale=multiply.left)

    plan = make(weighted, SCALED)
    text = problems(plan, MeasureGradients, edit)
    assert "expected total scaled weight" in text


def test_a_weight_that_is_multiplied_by_something_else():
    plan = make(weighted, SCALED)
    text = problems(plan, Multiply, lambda found, _: change(found, right=found.left))
    assert "reads" in text


def wrong(plan):
    return "\n".join(problem.text for problem in find_problems(plan))


@pytest.mark.parametrize("loss", [mean, weighted])
def test_a_plan_and_dag_that_forgot_the_scale_alike(loss):
    """Found from what each number is a sum of, though every instruction does what its node says."""
    plain = make(loss, piper.Precision(compute=torch.float16))
    text = wrong(replace(plain, dag=replace(plain.dag, loss_scaled=True)))
    assert "and scaled" in text or "should contain the scale of the loss" in text
    scaled = make(loss, SCALED)
    text = wrong(replace(scaled, dag=replace(scaled.dag, loss_scaled=False)))
    assert "exactly once" in text or "should not contain the scale of the loss" in text


def test_a_plan_and_dag_that_forgot_to_round_alike():
    plan = make(mean, piper.Precision())
    rounding = {n.id for n in plan.dag.nodes.values() if isinstance(n.work, RoundMasters)}
    assert rounding
    nodes = {i: n for i, n in plan.dag.nodes.items() if i not in rounding}
    devices = tuple(
        change(mine, instructions=tuple(i for i in mine.instructions if i.node not in rounding))
        for mine in plan.devices
    )
    text = wrong(replace(plan, dag=replace(plan.dag, nodes=nodes), devices=devices))
    assert "parameter '0.weight' is never updated" in text

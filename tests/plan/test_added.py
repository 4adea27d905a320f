"""Contributions that chunks add to their totals themselves."""

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import piper
from piper.api.programs import model_tensors
from piper.backends.measured import measure
from piper.capture import capture_with_constants
from piper.devices.links import LinkTimes
from piper.ops.accumulate import Accumulate
from piper.ops.compute import Compute
from piper.ops.p2p import Send
from piper.plan.account import account
from piper.plan.added import added_within, wholly_added
from piper.plan.memory import Category
from piper.plan.profile import Rate
from piper.runtime.optimizer import OptimizerSpec
from piper.runtime.profiling import Network, measure_profile

WIDTH, LAYERS = 8, 3
MATRIX = WIDTH * WIDTH * 4
SGD = OptimizerSpec(lambda parameters: torch.optim.SGD(parameters, lr=0.1))


class Stages(nn.Module):
    """Two stages of several layers each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList(
            nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
            for _ in range(2)
        )

    def forward(self, x):
        for index, stage in enumerate(self.stages):
            with piper.annotate("PP", index):
                for layer in stage:
                    x = torch.tanh(layer(x))
        return x


def mse(outputs, targets):
    return (outputs - targets).square().mean()


BATCH = torch.rand(8, WIDTH), torch.rand(8, WIDTH)


def planned(*extra):
    found = capture_with_constants(Stages(), mse, BATCH)
    strategy = [
        piper.Place({"PP": 0}, devices=[0]),
        piper.Place({"PP": 1}, devices=[1]),
        piper.Split({}, num_microbatches=4),
        *piper.schedules.one_f_one_b(2, 4),
        *extra,
    ]
    plan = piper.plan(piper.apply(found.dag, strategy))
    piper.verify(plan)
    return plan


def test_all_but_the_first_microbatch_are_added_where_nothing_is_sent():
    """The first stage's backward sends nothing; the last one's does, which must not wait for
    additions.
    """
    plan = planned()
    first, last = (mine.instructions for mine in plan.devices)
    found = added_within(first)
    backward = [i for i in found if isinstance(first[i], Compute)]
    assert len(backward) == 3  # of four microbatches
    for at in backward:
        assert len(found[at]) == LAYERS
        assert set(found[at]) <= set(first[at].writes())
    sums = [i for i, instruction in enumerate(first) if isinstance(instruction, Accumulate)]
    assert all(set(first[i].right) == set(found[i]) for i in sums)
    assert any(isinstance(i, Send) for i in last[20:])
    assert added_within(last) == {}


def test_planned_and_measured_memory_have_one_copy_of_the_gradients():
    plan = planned()
    memory = account(plan)
    assert memory == measure(plan, BATCH, model_tensors(Stages()), SGD)
    assert memory[0].highest[Category.GRADIENTS] == LAYERS * MATRIX
    assert memory[1].highest[Category.GRADIENTS] == 2 * LAYERS * MATRIX


@pytest.mark.parametrize(
    "compile_chunks", [False, pytest.param("fallback", marks=pytest.mark.full)]
)
def test_gradients_are_those_of_one_process(compile_chunks):
    """Also where the code of a chunk makes all of its outputs at once."""
    model = Stages().double()
    batch = tuple(t.double() for t in BATCH)
    strategy = [
        piper.Place({"PP": 0}, devices=[0]),
        piper.Place({"PP": 1}, devices=[1]),
        piper.Split({}, num_microbatches=4),
        *piper.schedules.one_f_one_b(2, 4),
    ]
    expected = Stages().double()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    options = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "compile": compile_chunks}
    with piper.compile(model, mse, strategy, batch, backend="inprocess", **options) as trainer:
        for _ in range(2):
            trainer.step(*batch)
            optimizer.zero_grad()
            mse(expected(batch[0]), batch[1]).backward()
            optimizer.step()
        state = trainer.state_dict()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-12, atol=1e-14)


def test_simulation_by_a_profile_counts_such_additions_once():
    """They are part of the chunks' measured times; those of the last stage are not."""
    plan = planned()
    first, last = (mine.instructions for mine in plan.devices)
    assert wholly_added(first) == {i for i, x in enumerate(first) if isinstance(x, Accumulate)}
    assert not wholly_added(last)
    network = Network(LinkTimes({64: 0.0, 128: 0.0}, {64: 1e-5, 128: 1e-5}))
    profile = measure_profile(plan, SGD, network, repeats=1)
    assert profile.rates["accumulate"].per_byte > 0
    slow = replace(profile, rates=profile.rates | {"accumulate": Rate(1.0, 0.0)})
    boxes = [
        [b.seconds for b in mine.boxes() if b.op == "accumulate"]
        for mine in piper.simulate(plan, slow).devices
    ]
    assert all(seconds < 1e-5 for seconds in boxes[0])
    assert boxes[1] == [pytest.approx(1.0, rel=1e-3)] * 3

"""Contributions are added to in place only where nothing else is in their memory."""

import pytest
import torch
from msgspec.structs import replace
from tests.cases.equal import mse, randn, sgd
from tests.verify.captured import CAPTURED
from tests.verify.mutations import KINDS, Mutator
from tests.verify.plans import edit, make, pipeline, spoil, texts
from torch import nn

import piper
from piper.capture import annotate, capture_with_constants
from piper.ops.accumulate import Accumulate
from piper.ops.free import Free
from piper.verify import find_problems


class Shared(nn.Module):
    """Two parameters whose gradients are one tensor, one whose gradient is a view of it, and one
    that has its own.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Parameter(torch.rand(4, 4)), nn.Parameter(torch.rand(4, 4))
        self.row = nn.Parameter(torch.rand(1, 16))
        self.own = nn.Parameter(torch.rand(4, 4))

    def forward(self, x):
        with annotate("PP", 0):
            x = x @ (self.one + self.two + self.row.view(4, 4))
        with annotate("PP", 1):
            return torch.tanh(x) @ self.own


BATCH = randn(8, 4), randn(8, 4, seed=1)


def planned(microbatches=4):
    found = capture_with_constants(Shared().double(), mse, BATCH)
    return make(found.dag, pipeline(2, microbatches=microbatches))


def first_additions(plan, device):
    """Position and instruction of each addition to a contribution."""
    program = plan.devices[device].instructions
    return [
        (i, x) for i, x in enumerate(program) if isinstance(x, Accumulate) and x.totals != x.left
    ]


def name(plan, device, slot):
    return plan.devices[device].slots[slot].name


def test_what_shares_memory_is_not_added_to():
    plan = planned()
    ((_, add),) = first_additions(plan, 0)
    assert {name(plan, 0, s) for s in add.left} == {"one", "two", "row"}
    assert add.moved == ()
    ((_, add),) = first_additions(plan, 1)
    assert [name(plan, 1, s) for s in add.moved] == ["own"]


@pytest.mark.parametrize("microbatches", [2, 3])
def test_gradients_that_share_memory_are_right(microbatches):
    strategy = pipeline(2, microbatches=microbatches)
    batch = randn(6, 4), randn(6, 4, seed=1)
    # Not against `.grad`: autograd may let those of two parameters share memory, too.
    report = piper.check(Shared(), mse, strategy, batch, optimizer=sgd)
    report.require()


def test_adding_to_shared_memory_is_refused():
    plan = planned()
    ((at, add),) = first_additions(plan, 0)

    def without(program):
        program[at] = replace(add, moved=add.left)
        return [
            replace(x, slots=tuple(s for s in x.slots if s not in add.left))
            if isinstance(x, Free)
            else x
            for x in program
        ]

    spoiled = spoil(plan, 0, without)
    problems = find_problems(spoiled)
    assert {p.check for p in problems} == {"ownership"}
    assert len(problems) == 3


def test_what_is_moved_is_there_and_read_no_more():
    plan = planned()
    ((at, add),) = first_additions(plan, 1)
    assert "moves" in texts(edit(plan, 1, at, moved=(add.totals[0],)), "structure")
    frees = Free(node=-1, stream=add.stream, slots=add.moved)
    spoiled = spoil(plan, 1, lambda program: [*program[: at + 1], frees, *program[at + 1 :]])
    assert "freed" in texts(spoiled, "lifetime")


def test_gradients_of_real_models_are_added_in_place():
    training, strategy = CAPTURED["tied transformer, 1f1b × dp"]()
    plan = make(training.dag, strategy)
    for device in plan.devices:
        adds = [add for _, add in first_additions(plan, device.device)]
        left = [slot for add in adds for slot in add.left]
        moved = [slot for add in adds for slot in add.moved]
        assert len(moved) > len(left) / 2 > 0


def test_the_mutation_finds_both_directions():
    plan = planned()
    refused = 0
    for seed in range(20):
        mutation = KINDS["add in place"][1](Mutator(plan, seed))
        assert mutation is not None
        refused += bool(find_problems(mutation[1]))
    assert 0 < refused < 20

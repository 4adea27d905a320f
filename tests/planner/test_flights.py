"""How much is in flight at once, and what memory that takes."""

import pytest
import torch
from torch import nn

import piper
from piper.api.programs import model_tensors
from piper.backends.measured import measure
from piper.capture import capture_with_constants
from piper.ops.accumulate import Accumulate
from piper.ops.all_gather import AllGatherBucket
from piper.ops.all_reduce import AllReduceBucket
from piper.ops.bucket import BucketCollective
from piper.ops.compute import Compute
from piper.ops.reduce_scatter import ReduceScatterBucket
from piper.ops.update import OptimizerStep
from piper.ops.wait import Wait
from piper.plan.account import account
from piper.plan.memory import Category
from piper.runtime.optimizer import OptimizerSpec

WIDTH, LAYERS, MICROBATCHES = 16, 4, 3
LAYER = WIDTH * WIDTH * 8
SGD = OptimizerSpec(lambda parameters: torch.optim.SGD(parameters, lr=0.1))


class Layers(nn.Module):
    """Layers, each a region of its own."""

    def __init__(self, count=LAYERS):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))
        for index, layer in enumerate(self.layers):
            piper.annotate_module(layer, "LAYER", index)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def mse(outputs, targets):
    return (outputs - targets).square().mean()


BATCH = torch.rand(2 * MICROBATCHES * 2, WIDTH).double(), torch.rand(12, WIDTH).double()


def planned(level, *orders, layers=LAYERS, **limits):
    found = capture_with_constants(Layers(layers).double(), mse, BATCH)
    strategy = [
        piper.Place({}, [0, 1]),
        piper.Replicate(
            {},
            shard_optimizer=level == 1,
            shard_grads=level == 2,
            shard_params=level == 3,
        ),
        piper.Split({}, num_microbatches=MICROBATCHES),
        *orders,
    ]
    plan = piper.plan(piper.apply(found.dag, strategy), **limits)
    piper.verify(plan)
    return plan


def in_flight(plan):
    """The most bytes that reductions were given that the compute stream has not waited for."""
    flying, most = [], 0
    mine = plan.devices[0]
    for instruction in mine.instructions:
        if isinstance(instruction, Wait) and instruction.stream == "compute":
            done = [i for i, (event, _) in enumerate(flying) if event == instruction.event]
            flying = flying[done[0] + 1 :] if done else flying
        if isinstance(instruction, BucketCollective):
            if isinstance(instruction, AllGatherBucket):
                continue
            nbytes = sum(mine.slots[s].message.nbytes for s in instruction.reads())
            flying.append((instruction.record, nbytes))
            most = max(most, sum(n for _, n in flying))
    return most


@pytest.mark.parametrize("level", [0, 2])
def test_the_limit_holds(level):
    assert in_flight(planned(level, reduce_bytes=LAYER)) == LAYER
    assert in_flight(planned(level)) > LAYER


@pytest.mark.parametrize("level", range(4))
def test_memory_is_as_planned_and_less(level):
    def highest(plan):
        model = Layers().double()
        found = measure(plan, BATCH, model_tensors(model), SGD)
        for a, b in zip(account(plan), found, strict=True):
            assert a == b
        return found[0].highest[Category.COMMUNICATION]

    few = highest(planned(level, reduce_bytes=LAYER, gather_bytes=LAYER))
    assert few < highest(planned(level, reduce_bytes=2 * LAYERS * LAYER))


def test_gradients_need_one_copy_or_the_slices_and_one_layers_contributions():
    """Added to in place as they are made, and reduced one layer at a time; or reduced at once, and
    slices added.
    """
    found = [
        account(planned(level, reduce_bytes=LAYER))[0].highest[Category.GRADIENTS]
        for level in range(4)
    ]
    whole = LAYERS * LAYER
    assert found[0] == whole
    assert max(found[1:]) <= whole // 2 + LAYER + LAYER // 2 < whole


def gathers(plan):
    return [i for i in plan.devices[0].instructions if isinstance(i, AllGatherBucket)]


def by(tag, count):
    """All microbatches of a region before the next region, or the other way round."""
    forward = [[{tag: i, "PASS": "F"}] for i in range(count)]
    backward = [[{tag: i, "PASS": "B"}] for i in reversed(range(count))]
    return piper.Order(forward + backward)


def test_breadth_first_gathers_each_layer_once_per_pass():
    """But the last layer, whose backward follows its forward, and the first, whose backward reads
    no weight.
    """
    assert len(gathers(planned(3, by("LAYER", LAYERS)))) == 2 * LAYERS - 2


def test_depth_first_gathers_for_each_microbatch():
    assert len(gathers(planned(3, depth_first()))) == MICROBATCHES * (2 * LAYERS - 2)


def scatters(plan):
    return [i for i in plan.devices[0].instructions if isinstance(i, ReduceScatterBucket)]


def depth_first():
    return piper.Order([[{"MB": m, "PASS": p}] for m in range(MICROBATCHES) for p in "FB"])


@pytest.mark.parametrize("level", [2, 3])
def test_backwards_in_a_row_share_a_scatter(level):
    """Of what their contributions come to: a part of the bytes, in no more memory."""
    plan = planned(level, by("LAYER", LAYERS), reduce_bytes=LAYER)
    assert len(scatters(plan)) == LAYERS
    each = planned(level, depth_first(), reduce_bytes=LAYER)
    assert len(scatters(each)) == MICROBATCHES * LAYERS
    kinds = Category.GRADIENTS, Category.COMMUNICATION
    shared, single = (sum(account(p)[0].highest[kind] for kind in kinds) for p in (plan, each))
    assert shared <= single + LAYER


def test_scatters_that_an_order_names_are_not_shared():
    strategy = (
        by("LAYER", LAYERS),
        piper.Order(
            [
                [{"LAYER": 3, "MB": 0, "PASS": "B", "COMM": "reduce_scatter"}],
                [{"LAYER": 2, "MB": 0, "PASS": "B"}],
            ]
        ),
    )
    assert len(scatters(planned(2, *strategy))) > LAYERS


def test_a_chunk_that_reads_no_weight_ends_nothing():
    """The backward of the only layer stands between its forwards."""
    assert len(gathers(planned(3, depth_first(), layers=1))) == 1


@pytest.mark.parametrize("level", range(4))
def test_updates_wait_for_no_later_reduction(level):
    """Reductions start as the backward goes, and parameters are updated in the order of their
    reductions, after it.
    """
    plan = planned(level)
    program = plan.devices[0].instructions
    made = {
        slot: at
        for at, i in enumerate(program)
        if isinstance(i, AllReduceBucket | ReduceScatterBucket)
        for slot in i.writes()
    }
    sums = {
        t: max(made.get(r, 0) for r in (a.left[k], a.right[k]))
        for a in program
        if isinstance(a, Accumulate)
        for k, t in enumerate(a.totals)
    }
    reduced = [
        max(made.get(g, 0) or sums.get(g, 0) for g in i.gradients)
        for i in program
        if isinstance(i, OptimizerStep)
    ]
    assert len(reduced) == LAYERS
    assert reduced == sorted(reduced)
    last = max(at for at, i in enumerate(program) if isinstance(i, Compute))
    first = min(at for at, i in enumerate(program) if isinstance(i, OptimizerStep))
    assert last < first
    assert sum(at < last for at in reduced) >= LAYERS - 1


@pytest.mark.parametrize("level", [2, 3])
def test_what_reductions_made_is_added_before_one_that_waited_for_them(level):
    """All but the first microbatch's, which become the totals."""

    def not_added(plan):
        """For each reduction, how many slices there are when it starts that are not added yet."""
        program = plan.devices[0].instructions
        added = {slot for i in program if isinstance(i, Accumulate) for slot in i.right}
        made, found = set(), []
        for instruction in program:
            if isinstance(instruction, ReduceScatterBucket):
                found.append(len(made))
                made.update(added.intersection(instruction.writes()))
            if isinstance(instruction, Accumulate):
                made.difference_update(instruction.right)
        return found

    assert max(not_added(planned(level, depth_first(), reduce_bytes=LAYER))) == 0
    assert max(not_added(planned(level, depth_first()))) > 0

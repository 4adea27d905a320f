"""Orders that a user may write, legal and illegal, and slow links."""

import random

import pytest
import torch
from tests.cases.equal import assert_equal, mse, randn
from torch import nn

import piper
from piper.errors import FilterError, OrderError, PiperError, PlacementError, SplitError
from piper.models import MLP, MLPConfig, mlp_loss

pytestmark = pytest.mark.timeout(90)


def mlp(stages: int, layers: int | None = None) -> MLP:
    torch.manual_seed(0)
    config = MLPConfig(
        in_features=3, width=4, out_features=2, num_layers=layers or stages, num_stages=stages
    )
    return MLP(config)


def batch(rows: int = 8):
    return randn(rows, 3), randn(rows, 2, seed=1)


def step(text: str) -> dict[str, int | str]:
    """``"1F0"`` is stage 1's forward of microbatch 0."""
    return {"PP": int(text[0]), "PASS": text[1], "MB": int(text[2:])}


def order(text: str) -> piper.Order:
    """``"0F0 0F1 0B0+0B1"``: groups in turn; members of a group are joined by ``+``."""
    return piper.Order([[step(t) for t in group.split("+")] for group in text.split()])


def placed(*devices: int) -> list[piper.Place]:
    return [piper.Place({"PP": stage}, devices=[d]) for stage, d in enumerate(devices)]


def test_two_backwards_before_either_gradient_is_sent_on():
    """Three stages; stage 1 runs both backwards before stage 0 runs one, and in the other order."""
    strategy = [
        *placed(0, 1, 2),
        piper.Split({}, num_microbatches=4),
        order("0F0 0F1 0F2 0F3 0B1 0B0 0B3 0B2"),
        order("1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"),
        order("2F0 2F1 2B1 2B0 2F2 2F3 2B3 2B2"),
    ]
    assert_equal(mlp(3), mlp_loss, strategy, batch())


def test_members_of_a_group_may_overlap():
    strategy = [
        *placed(0, 1),
        piper.Split({}, num_microbatches=4),
        order("0F0+0F1+0F2 0F3+0B0 0B1+0B2 0B3"),
        order("1F0 1F1+1B0 1F2+1B1 1F3+1B2 1B3"),
    ]
    assert_equal(mlp(2), mlp_loss, strategy, batch())


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "looped_bfs"])
@pytest.mark.parametrize("delay_seed", [0, 1])
def test_previous_and_next_neighbour_are_the_same_device(schedule, delay_seed):
    """Two devices with two stages each; messages of 1 MB and more, each late by a random time,
    receive buffers poisoned.

    Sends of both directions are under way at once; a cycle of blocking sends would hang here.
    """

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(4)])

        def forward(self, x):
            for stage, scale in enumerate(self.scale):
                with piper.annotate("PP", stage):
                    x = (x * scale).sin()
            return x

    strategy = piper.strategies.pipeline(schedule, [[0], [1]], 4, num_virtual_stages=2)
    data = (randn(4, 2**15, 4), randn(4, 2**15, 4, seed=1))
    assert data[0][0].nbytes >= 2**20
    assert_equal(
        Wide(), mse, strategy, data, delay=0.003, delay_seed=delay_seed, poison=True, timeout=30.0
    )


@pytest.mark.parametrize("seed", range(4))
def test_shuffled_orders_with_random_delays(seed):
    """Every device takes microbatches in an order that is its own; the last stage alternates."""
    choose = random.Random(seed)
    forwards, backwards = list(range(4)), list(range(4))
    choose.shuffle(forwards)
    choose.shuffle(backwards)
    first = [f"0F{m}" for m in forwards] + [f"0B{m}" for m in backwards]
    choose.shuffle(forwards)
    last = [f"1{p}{m}" for m in forwards for p in "FB"]
    strategy = [
        *placed(0, 1),
        piper.Split({}, num_microbatches=4),
        order(" ".join(first)),
        order(" ".join(last)),
    ]
    assert_equal(mlp(2), mlp_loss, strategy, batch(), delay=0.003, delay_seed=seed, poison=True)


CYCLES = {
    "a backward before its forward": ["0B0 0F0"],
    "a later stage's backward before its own forward": ["1B0 1F0"],
    "crossed forwards": ["0F0 0F1 0B0 0B1", "1F1 1B1 1F0 1B0 ", "0B0 0F1"],
    "a microbatch that waits for a later one's backward": ["0F0 0B1 0F1 0B0", "1F0 1B0 1F1 1B1"],
    "two schedules' sends cross": ["0F0 0B1 0F1 0B0", "1F0 1F1 1B0 1B1"],
    "two directives contradict each other": ["0F0 0F1", "0F1 0F0"],
    "the same step twice": ["0F0 0F1 0F0"],
}


@pytest.mark.parametrize("case", CYCLES)
def test_a_cyclic_order_is_refused_with_a_picture_of_the_cycle(case):
    """Before anything runs: a validator that looks at each device alone would let these hang."""
    strategy = [
        *placed(0, 1),
        piper.Split({}, num_microbatches=2),
        *(order(text) for text in CYCLES[case]),
    ]
    with pytest.raises(OrderError, match=r"cycle(.|\n)*before(.|\n)*directive \d"):
        assert_equal(mlp(2), mlp_loss, strategy, batch())


def test_crossed_orders_of_two_devices():
    """Device 0 wants microbatch 1 back first; device 1 starts microbatch 1 only after the backward
    of 0 has been sent and received.
    """
    strategy = [
        *placed(0, 1, 0),
        piper.Split({}, num_microbatches=2),
        order("0F0 2F1 0F1 2F0"),
        order("1F0 1F1"),
    ]
    with pytest.raises(OrderError, match="cycle"):
        assert_equal(mlp(3), mlp_loss, strategy, batch())


@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"])
def test_fewer_microbatches_than_stages(schedule, microbatches):
    virtual = 2 if schedule in ("interleaved_1f1b", "looped_bfs") else 1
    strategy = piper.strategies.pipeline(
        schedule, [[0], [1], [2], [3]], microbatches, num_virtual_stages=virtual
    )
    assert_equal(mlp(4 * virtual), mlp_loss, strategy, batch(6))


def test_layers_that_do_not_divide_among_stages():
    """Seven layers on three stages."""
    strategy = piper.strategies.pipeline("1f1b", [[0], [1], [2]], 4)
    assert_equal(mlp(3, layers=7), mlp_loss, strategy, batch())


def test_a_region_that_nobody_placed_is_refused_by_name():
    strategy = [
        piper.Place({"PP": 0}, devices=[0]),
        piper.Place({"PP": 2}, devices=[1]),
        piper.Split({}, num_microbatches=2),
    ]
    with pytest.raises(PlacementError, match=r"not placed.*'PP': 1"):
        assert_equal(mlp(3), mlp_loss, strategy, batch())


def test_a_schedule_for_other_stages_than_the_model_has():
    """Four stages' schedule for a model of three is refused; a schedule of fewer leaves the rest in
    any legal order.
    """
    groups = [[0], [1], [2]]
    wrong = [
        *piper.placements.chain(groups),
        piper.Split({}, num_microbatches=4),
        *piper.schedules.one_f_one_b(4, 4),
    ]
    with pytest.raises(FilterError, match="PP=3"):
        assert_equal(mlp(3), mlp_loss, wrong, batch())
    fewer = [
        *piper.placements.chain(groups),
        piper.Split({}, num_microbatches=4),
        *piper.schedules.one_f_one_b(2, 4),
    ]
    assert_equal(mlp(3), mlp_loss, fewer, batch())


def test_a_schedule_for_more_microbatches_than_there_are():
    wrong = [
        *piper.placements.chain([[0], [1]]),
        piper.Split({}, num_microbatches=2),
        *piper.schedules.gpipe(2, 4),
    ]
    with pytest.raises(PiperError, match="MB=2"):
        assert_equal(mlp(2), mlp_loss, wrong, batch())


@pytest.mark.parametrize("first", ["split", "place"])
def test_split_and_place_in_either_order(first):
    split, places = piper.Split({}, num_microbatches=4), placed(0, 1)
    head = [split, *places] if first == "split" else [*places, split]
    assert_equal(mlp(2), mlp_loss, [*head, *piper.schedules.one_f_one_b(2, 4)], batch())


def test_no_order_at_all():
    strategy = [*placed(0, 1, 0, 1), piper.Split({}, num_microbatches=4)]
    assert_equal(mlp(4), mlp_loss, strategy, batch(), delay=0.002, poison=True)


def test_placement_that_depends_on_the_microbatch():
    """Half of the microbatches flow down, half up, as under DualPipe: each stage's parameters live
    on two devices.
    """
    strategy = [
        piper.Split({}, num_microbatches=4),
        *piper.placements.two_way([[0], [1]], 4),
    ]
    assert_equal(mlp(2), mlp_loss, strategy, batch(), steps=3)


def test_groups_of_unequal_size_and_groups_that_cross():
    """Microbatches on groups of one and of two devices; a group that feeds itself in another
    order.
    """
    unequal = [
        piper.Split({}, num_microbatches=4),
        piper.Place({"MB": [0, 2]}, devices=[0]),
        piper.Place({"MB": [1, 3]}, devices=[1, 2]),
        piper.Replicate({}, devices="placed"),
    ]
    crossed = [
        piper.Place({"PP": 0}, devices=[0, 1]),
        piper.Place({"PP": 1}, devices=[1, 0]),
        piper.Replicate({}, devices="placed"),
        piper.Split({}, num_microbatches=2),
    ]
    for strategy in (unequal, crossed):
        with pytest.raises(PlacementError, match=r"device groups"):
            assert_equal(mlp(2), mlp_loss, strategy, batch())


def test_a_split_of_a_part_is_refused():
    """Also of nothing at all: a pass that the model does not have."""
    for filter_ in ({"PASS": "BI"}, {"PP": 0}, {"PASS": "F"}):
        with pytest.raises(SplitError, match="filter"):
            assert_equal(mlp(2), mlp_loss, [piper.Split(filter_, num_microbatches=2)], batch())


def test_two_splits():
    """Microbatches of microbatches: number 2·a + b."""
    strategy = [
        *placed(0, 1),
        piper.Split({}, dim_name="A", num_microbatches=2),
        piper.Split({}, dim_name="B", num_microbatches=2),
    ]
    plan = assert_equal(mlp(2), mlp_loss, strategy, batch())
    assert plan.num_microbatches == 4


def test_an_order_before_the_split_orders_every_microbatch():
    strategy = [
        *placed(0, 1),
        piper.Order([[{"PASS": "F"}], [{"PASS": "B"}]]),
        piper.Split({}, num_microbatches=2),
    ]
    assert_equal(mlp(2), mlp_loss, strategy, batch())

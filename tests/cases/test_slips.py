"""Slips in strategies: each is answered with what was expected, and what to write."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.errors import (
    ArgumentError,
    DirectiveError,
    FilterError,
    PiperError,
    PiperWarning,
    PlacementError,
    ScheduleError,
)
from piper.schedules import SCHEDULES

F = torch.nn.functional
PLACES = piper.placements.chain([[0], [1]])
SPLIT = piper.Split({}, num_microbatches=2)
one_f_one_b = piper.schedules.one_f_one_b


class Stages(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for i, stage in enumerate(self.stages):
            with piper.annotate("PP", i):
                x = stage(x)
        return x


@pytest.fixture(scope="module")
def dag():
    return captured(2)


def captured(stages: int):
    return piper.capture(Stages(stages), F.mse_loss, batch())


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 4), torch.randn(16, 4)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ([*PLACES, *one_f_one_b(2, 2)], ["'MB'", "Split({}, dim_name='MB'", "before"]),
        ([*PLACES, *one_f_one_b(2, 2), SPLIT], ["'MB'", "directive 4, Split", "before it"]),
        (
            [
                *PLACES,
                *one_f_one_b(2, 2, microbatch_tag="m"),
                piper.Split({}, dim_name="m", num_microbatches=2),
            ],
            ["'m'", "directive 4, Split", "before it"],
        ),
        (
            [*PLACES, piper.Split({}, dim_name="m", num_microbatches=2), *one_f_one_b(2, 2)],
            ["'MB'", "'m'", "one name"],
        ),
        ([piper.Place({"PP": "0"}, [0])], ["'0' is text", "write 'PP': 0"]),
        ([piper.Place({"PP": ["0", 1]}, [0])], ["'0' is text"]),
        ([piper.Place({"PP": 2}, [0])], ["PP=2", "has 2 of them"]),
        ([*PLACES, SPLIT, *one_f_one_b(2, 4)], ["MB=2", "2 microbatches"]),
        ([piper.Place({"pp": 0}, [0])], ["did you mean 'PP'"]),
    ],
)
def test_filters_that_name_what_is_not_there(dag, strategy, words):
    with pytest.raises(FilterError) as caught:
        piper.apply(dag, strategy)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([PLACES, SPLIT], ["entry 0", "unpack it with *"]),
        ([*PLACES, one_f_one_b], ["entry 2", "call it: one_f_one_b(...)"]),
        ([piper.Split], ["entry 0", "the class Split", "Split(...)"]),
        (one_f_one_b, ["list of directives", "call it"]),
        (SPLIT, ["list of directives", "Split"]),
        ("1f1b", ["list of directives", "piper.strategies.pipeline"]),
        (None, ["list of directives"]),
        ([*PLACES, None], ["entry 2"]),
    ],
)
def test_what_is_no_strategy(dag, given, words):
    with pytest.raises(DirectiveError) as caught:
        piper.apply(dag, given)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_strategy_may_be_a_generator(dag):
    placed = piper.apply(dag, (d for d in [*PLACES, SPLIT]))
    assert placed == piper.apply(dag, [*PLACES, SPLIT])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: piper.Split({}, microbatches=4), ["Split", "did you mean 'num_microbatches'"]),
        (lambda: piper.Place({}, device=[0]), ["Place", "did you mean 'devices'"]),
        (lambda: piper.Split(4), ["Split", "filter", "num_microbatches=4"]),
        (lambda: piper.Split({}, 4), ["dim_name", "num_microbatches=4"]),
        (lambda: piper.Place([0], {"PP": 0}), ["filter", "devices=[0]"]),
        (piper.Split, ["Split", "'filter'"]),
        (lambda: piper.Split({}, "MB", 2, 3), ["Split", "positional"]),
        (
            lambda: one_f_one_b(2, microbatches=2),
            ["one_f_one_b", "did you mean 'num_microbatches'"],
        ),
        (lambda: one_f_one_b(2), ["one_f_one_b", "num_microbatches"]),
        (lambda: piper.strategies.pipeline("1f1b", [[0]], microbatches=1), ["num_microbatches"]),
        (lambda: piper.compile(None, None, optimiser=None), ["compile", "'optimizer'"]),
        (lambda: piper.Precision(compuet="bf16"), ["Precision", "did you mean 'compute'"]),
    ],
)
def test_arguments_that_there_are_not(make, words):
    with pytest.raises(TypeError) as caught:
        make()
    assert isinstance(caught.value, ArgumentError)
    assert isinstance(caught.value, PiperError)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "devices", [0, {0, 1}, "0", "cuda:0", ["cuda:0"], torch.device("cpu"), [torch.device("cpu")]]
)
def test_devices_are_a_list_of_numbers(devices):
    with pytest.raises(DirectiveError, match=r"devices.*expected.*numbers, counted from 0"):
        piper.Place({"PP": 0}, devices)


@pytest.mark.parametrize("device", ["1", 1.0, True, torch.device("cpu")])
def test_groups_hold_numbers(device):
    with pytest.raises(PlacementError, match="numbers, counted from 0"):
        piper.strategies.pipeline("1f1b", [[0], [device]], 2)


def test_numbers_of_other_libraries_are_numbers():
    device = torch.tensor(1)
    assert piper.Place({"PP": 0}, [device]) == piper.Place({"PP": 0}, [1])


@pytest.mark.parametrize(
    "make",
    [
        lambda: piper.strategies.pipeline([[0], [1]], 2, "1f1b"),
        lambda: piper.strategies.pipeline(one_f_one_b, [[0], [1]], 2),
        lambda: one_f_one_b(2, 2, stage_tag=0),
        lambda: one_f_one_b(2, True),
    ],
)
def test_schedules_given_wrongly(make):
    with pytest.raises(ScheduleError):
        make()


# --- orders of some microbatches ------------------------------------------------------------------


def options() -> dict[str, object]:
    return {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}


def partial_order() -> list[piper.Order]:
    return one_f_one_b(2, 2)


STRATEGY_OF_SOME = [*PLACES, piper.Split({}, num_microbatches=4), *partial_order()]


def test_an_order_of_some_microbatches_is_warned_of_once_at_the_users_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with piper.compile(
            Stages(2), F.mse_loss, STRATEGY_OF_SOME, batch(), backend="inprocess", **options()
        ) as trainer:
            trainer.step(*batch())
            trainer.step(*batch())
            trainer.evaluate(*batch())
    (found,) = [w for w in caught if issubclass(w.category, PiperWarning)]
    assert "MB=2" in str(found.message)
    assert "8 chunks" in str(found.message)
    assert found.filename == __file__


def test_check_warns_of_it_too():
    with pytest.warns(PiperWarning, match="MB=2"):
        piper.check(Stages(2), F.mse_loss, STRATEGY_OF_SOME, batch(), steps=1, **options())


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_no_schedule_of_the_library_leaves_anything_out(name):
    from piper.directives.order import left_out

    virtual = SCHEDULES[name].placement.stages_per_rank
    strategy = piper.strategies.pipeline(name, [[0], [1]], 4)
    placed = piper.apply(captured(2 * virtual), strategy)
    assert left_out(placed, strategy) == []

"""memory_budget: the bounds that a plan gets, and what is said if nothing helps."""

import re

import pytest
from tests.support.synthetic import chain

import piper
from piper.errors import ConfigError, MemoryBudgetError
from piper.plan.account import account, adam_bytes
from piper.plan.codec import encode_plan
from piper.planner.budget import RECEIVE_BYTES, Bounds
from piper.sizes import to_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (12, 12),
        ("12", 12),
        ("512MiB", 512 * 2**20),
        (" 1.5 gib ", 3 * 2**29),
        ("80GB", 80 * 10**9),
        ("3kB", 3000),
        ("7b", 7),
        (0, 0),
    ],
)
def test_sizes(text, expected):
    assert to_bytes(text, "x") == expected


@pytest.mark.parametrize("text", ["", "MiB", "-1", -1, "5 apples", "1e9", True, "1,5GB"])
def test_malformed_sizes(text):
    with pytest.raises(
        ConfigError, match=r"memory_budget: expected bytes.*found " + re.escape(repr(text))
    ):
        piper.plan(chain(2, batch_size=16), memory_budget=text)


def dag(microbatches=8):
    """Two devices of a ring of four stages; the receives are what may be early."""
    return piper.apply(
        chain(4, batch_size=16 * microbatches),
        [
            *piper.placements.looped([[0], [1]], 2),
            piper.Split({}, num_microbatches=microbatches),
            *piper.schedules.interleaved_one_f_one_b(2, 2, microbatches),
            piper.Offload({}),
        ],
    )


def peak(plan):
    return max(memory.peak for memory in account(plan, adam_bytes))


def planned(found, **options):
    plan = piper.plan(found, optimizer_bytes=adam_bytes, **options)
    piper.verify(plan)
    return plan


def test_every_budget_between_the_extremes_is_kept():
    found = dag()
    usual = planned(found)
    least = planned(found, receive_bytes=0, gather_bytes=0, fetch_bytes=0)
    low, high = peak(least), peak(usual)
    assert low < high
    peaks = []
    for part in range(5):
        budget = low + (high - low) * part // 4
        plan = planned(found, memory_budget=budget)
        assert peak(plan) <= budget
        peaks.append(peak(plan))
    assert peaks == sorted(peaks)
    assert peaks[-1] == high
    assert len(set(peaks)) > 2  # what there is room for is used


def test_a_budget_that_is_no_bound_changes_nothing():
    found = dag()
    assert encode_plan(planned(found, memory_budget="1GiB")) == encode_plan(planned(found))


def test_equal_budgets_give_equal_plans():
    found = dag()
    budget = peak(planned(found)) - 1
    one, two = (planned(dag(), memory_budget=budget) for _ in range(2))
    assert encode_plan(one) == encode_plan(two)


def test_bounds_that_are_given_win():
    found = dag()
    least = peak(planned(found, receive_bytes=0, gather_bytes=0, fetch_bytes=0))
    assert peak(planned(found, memory_budget=least)) == least
    with pytest.raises(MemoryBudgetError):
        planned(found, memory_budget=least, receive_bytes=RECEIVE_BYTES)


def test_few_plans_are_made(monkeypatch):
    from piper import planner

    cuts: list[Bounds] = []

    class Counting(planner.Cutter):
        def __init__(self, *arguments):
            cuts.extend(a for a in arguments if isinstance(a, Bounds))
            super().__init__(*arguments)

    monkeypatch.setattr(planner, "Cutter", Counting)
    found = dag()
    usual = planned(found)
    assert len(cuts) == 1
    planned(found, memory_budget=peak(usual))
    assert len(cuts) == 2
    cuts.clear()
    planned(found, memory_budget=peak(usual) - 1)
    assert len(cuts) <= 10
    assert len(set(cuts)) == len(cuts)


def test_what_does_not_fit_is_explained():
    found = dag()
    least = planned(found, receive_bytes=0, gather_bytes=0, fetch_bytes=0)
    with pytest.raises(MemoryBudgetError) as caught:
        planned(found, memory_budget=1000)
    text = str(caught.value)
    worst = max(account(least, adam_bytes), key=lambda memory: memory.peak)
    assert "memory_budget is 1000 B (1000 bytes) per device" in text
    assert f"device {worst.device} needs" in text
    assert f"a budget of {worst.peak} bytes would do" in text
    assert planned(found, memory_budget=worst.peak)
    assert f"instruction {worst.position}," in text
    for category, nbytes in worst.by_category.items():
        if nbytes and category != "host":
            assert re.search(rf"\d [KM]?i?B  {category.value}$", text, re.MULTILINE), category
    assert "What could lower it" in text
    assert "activations: Recompute or Offload" in text
    assert "optimizer state: Replicate(..., shard_optimizer=True)" in text


def test_what_is_done_already_is_not_advised():
    strategy = [piper.Replicate({}, [0, 1], shard_optimizer=True)]
    with pytest.raises(MemoryBudgetError) as caught:
        planned(piper.apply(chain(6, batch_size=4), strategy), memory_budget=10)
    text = str(caught.value)
    assert "optimizer state: more replicas" in text
    assert "shard_optimizer=True" not in text

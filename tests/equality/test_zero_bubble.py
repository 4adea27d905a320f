"""Schedules with split backwards equal plain PyTorch: in `make test` a part in which every pair of
factor values occurs, with `-m full` all.
"""

import time
from pathlib import Path

import pytest
from tests.equality import zero_bubble_matrix
from tests.equality.zero_bubble_matrix import (
    FACTORS,
    TOLERANCE,
    Case,
    all_cases,
    covering_cases,
    plan_of,
    run,
)
from tests.support.covering import every_pair

from piper.ir.dag import Pass

RESULTS = Path(__file__).parents[2] / "docs"


def test_every_pair_of_factor_values_is_covered():
    found = set().union(*(case.pairs for case in covering_cases()))
    wanted = every_pair(FACTORS)
    names = list(FACTORS)
    one_replica = (names.index("dp"), 1)
    impossible = {(one_replica, (names.index("zero"), level)) for level in (1, 2, 3)}
    assert impossible < wanted
    assert found == wanted - impossible
    assert len(set(covering_cases())) == len(covering_cases()) < len(all_cases()) == 450


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "case", sorted(covering_cases(), key=lambda c: (c.model, c.num_stages, str(c))), ids=str
)
def test_equal_to_plain_pytorch(case: Case):
    assert run(case).worst <= TOLERANCE


@pytest.mark.parametrize("schedule", FACTORS["schedule"])
def test_backwards_are_split(schedule):
    """What the matrix runs are input and weight halves, not whole backwards under another name."""
    plan = plan_of(Case(schedule, 2, "fewest", 1, 0, "mixed"))
    passes = [chunk.pass_ for chunk in plan.dag.chunks() if not chunk.derived]
    assert passes.count(Pass.BACKWARD_WEIGHT) > 0
    whole = schedule.startswith("dualpipe")  # those that overlap are not split
    assert (passes.count(Pass.BACKWARD) > 0) == whole


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_the_whole_matrix():
    """Writes the results to docs/zero_bubble_matrix.md and .csv."""
    began = time.monotonic()
    measured = zero_bubble_matrix.measure(all_cases())
    zero_bubble_matrix.write(measured, RESULTS, time.monotonic() - began)
    wrong = [str(m.case) for m in measured if not m.worst.worst <= TOLERANCE]
    assert not wrong

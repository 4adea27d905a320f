"""Sharded strategies equal plain PyTorch: in `make test` a part in which every pair of factor
values occurs, with `-m full` all.
"""

import time
from pathlib import Path

import pytest
from tests.equality import zero_matrix
from tests.equality.zero_matrix import (
    FACTORS,
    TOLERANCE,
    Case,
    all_cases,
    covering_cases,
    run,
    sharded,
)
from tests.support.covering import every_pair

RESULTS = Path(__file__).parents[2] / "docs"


def pairs(cases: list[Case]) -> set[tuple[object, ...]]:
    return {pair for case in cases for pair in case.pairs}


def test_every_pair_of_factor_values_is_covered():
    chosen = list(covering_cases())
    wanted = every_pair(FACTORS)
    assert pairs(chosen) == wanted
    names = list(FACTORS)
    nothing = {(names.index("zero"), 0), (names.index("dp"), 1)}
    among = {pair for pair in wanted if not nothing.intersection(pair)}
    assert pairs([c for c in chosen if sharded(c)]) == among
    assert len(set(chosen)) == len(chosen) < len(all_cases()) == 432


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "case", sorted(covering_cases(), key=lambda c: (c.num_stages, c.tied, str(c))), ids=str
)
def test_equal_to_plain_pytorch(case: Case):
    assert run(case).worst <= TOLERANCE


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_the_whole_matrix():
    """Writes the results to docs/zero_matrix.md and .csv."""
    began = time.monotonic()
    measured = zero_matrix.measure(all_cases())
    zero_matrix.write(measured, RESULTS, time.monotonic() - began)
    wrong = [str(m.case) for m in measured if not m.worst.worst <= TOLERANCE]
    assert not wrong

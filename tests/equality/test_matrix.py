"""Every strategy of the matrix equals plain PyTorch: in `make test` a part in which every pair of
factor values occurs, with `-m full` all.
"""

import time
from itertools import combinations, product
from pathlib import Path

import pytest
from tests.equality import report
from tests.equality.matrix import FACTORS, TOLERANCE, Case, all_cases, covering_cases, run

RESULTS = Path(__file__).parents[2] / "docs"


def test_every_pair_of_factor_values_is_covered():
    names = list(FACTORS)
    found = {
        (a, getattr(case, a), b, getattr(case, b))
        for case in covering_cases()
        for a, b in combinations(names, 2)
    }
    wanted = {
        (a, x, b, y) for a, b in combinations(names, 2) for x, y in product(FACTORS[a], FACTORS[b])
    }
    assert found == wanted
    assert len(set(covering_cases())) == len(covering_cases()) < len(all_cases()) == 1440


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", sorted(covering_cases(), key=lambda c: (c.model, str(c))), ids=str)
def test_equal_to_plain_pytorch(case: Case):
    assert run(case).worst <= TOLERANCE


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_the_whole_matrix():
    """Writes the results to docs/equality_matrix.md and .csv."""
    began = time.monotonic()
    measured = report.measure(all_cases())
    report.write(measured, RESULTS, time.monotonic() - began)
    wrong = [str(m.case) for m in measured if not m.worst.worst <= TOLERANCE]
    assert not wrong

"""Experts on groups of their own equal plain PyTorch: in `make test` a part in which every pair of
factor values occurs, with `-m full` all.
"""

import pytest
from tests.equality.expert_group_matrix import (
    FACTORS,
    TOLERANCE,
    Case,
    all_cases,
    covering_cases,
    run,
)
from tests.support.covering import every_pair


def test_every_pair_of_factor_values_is_covered():
    chosen = covering_cases()
    wanted = every_pair(FACTORS)
    assert {pair for case in chosen for pair in case.pairs} == wanted
    assert len(set(chosen)) == len(chosen) < len(all_cases()) == 1024


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "case", sorted(covering_cases(), key=lambda c: (c.num_stages, c.form, str(c))), ids=str
)
def test_equal_to_plain_pytorch(case: Case):
    assert run(case).worst <= TOLERANCE


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("form", FACTORS["form"])
@pytest.mark.parametrize("schedule", FACTORS["schedule"])
def test_the_whole_matrix(schedule, form):
    """In parts, which test processes share among them."""
    part = [case for case in all_cases() if (case.schedule, case.form) == (schedule, form)]
    wrong = {str(case): worst for case in part if not (worst := run(case).worst) <= TOLERANCE}
    assert not wrong

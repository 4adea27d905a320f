"""Half backwards equal plain PyTorch: in `make test` a part in which every pair of factor values
occurs, with `-m full` all.
"""

import pytest
from tests.equality.split_matrix import TOLERANCE, Case, all_cases, covering_cases, run

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("case", covering_cases(), ids=str)
def test_equal_to_plain_pytorch(case: Case):
    assert run(case) <= TOLERANCE


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_whole_matrix():
    wrong = {str(case): error for case in all_cases() if not (error := run(case)) <= TOLERANCE}
    assert not wrong

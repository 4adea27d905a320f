"""DAGs and plans of small strategies, as text. To accept a change: ``python -m
tests.golden.cases``.
"""

import pytest
from tests.golden.cases import CASES, FOLDER, path, text

from piper.planner import plan
from piper.verify import verify


@pytest.mark.parametrize("name", CASES)
def test_as_written(name):
    verify(plan(CASES[name]()))
    assert text(name) == path(name).read_text(), (
        "the plan changed; if it should, run `python -m tests.golden.cases` and review the difference"
    )


def test_no_file_without_a_case():
    assert sorted(f.stem for f in FOLDER.glob("*.txt")) == sorted(CASES)

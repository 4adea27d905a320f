import runpy
from pathlib import Path

import pytest

from piper.schedules import dualpipev

SCRIPT = Path(__file__).parents[2] / "examples" / "dualpipev_from_scratch.py"


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches"), [(1, 2), (1, 5), (2, 4), (2, 7), (3, 6), (4, 8), (8, 20)]
)
def test_written_from_scratch_it_is_the_librarys(num_ranks, num_microbatches):
    mine = runpy.run_path(str(SCRIPT))["dualpipev"]
    found = [mine(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    assert found == dualpipev(num_ranks, num_microbatches)


def test_the_example_runs(capsys):
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "the library's: True" in capsys.readouterr().out

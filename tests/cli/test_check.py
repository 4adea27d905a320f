import pytest
from tests.cli.conftest import SECTIONS

from piper.ops.all_reduce import AllReduceBucket


@pytest.fixture
def replicated():
    return SECTIONS["strategy"].replace("[[0], [1]]", "[[0, 1], [2, 3]]")


def test_a_right_strategy_is_equal(piper, write, replicated):
    result = piper("check", write(strategy=replicated))
    assert result.exit_code == 0, result.output
    assert "gradients" in result.stdout
    assert result.stdout.rstrip().endswith("equal")


def test_a_wrong_reduction_is_found(piper, write, replicated, monkeypatch):
    start = AllReduceBucket.start

    def mean(self, device, communicator, tensors):
        handle, collect = start(self, device, communicator, tensors)
        return handle, lambda: [tensor / len(self.members) for tensor in collect()]

    monkeypatch.setattr(AllReduceBucket, "start", mean)
    result = piper("check", write(strategy=replicated))
    assert result.exit_code == 1
    assert "different" in result.stdout


def test_the_text_is_not_needed(piper, write):
    assert piper("check", write(data='files = ["absent.txt"]')).exit_code == 0

import pytest

from piper.devices.collectives import KINDS, LARGE, between_processes, between_threads
from piper.devices.links import SMALL


@pytest.mark.parametrize("size", [2, 3])
def test_all_kinds_are_timed_between_threads(size):
    found = between_threads(size, rounds=2)
    assert found.contention is None
    assert tuple(found.kinds) == KINDS
    for times in found.kinds.values():
        assert times.issue.keys() == times.travel.keys() == {SMALL, LARGE}
        assert all(
            0 < seconds < 10 for of in (times.issue, times.travel) for seconds in of.values()
        )


def test_processes_compute_and_communicate_at_once():
    found = between_processes(2, ("reduce_scatter",), rounds=3)
    assert tuple(found.kinds) == ("reduce_scatter",)
    times = found.kinds["reduce_scatter"]
    assert times.issue[LARGE] + times.travel[LARGE] > times.issue[SMALL] + times.travel[SMALL]
    assert found.contention is not None
    assert 0 < found.contention.work <= 1
    assert 0 < found.contention.traffic <= 1

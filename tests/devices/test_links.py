import pytest

from piper.devices.links import LARGE, SMALL, between_processes, between_threads


@pytest.mark.parametrize("measure", [between_threads, between_processes])
def test_messages_are_timed_both_ways(measure):
    times = measure()
    assert times.issue.keys() == times.travel.keys() == {SMALL, LARGE}
    assert 0 < times.latency < 1
    # Even a busy machine copies a few MB in a second, and none moves a TB.
    assert 1e6 < times.bandwidth < 1e12 or times.travel[LARGE] == pytest.approx(1e-9)

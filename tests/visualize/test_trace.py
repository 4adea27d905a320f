import json

import pytest
from tests.verify.plans import case

from piper.plan.costs import UnitCosts
from piper.simulate import simulate
from piper.visualize.trace import save_trace, trace_events


@pytest.fixture
def line():
    return simulate(case("1f1b × dp"), "CPU")


def test_every_box_is_an_event_on_its_streams_track(line):
    events = list(trace_events(line))
    tracks = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
    found = [
        (e["pid"], tracks[e["pid"], e["tid"]], e["args"]["position"], e["name"])
        for e in events
        if e["ph"] == "X"
    ]
    expected = [
        (d.device, lane.stream, b.position, b.label)
        for d in line.devices
        for lane in d.lanes
        for b in lane.boxes
    ]
    assert sorted(found) == sorted(expected)
    assert {name for (_, track), name in tracks.items() if track == 0} == {"compute"}
    last = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X")
    assert last == pytest.approx(max(b.end for d in line.devices for b in d.boxes()) * 1e6)


def test_an_arrow_goes_from_each_send_to_its_receive(line):
    events = list(trace_events(line))
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == 2 * 2 * 4  # replicas, directions, microbatches
    for identity, start in starts.items():
        assert start["pid"] != ends[identity]["pid"]
        assert start["ts"] < ends[identity]["ts"]


def test_memory_is_a_counter(line):
    counters = [e for e in trace_events(line) if e["ph"] == "C" and e["pid"] == 1]
    assert max(sum(e["args"].values()) for e in counters) == line.devices[1].peak


def test_the_file_is_json(line, tmp_path):
    save_trace(line, tmp_path / "trace.json")
    contents = json.loads((tmp_path / "trace.json").read_text())
    assert contents["traceEvents"] == list(trace_events(line))
    assert contents["otherData"]["source"] == "simulated"


def test_what_takes_no_time_is_left_out():
    events = trace_events(simulate(case("1f1b"), UnitCosts()))
    assert {e["cat"] for e in events if e["ph"] == "X"} == {"compute"}

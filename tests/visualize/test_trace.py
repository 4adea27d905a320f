import json
from itertools import pairwise

import pytest
from msgspec.structs import replace
from tests.verify.plans import case

from piper.ids import COMPUTE
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


def slices(events):
    """By track: begin and end of its boxes, in whole nanoseconds."""
    found = {}
    for e in events:
        if e["ph"] == "X":
            begin, length = round(e["ts"] * 1000), round(e["dur"] * 1000)
            found.setdefault((e["pid"], e["tid"]), []).append((begin, begin + length))
    return found


def check(events):
    """What a viewer relies on."""
    named = {}
    for e in events:
        assert e["ph"] in {"M", "X", "s", "f", "C"}
        if e["ph"] == "M":
            assert e["name"] in {
                f"{x}_{y}" for x in ("process", "thread") for y in ("name", "sort_index")
            }
            named.setdefault(e["name"], {})[e["pid"], e["tid"]] = next(iter(e["args"].values()))
    tracks = slices(events)
    assert tracks.keys() <= named["thread_name"].keys() == named["thread_sort_index"].keys()
    assert {p for p, _ in tracks} == {p for p, _ in named["process_name"]}
    for (process, _), order in named["process_sort_index"].items():
        assert order == process
    for boxes in tracks.values():
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(boxes)))
    arrows = {}
    for e in (e for e in events if e["ph"] in "sf"):
        at = round(e["ts"] * 1000)
        assert any(a <= at < b for a, b in tracks[e["pid"], e["tid"]])
        assert e["ph"] not in arrows.setdefault((e["cat"], e["name"], e["id"]), {})
        arrows[e["cat"], e["name"], e["id"]][e["ph"]] = at
        assert e["ph"] == "s" or e["bp"] == "e"
    assert all(set(ends) == {"s", "f"} and ends["s"] <= ends["f"] for ends in arrows.values())
    return arrows


@pytest.mark.parametrize("name", ["1f1b × dp", "zero 3", "two ways × dp"])
@pytest.mark.parametrize("costs", ["CPU", "H100"])
def test_the_file_is_one_that_viewers_can_draw(name, costs, tmp_path):
    save_trace(simulate(case(name), costs), tmp_path / "trace.json")
    assert check(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])


def changed(line, device, change):
    """*line* with the boxes of a device's communication streams changed."""
    lanes = tuple(
        lane if lane.stream == COMPUTE else replace(lane, boxes=change(lane.boxes))
        for lane in line.devices[device].lanes
    )
    devices = list(line.devices)
    devices[device] = replace(devices[device], lanes=lanes)
    return replace(line, devices=tuple(devices))


def test_boxes_that_overlap_are_on_tracks_of_their_own(line):
    late = changed(
        line, 0, lambda boxes: tuple(replace(b, end=b.end + line.seconds) for b in boxes)
    )
    events = list(trace_events(late))
    assert check(events)
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0]
    assert any(name.endswith(" (2)") for name in names)
    assert len(set(names)) == len(names)
    count = sum(1 for d in line.devices for _ in d.boxes())
    assert sum(map(len, slices(events).values())) == count


def test_a_message_of_which_one_end_is_missing_has_no_arrow(line):
    whole = check(list(trace_events(line)))
    half = check(list(trace_events(replace(line, devices=line.devices[:2]))))
    assert len(half) < len(whole)


def test_boxes_that_touch_do_not_overlap_after_rounding(line):
    third = line.seconds / 3e6
    boxes = line.devices[0].lanes[0].boxes
    many = tuple(
        replace(boxes[0], start=k * third, end=(k + 1) * third, meeting="") for k in range(999)
    )
    lane = replace(line.devices[0].lanes[0], boxes=many)
    short = replace(line, devices=(replace(line.devices[0], lanes=(lane,)),))
    (track,) = slices(list(trace_events(short))).values()
    assert len(track) == 999
    check(list(trace_events(short)))


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

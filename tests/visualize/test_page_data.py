from itertools import pairwise

import msgspec
import pytest
from tests.visualize.timelines import pipeline

from piper.ids import NodeId
from piper.schedules import interleaved_one_f_one_b, one_f_one_b
from piper.visualize.page_data import Waits, links, timeline_data, windows


@pytest.fixture(scope="module")
def step():
    return pipeline(one_f_one_b(3, 4), stages=3, replicas=2)


def numbered(timeline):
    return [
        (d.device, lane.stream, b) for d in timeline.devices for lane in d.lanes for b in lane.boxes
    ]


def at(timeline, device, label):
    return next(
        i for i, (d, _, b) in enumerate(numbered(timeline)) if (d, b.label) == (device, label)
    )


def named(timeline, indices):
    boxes = numbered(timeline)
    return {(boxes[i][0], boxes[i][2].label) for i in indices}


def test_a_chunk_waits_for_what_ended_on_its_own_device(step):
    found = links(step)
    assert named(step, found[at(step, 2, "F PP=1 MB=0")].binding) == {(2, "F transfer PP=0 MB=0")}
    assert named(step, found[at(step, 0, "F PP=0 MB=1")].binding) == {(0, "F PP=0 MB=0")}
    assert found[at(step, 0, "F PP=0 MB=0")] == Waits(())


def test_what_had_to_end_too_is_listed_behind(step):
    found = links(step)[at(step, 0, "B PP=0 MB=0")]
    assert named(step, found.binding) == {(0, "B transfer PP=1 MB=0")}
    assert named(step, found.others) == {(0, "F PP=0 MB=0"), (0, "F PP=0 MB=2")}
    data = timeline_data(step, "x", links(step))
    i = at(step, 0, "B PP=0 MB=0")
    assert data.boxes.waits[i] == [*found.binding, *found.others]
    assert data.boxes.bound[i] == 1


def test_a_receive_waits_for_the_chunk_of_its_sender(step):
    received = at(step, 3, "F transfer PP=0 MB=0")
    assert named(step, links(step)[received].binding) == {(1, "F PP=0 MB=0")}


def test_a_collective_waits_for_the_last_member():
    step = pipeline(one_f_one_b(1, 1), stages=1, replicas=2)
    late, early = step.devices
    longer = [
        msgspec.structs.replace(b, start=b.start, end=b.end + 1e-4)
        for b in late.lanes[0].boxes[1:2]
    ]
    lane = msgspec.structs.replace(late.lanes[0], boxes=(late.lanes[0].boxes[0], *longer))
    reduce = lambda d: d.lanes[1].boxes[0]  # noqa: E731
    moved = [
        msgspec.structs.replace(
            d,
            lanes=(
                lane if d is late else d.lanes[0],
                msgspec.structs.replace(
                    d.lanes[1],
                    boxes=(
                        msgspec.structs.replace(
                            reduce(d), start=longer[0].end, end=longer[0].end + 1
                        ),
                    ),
                ),
            ),
        )
        for d in (late, early)
    ]
    step = msgspec.structs.replace(step, devices=tuple(moved))
    for device in (0, 1):
        waited = links(step)[at(step, device, "all_reduce PP=0")].binding
        assert named(step, waited) == {(0, "B PP=0 MB=0")}


def test_of_members_that_end_together_each_waits_for_its_own(step):
    for device in (0, 1):
        waited = links(step)[at(step, device, "all_reduce PP=0")].binding
        assert named(step, waited) == {(device, "B PP=0 MB=3")}


def test_a_node_that_is_nowhere_links_to_nothing(step):
    first, *others = step.devices
    lane = first.lanes[0]
    odd = msgspec.structs.replace(lane.boxes[3], waits_on=(NodeId(10**6),))
    lane = msgspec.structs.replace(lane, boxes=(*lane.boxes[:3], odd, *lane.boxes[4:]))
    first = msgspec.structs.replace(first, lanes=(lane, *first.lanes[1:]))
    assert links(msgspec.structs.replace(step, devices=(first, *others)))[3].binding == ()


def decoded(data):
    """Start and end of each box in nanoseconds, as ``assets/data.js`` reads them."""
    found, i = [], 0
    for device in data.devices:
        for lane in device.lanes:
            now = 0
            for _ in range(lane.count):
                start = now + data.boxes.gap[i]
                now = start + data.boxes.length[i]
                found.append((start, now))
                i += 1
    return found


def test_columns_hold_the_times_to_the_nanosecond(step):
    data = timeline_data(step, "x", links(step))
    expected = [(round(b.start * 1e9), round(b.end * 1e9)) for _, _, b in numbered(step)]
    assert decoded(data) == expected
    assert [data.strings[i] for i in data.boxes.label] == [b.label for _, _, b in numbered(step)]
    assert [step.critical_path[k].label for k in range(len(step.critical_path))] == [
        data.strings[data.boxes.label[i]] for i in data.critical_path
    ]


def test_members_of_a_meeting_share_a_number_and_nobody_else(step):
    data = timeline_data(step, "x", links(step))
    groups = {}
    for number, (_, _, box) in zip(data.boxes.meeting, numbered(step), strict=True):
        groups.setdefault(number, set()).add(box.meeting)
    assert groups.pop(-1) == {""}
    assert all(len(meetings) == 1 for meetings in groups.values())


def test_every_second_stage_of_a_device_is_marked():
    step = pipeline(interleaved_one_f_one_b(2, 2, 2), stages=4)
    data = timeline_data(step, "x", links(step))
    odd = {
        (device, dict(box.tags)["PP"])
        for mark, (device, _, box) in zip(data.boxes.odd, numbered(step), strict=True)
        if mark and not box.meeting
    }
    assert odd == {(0, 2), (1, 3)}


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        ((3,), "3"),
        ((0, 2, 4, 5, 6), "0, 2, 4–6"),
        (tuple(range(0, 40, 4)), "0, 4, 8, 12, 16, 20, …"),
    ],
)
def test_devices_that_do_the_same_are_listed_in_short(step, devices, text):
    first = msgspec.structs.replace(step.devices[0], stands_for=devices)
    folded = msgspec.structs.replace(step, devices=(first,), num_devices=len(devices))
    (shown,) = timeline_data(folded, "x", links(folded)).devices
    assert (shown.stands_for.count, shown.stands_for.text) == (len(devices), text)


@pytest.mark.parametrize("most", [1, 7, 40])
def test_parts_hold_every_box_and_no_more_than_asked(step, most):
    parts = windows([step], most)
    assert parts[0][0] == 0.0
    assert parts[-1][1] == step.seconds
    assert all(a[1] == b[0] for a, b in pairwise(parts))
    starts = [b.start for _, _, b in numbered(step)]
    together = max(starts.count(s) for s in starts)
    waits = links(step)
    shown = set()
    for k, part in enumerate(parts):
        data = timeline_data(step, "x", waits, part)
        shown |= set(decoded(data))
        last = k == len(parts) - 1
        starting = [s for s in starts if part[0] <= s < part[1] or (last and s >= part[1])]
        assert len(starting) <= most + together
        # What it waited for is linked or counted.
        assert sum(map(len, data.boxes.waits)) + sum(data.boxes.away) == sum(
            len(w.binding) + len(w.others)
            for w, (_, _, b) in zip(waits, numbered(step), strict=True)
            if b.end > part[0] and b.start < part[1]
        )
        for device in data.devices:
            assert device.memory.times[0] >= round(part[0] * 1e9) - 1
    assert shown == {(round(b.start * 1e9), round(b.end * 1e9)) for _, _, b in numbered(step)}


def test_memory_of_a_part_begins_with_what_is_alive_then(step):
    curve = step.devices[0].memory
    middle = (curve.times[3] + curve.times[4]) / 2
    data = timeline_data(step, "x", links(step), (middle, step.seconds))
    memory = data.devices[0].memory
    assert memory.times[0] == round(middle * 1e9)
    assert memory.nbytes["activations"] == list(curve.nbytes["activations"][3:])

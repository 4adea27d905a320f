import pytest
from rich.console import Console
from tests.schedules.unit_time import chunks, run

from piper.errors import PlanError
from piper.schedules import gpipe, one_f_one_b
from piper.visualize.terminal import Box, DeviceRow, draw


def rows_of(orders, num_stages):
    ranks = [chunks(order) for order in orders]
    start = run(ranks, num_stages).start
    return [
        DeviceRow(
            rank,
            tuple(Box(start[c], 1, c[0], microbatch=c[2], stage=c[1]) for c in sequence),
        )
        for rank, sequence in enumerate(ranks)
    ]


def lines(text):
    return [line.rstrip() for line in text.plain.split("\n")]


def colours(text):
    """Characters of the drawing by their background."""
    console = Console(width=200, color_system="standard", force_terminal=True)
    found = {}
    for segment in console.render(text):
        if segment.style and segment.style.bgcolor:
            found.setdefault(segment.style.bgcolor.name, set()).update(segment.text)
    return found


def test_one_f_one_b():
    assert lines(draw(rows_of(one_f_one_b(2, 3), 2))) == [
        "device 0 |F0|F1|   B0|F2|B1|   B2|",
        "device 1 |   F0|B0|F1|B1|F2|B2|",
        " F  forward   B  backward  bubble 25.0%",
    ]


def test_a_long_timeline_goes_on_below_at_a_whole_unit():
    assert lines(draw(rows_of(gpipe(2, 3), 2), width=24)) == [
        "device 0 |F0|F1|F2|",
        "device 1 |   F0|F1|F2|",
        "",
        "device 0 |   B0|B1|B2|",
        "device 1 |B0|B1|B2|",
        " F  forward   B  backward  bubble 25.0%",
    ]


@pytest.mark.parametrize("width", [20, 33, 80, 200])
@pytest.mark.parametrize("count", [1, 12, 120])
def test_no_row_is_wider_than_asked_and_panels_are_few(width, count):
    drawing = lines(draw(rows_of(one_f_one_b(3, count), 3), width=width, max_panels=4))[:-1]
    assert max(map(len, drawing)) <= width
    assert sum(line.startswith("device 0") for line in drawing) <= 4


def test_every_microbatch_number_is_there_when_there_is_room():
    (row,) = rows_of(one_f_one_b(1, 120), 1)
    drawing = "".join(line[10:] for line in lines(draw([row], width=90, max_panels=20))[:-1])
    labels = drawing.replace(" ", "").split("|")
    assert labels[:-1] == [f"{p}{m}" for m in range(120) for p in "FB"]


def test_a_narrow_box_shows_its_pass_and_never_a_wrong_number():
    row = DeviceRow(0, (Box(0, 1, "F", 123, 0), Box(1, 1, "B", 123, 0)))
    assert lines(draw([row], width=16, max_panels=1))[0] == "device 0 |F |B |"


def test_boxes_are_as_long_as_their_chunks():
    row = DeviceRow(3, (Box(10, 1, "F", 0, 0), Box(11.0, 2.0, "B", 0, 0)))
    assert lines(draw([row], width=80))[0] == "device 3 |F0|B0   |"


def test_halves_of_the_backward_and_the_update():
    row = DeviceRow(
        0,
        (
            Box(0, 2, "BI", 4, 0),
            Box(2, 2, "BW", 4, 0),
            Box(4, 1, "UPDATE", 0, 0),
        ),
    )
    drawing = draw([row])
    assert lines(drawing) == [
        "device 0 |I4 |W4 |U|",
        " I  backward, inputs   W  backward, weights   U  update  bubble 0.0%",
    ]


def test_passes_have_different_colours_and_stages_of_a_device_different_shades():
    row = DeviceRow(
        0,
        (
            Box(0, 1, "F", 0, 1),
            Box(1, 1, "F", 0, 5),
            Box(2, 1, "B", 0, 5),
            Box(3, 1, "B", 0, 1),
        ),
    )
    found = colours(draw([row]))
    assert len(found) == 4
    assert sorted(c for c, characters in found.items() if "F" in characters) == [
        "blue",
        "bright_blue",
    ]


def test_the_bubble_counts_the_idle_time_of_all_devices():
    rows = [DeviceRow(0, (Box(0, 4, "F", 0, 0),)), DeviceRow(1, ())]
    assert draw(rows).plain.endswith("bubble 50.0%")


def test_nothing_to_draw():
    assert draw([]).plain == "nothing to draw"
    assert draw([DeviceRow(0, (Box(0, 0, "UPDATE", 0, 0),))]).plain == "nothing to draw"


def test_overlapping_boxes_are_refused():
    row = DeviceRow(2, (Box(0, 2, "F", 0, 0), Box(1, 2, "B", 0, 1)))
    with pytest.raises(PlanError, match="device 2: F0 of stage 0 ends at 2, but B0 of stage 1"):
        draw([row])


def test_an_unknown_pass_is_refused():
    with pytest.raises(PlanError, match="device 0: unknown pass 'X'; known: F, B, BI, BW, UPDATE"):
        draw([DeviceRow(0, (Box(0, 1, "X", 0, 0),))])

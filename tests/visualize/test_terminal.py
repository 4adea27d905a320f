from itertools import product

import pytest
from rich.console import Console
from tests.schedules.unit_time import chunks, run

from piper.errors import PlanError
from piper.schedules import gpipe, one_f_one_b
from piper.visualize.colours import LOOKS
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
    console = Console(width=200, color_system="truecolor", force_terminal=True)
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
        " F  forward",
        " B  backward",
        "bubble 25.0%",
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
    look = LOOKS["F"]
    forward = {colour for colour, characters in found.items() if "F" in characters}
    assert forward == {look.colour, look.darker}


def test_text_reads_on_its_box_whatever_the_theme():
    """Both colours are given, at a contrast of 3 or more (WCAG 2, for what is not running text)."""
    rows = [
        DeviceRow(
            0, tuple(Box(2 * i, 2, p, 0, s) for i, (p, s) in enumerate(product(LOOKS, (0, 1))) if p)
        )
    ]
    console = Console(width=200, color_system="truecolor", force_terminal=True)
    styles = {s.style for s in console.render(draw(rows)) if s.style and s.style.bgcolor}
    assert len(styles) == 2 * (len(LOOKS) - 1)
    for style in styles:
        one, two = sorted(luminance(c.triplet.hex) for c in (style.color, style.bgcolor))
        assert (two + 0.05) / (one + 0.05) >= 3, style


def luminance(colour):
    """Relative luminance as WCAG 2 defines it."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


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

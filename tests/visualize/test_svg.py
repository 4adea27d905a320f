import re
from collections import Counter
from xml.etree import ElementTree as ET

import msgspec
import pytest
from tests.visualize.timelines import pipeline

from piper.errors import PictureError
from piper.schedules import interleaved_one_f_one_b, one_f_one_b
from piper.visualize import svg as module
from piper.visualize.colours import LOOKS
from piper.visualize.svg import svg

NAMESPACE = "{http://www.w3.org/2000/svg}"


def parsed(text):
    return ET.fromstring(text)


def chunks(root):
    """Label, left, top, width and colour of each box."""
    return [
        (
            r.find(f"{NAMESPACE}title").text,
            *(float(r.get(k)) for k in ("x", "y", "width")),
            r.get("fill"),
        )
        for r in root.iter(f"{NAMESPACE}rect")
        if r.find(f"{NAMESPACE}title") is not None
    ]


@pytest.fixture(scope="module")
def step():
    return pipeline(one_f_one_b(2, 3), stages=2, split=True)


def test_every_chunk_has_a_box_as_long_as_it_takes(step):
    root = parsed(svg(step))
    expected = Counter(b.label for d in step.devices for b in d.boxes() if not b.meeting)
    found = chunks(root)
    assert Counter(label for label, *_ in found) == expected
    boxes = {b.label: b for d in step.devices for b in d.boxes() if not b.meeting}
    scale = (960 - min(left for _, left, *_ in found) - 1) / step.seconds
    for label, _, _, width, colour in found:
        assert width == pytest.approx(boxes[label].seconds * scale - 1, abs=0.02)
        assert colour == LOOKS[boxes[label].pass_].colour
    rows = {top for _, _, top, *_ in found}
    assert len(rows) == len(step.devices)


def test_microbatch_numbers_stand_in_the_boxes_that_have_room(step):
    def numbers(width):
        texts = (t.text for t in parsed(svg(step, width=width)).iter(f"{NAMESPACE}text"))
        return sorted(t for t in texts if t.isdigit())

    assert numbers(960) == sorted("012" * 2 * 3)  # F, BI, BW on two devices
    assert numbers(140) == []


def test_the_second_stage_of_a_device_is_darker():
    root = parsed(svg(pipeline(interleaved_one_f_one_b(2, 2, 2), stages=4)))
    colours = {
        label.split()[1]: colour for label, *_, colour in chunks(root) if label.startswith("F")
    }
    assert colours == {
        "PP=0": LOOKS["F"].colour,
        "PP=1": LOOKS["F"].colour,
        "PP=2": LOOKS["F"].darker,
        "PP=3": LOOKS["F"].darker,
    }


def test_the_legend_names_what_is_there_and_the_bubble(step):
    texts = [t.text for t in parsed(svg(step)).iter(f"{NAMESPACE}text") if not t.text.isdigit()]
    assert texts == [
        "device 0",
        "device 1",
        "forward",
        "backward, inputs",
        "backward, weights",
        "update",
        module.NUMBERS,
        f"step 26 ms, bubble {step.bubble:.1%}",
    ]
    forwards = svg(msgspec.structs.replace(step, seconds=9.0, unit="F"))
    assert f">step 9 F (F: one forward), bubble {step.bubble:.1%}<" in forwards


def test_the_legend_says_what_darker_boxes_are(step):
    looped = pipeline(interleaved_one_f_one_b(2, 2, 2), stages=4)
    assert f">{module.NUMBERS}{module.DARKER}<" in svg(looped)
    assert module.DARKER not in svg(looped, width=400)  # no room
    assert module.DARKER not in svg(step)


def contrast(a, b):
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_texts_can_be_read_on_white_on_black_and_in_boxes():
    assert contrast(module.NEUTRAL, "#ffffff") > 3.5
    assert contrast(module.NEUTRAL, "#0d1117") > 3.5
    for look in LOOKS.values():
        for colour in (look.colour, look.darker):
            assert contrast(colour, module.ink(colour)) > 4.3


def test_names_are_escaped_and_nothing_is_drawn_behind(step):
    first = step.devices[0]
    box = msgspec.structs.replace(first.lanes[0].boxes[0], label="a<b&c")
    lane = msgspec.structs.replace(first.lanes[0], boxes=(box, *first.lanes[0].boxes[1:]))
    device = msgspec.structs.replace(first, lanes=(lane, *first.lanes[1:]))
    text = svg(msgspec.structs.replace(step, devices=(device, *step.devices[1:])))
    assert "a<b&c" in {label for label, *_ in chunks(parsed(text))}
    assert not re.search(r'<rect[^>]*width="(100%|960)"', text)


def test_too_many_chunks_are_refused(step, monkeypatch):
    monkeypatch.setattr(module, "MOST_BOXES", 10)
    with pytest.raises(
        PictureError, match=r"has 20 chunks, an SVG holds at most 10; write an \.html"
    ):
        svg(step)


def test_a_timeline_without_chunks_is_an_error(step):
    devices = tuple(msgspec.structs.replace(d, lanes=d.lanes[1:]) for d in step.devices)
    with pytest.raises(PictureError, match="no chunks"):
        svg(msgspec.structs.replace(step, devices=devices))

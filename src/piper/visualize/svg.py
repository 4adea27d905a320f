"""A schedule as a static picture for papers and READMEs: a row per device, a box per chunk with the
number of its microbatch.

The background is transparent and all that is outside of the boxes is a grey that reads on white and
on black.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from piper.errors import PictureError
from piper.simulate.timeline import FORWARDS, Box, DeviceTimeline, Lane, Timeline, time_text
from piper.visualize.checks import check_drawable
from piper.visualize.colours import LOOKS, Look, ink
from piper.visualize.files import write_text
from piper.visualize.page_data import outermost, stage_ranks

MOST_BOXES = 20_000
"""A picture with more boxes is refused: no reader could make them out, and few viewers open it."""

NEUTRAL = "#7d8590"
NUMBERS = "number: microbatch"
DARKER = ", darker: every second stage of a device"
ROW, GAP, DIGIT, LINE = 24, 5, 6.4, 16
"""Pixels: height of a row, space between rows, width of a digit, height of a line of the legend."""

_STYLE = 'role="img" font-size="11" font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif"'


def write_svg(timeline: Timeline, path: Path, *, width: int = 960) -> None:
    """Write the picture. Raises :class:`PictureError` as :func:`svg` does, or if the file cannot be
    written.
    """
    write_text(path, svg(timeline, width=width))


def svg(timeline: Timeline, *, width: int = 960) -> str:
    """The text of a picture *width* pixels wide: chunks and updates of all devices, without
    communication.

    Raises :class:`PictureError` if there is no chunk, or if there are more than :data:`MOST_BOXES`.
    """
    rows = list(_rows(timeline))
    boxes = [box for row in rows for box in row.boxes]
    check_drawable(timeline, "the timeline")
    if not boxes:
        raise PictureError("the timeline has no chunks: there is nothing to draw")
    if len(boxes) > MOST_BOXES:
        raise PictureError(
            f"the timeline has {len(boxes)} chunks, an SVG holds at most {MOST_BOXES}; write an .html page instead"
        )
    margin = round(max(len(row.name) for row in rows) * DIGIT) + 8
    scale = (width - margin - 1) / timeline.seconds
    height = len(rows) * (ROW + GAP) + 26 + LINE
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" {_STYLE}>',
        f"<title>{escape(_summary(timeline))}</title>",
    ]
    for number, row in enumerate(rows):
        lines += _row(row, number * (ROW + GAP), margin, scale, width)
    darker = any(odd for row in rows for odd in row.odd)
    lines += _legend(timeline, boxes, margin, height - 8 - LINE, width, darker=darker)
    return "\n".join([*lines, "</svg>", ""])


@dataclass(frozen=True)
class _Row:
    """The chunks of one stream; ``odd`` says which are of an odd stage."""

    name: str
    boxes: tuple[Box, ...]
    odd: tuple[bool, ...]


def _rows(timeline: Timeline) -> Iterator[_Row]:
    """A row for each stream that computes; the first of a device has its name."""
    for device in timeline.devices:
        others = len(device.stands_for) - 1
        name = f"device {device.device}" + (f" (+{others})" if others else "")
        for lane in device.lanes:
            row = _chunks(device, lane, name, frozenset(timeline.splits))
            if row.boxes:
                yield row
                name = str(lane.stream)


def _chunks(device: DeviceTimeline, lane: Lane, name: str, splits: frozenset[str]) -> _Row:
    ranks = stage_ranks(device, splits)
    boxes = tuple(b for b in lane.boxes if not b.meeting and b.pass_ and b.seconds > 0)
    odd = tuple(ranks.get(outermost(b, splits) or ("", 0), 0) % 2 == 1 for b in boxes)
    return _Row(name, boxes, odd)


def _row(row: _Row, top: int, margin: int, scale: float, width: int) -> Iterator[str]:
    middle = top + ROW / 2
    yield f'<text x="0" y="{middle + 4:g}" fill="{NEUTRAL}">{escape(row.name)}</text>'
    yield (
        f'<rect x="{margin}" y="{top}" width="{width - margin}" height="{ROW}" rx="3" fill="{NEUTRAL}" fill-opacity=".12"/>'
    )
    for box, odd in zip(row.boxes, row.odd, strict=True):
        left, length = margin + box.start * scale, box.seconds * scale
        shown = max(length - min(1, length / 4), 0.4)  # a little space between boxes
        colour = _look(box).of(odd=odd)
        yield (
            f'<rect x="{left:.2f}" y="{top}" width="{shown:.2f}" height="{ROW}" rx="{min(3, shown / 4):.1f}" fill="{colour}">'
            f"<title>{escape(box.label)}</title></rect>"
        )
        if (text := _inside(box)) and len(text) * DIGIT < shown - 2:
            yield (
                f'<text x="{left + shown / 2:.2f}" y="{middle + 4:g}" text-anchor="middle" fill="{ink(colour)}">{text}</text>'
            )


def _look(box: Box) -> Look:
    return LOOKS.get(box.pass_, LOOKS[""])


def _inside(box: Box) -> str:
    """The microbatch's number; nothing in boxes that only belong to a chunk, such as sums of
    gradients.
    """
    return str(box.microbatch) if box.microbatch is not None and box.op == "compute" else ""


def _legend(
    timeline: Timeline, boxes: list[Box], margin: int, bottom: int, width: int, *, darker: bool
) -> Iterator[str]:
    """What the colours mean; below, what numbers and *darker* boxes are, if there is room, and the
    totals.
    """
    left = float(margin)
    used = {box.pass_ for box in boxes}
    for meaning, colour in (
        (look.meaning, look.colour) for name, look in LOOKS.items() if name in used
    ):
        yield f'<rect x="{left:g}" y="{bottom - 9}" width="10" height="10" rx="2" fill="{colour}"/>'
        yield f'<text x="{left + 15:g}" y="{bottom}" fill="{NEUTRAL}">{escape(meaning)}</text>'
        left += 15 + len(meaning) * DIGIT + 14
    words, totals, below = (
        f"{NUMBERS}{DARKER}" if darker else NUMBERS,
        _totals(timeline),
        bottom + LINE,
    )
    if margin + (len(words) + len(totals) + 2) * DIGIT < width:
        yield f'<text x="{margin}" y="{below}" fill="{NEUTRAL}">{escape(words)}</text>'
    yield f'<text x="{width}" y="{below}" text-anchor="end" fill="{NEUTRAL}">{escape(totals)}</text>'


def _totals(timeline: Timeline) -> str:
    """How long the step is, and how much of that devices are idle."""
    forwards = " (F: one forward)" if timeline.unit == FORWARDS else ""
    return (
        f"step {time_text(timeline.seconds, timeline.unit)}{forwards}, bubble {timeline.bubble:.1%}"
    )


def _summary(timeline: Timeline) -> str:
    return f"One {timeline.source} training step on {timeline.num_devices} devices, {_totals(timeline)}"

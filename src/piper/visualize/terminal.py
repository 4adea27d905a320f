"""A schedule as text: one row per device, time from left to right, one box per chunk.

::

    device 0 |F0|F1|   B0|F2|B1|   B2|
    device 1 |   F0|B0|F1|B1|F2|B2|

Boxes are coloured by pass (darker for every second stage of a device); the number is the
microbatch.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

from piper.errors import PlanError
from piper.visualize.colours import LOOKS, ink


@dataclass(frozen=True, slots=True)
class Box:
    """One chunk on one device, from ``start`` for ``duration``, in one unit of time for all boxes.

    ``pass_`` is ``F``, ``B``, ``BI``, ``BW`` or ``UPDATE``.
    """

    start: float
    duration: float
    pass_: str
    microbatch: int
    stage: int

    @property
    def end(self) -> float:
        """When the chunk is done."""
        return self.start + self.duration

    @property
    def label(self) -> str:
        """``F3``: pass and microbatch; ``U`` for an update, which has no microbatch."""
        letter = _LETTERS[self.pass_]
        return letter if self.pass_ == _UPDATE else f"{letter}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """What one device does; boxes of one device do not overlap."""

    device: int
    boxes: tuple[Box, ...]


_UPDATE = "UPDATE"
_LETTERS = {"F": "F", "B": "B", "BI": "I", "BW": "W", _UPDATE: "U"}
_EDGE = "|"
_Cell = tuple[str, str]
"""One character and its style."""


def draw(rows: Sequence[DeviceRow], width: int = 80, *, max_panels: int = 8) -> Text:
    """Draw *rows*, in the order given, at most *width* columns wide.

    A timeline that is longer than a line goes on in another panel below. Boxes are wide enough for
    their labels unless that takes more than *max_panels* panels; a box too narrow for its label
    shows its pass alone. The last line explains the colours and gives the bubble: the share of all
    devices' time, from the start of the first box to the end of the last, in which a device is
    idle.

    Raises :class:`~piper.errors.PlanError` if boxes of one device overlap or a pass is unknown.
    """
    for row in rows:
        _check(row)
    boxes = [box for row in rows for box in row.boxes if box.duration > 0]
    if not boxes:
        return Text("nothing to draw")
    begin, end = min(b.start for b in boxes), max(b.end for b in boxes)
    names = [f"device {row.device} " for row in rows]
    margin = max(map(len, names))
    room = max(1, width - margin - len(_EDGE))
    scale = _columns_per_unit(boxes, max_panels * room / (end - begin))
    panel = room - room % int(scale) if 1 <= scale <= room else room
    columns = max(1, round((end - begin) * scale))
    lines = [_cells(row, begin, scale, columns) for row in rows]
    text = Text(no_wrap=True, overflow="crop")
    for start in range(0, columns, panel):
        text.append("\n" * (start > 0))
        for name, line in zip(names, lines, strict=True):
            text.append(name.ljust(margin) + _EDGE)
            _append_cells(text, line[start : start + panel])
            text.append("\n")
    _append_legend(
        text, boxes, width, idle=1 - sum(b.duration for b in boxes) / (end - begin) / len(rows)
    )
    return text


def _check(row: DeviceRow) -> None:
    for box in row.boxes:
        if box.pass_ not in _LETTERS:
            raise PlanError(
                f"device {row.device}: unknown pass {box.pass_!r}; known: {', '.join(_LETTERS)}"
            )
    for first, second in pairwise(sorted(row.boxes, key=lambda box: (box.start, box.end))):
        if second.start < first.end - 1e-9 * abs(first.end):
            raise PlanError(
                f"device {row.device}: {first.label} of stage {first.stage} ends at "
                f"{first.end:g}, but {second.label} of stage {second.stage} starts at "
                f"{second.start:g}; boxes of one device must not overlap: draw one stream at a time"
            )


def _columns_per_unit(boxes: Iterable[Box], most: float) -> float:
    """Wide enough for every label and its edge (except an update's), but at most *most*.

    A whole number where it is at least one, so that boxes of equal duration are equally wide.
    """
    wanted = max(
        ((len(b.label) + len(_EDGE)) / b.duration for b in boxes if b.pass_ != _UPDATE),
        default=most,
    )
    if wanted <= most:
        return math.ceil(wanted) if wanted >= 1 else wanted
    return math.floor(most) if most >= 1 else most


def _cells(row: DeviceRow, begin: float, scale: float, columns: int) -> list[_Cell]:
    """The device's whole timeline, one cell per column; idle columns are blank."""
    cells: list[_Cell] = [(" ", "")] * columns
    rank = {stage: i for i, stage in enumerate(sorted({box.stage for box in row.boxes}))}
    for box in row.boxes:
        start, stop = round((box.start - begin) * scale), round((box.end - begin) * scale)
        style = _style(LOOKS[box.pass_].of(odd=rank[box.stage] % 2 == 1))
        cells[start:stop] = [(character, style) for character in _inside(box.label, stop - start)]
    return cells


def _style(colour: str) -> str:
    """*colour* behind the text, whatever colours the terminal's theme has; rich finds the nearest
    that the terminal can show.
    """
    return f"{ink(colour)} on {colour}"


def _inside(label: str, width: int) -> str:
    """*label*, or its first letter if it does not fit, in *width* columns; an edge if it fits."""
    shown = label if len(label) <= width else label[:1]
    if width <= len(shown):
        return shown[:width]
    return shown.ljust(width - len(_EDGE)) + _EDGE


def _append_cells(text: Text, cells: Sequence[_Cell]) -> None:
    for run, style in _runs(cells):
        text.append(run, style=style or None)


def _runs(cells: Sequence[_Cell]) -> Iterator[_Cell]:
    """Neighbours of one style joined."""
    run, style = "", ""
    for character, own in cells:
        if own != style and run:
            yield run, style
            run = ""
        run, style = run + character, own
    if run:
        yield run, style


def _append_legend(text: Text, boxes: Iterable[Box], width: int, idle: float) -> None:
    """What the colours mean and the bubble, in lines of at most *width* columns if these can be."""
    seen = {box.pass_ for box in boxes}
    items = [
        Text.assemble((f" {letter} ", _style(LOOKS[pass_].colour)), f" {LOOKS[pass_].meaning}")
        for pass_, letter in _LETTERS.items()
        if pass_ in seen
    ]
    column = 0
    for item in (*items, Text(f"bubble {idle:.1%}")):
        if column and column + 2 + len(item) > width:
            text.append("\n")
            column = 0
        text.append("  " if column else "")
        text.append_text(item)
        column += 2 * bool(column) + len(item)

"""Loss curves for the terminal, in braille."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.text import Text

BLUE, VERMILION = "#4d9de0", "#d55e00"
"""Colours that read on a dark and on a light background."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points ``(step, loss)`` drawn in one colour under one label.

    *marks*: one filled circle per point instead of a fine line, so that two curves can be told
    apart without colour.
    """

    label: str
    points: Sequence[tuple[int, float]]
    style: str = BLUE
    marks: bool = False


# A braille cell holds 2 x 4 dots; the bit of the dot in column x, row y.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))

_BRAILLE = 0x2800

_MARK = "●"

_LABEL_WIDTH = 8


def loss_curves(curves: Sequence[Curve], width: int = 72, height: int = 12) -> Text:
    """Draw *curves* over one pair of axes, *width* x *height* characters without the labels.

    The text has a line per row, the axis of steps, and a legend with each curve's last value.
    Curves without points are named in the legend only; points without a finite loss are not drawn.

    Raises:
        ValueError: *width* or *height* leaves no room.
    """
    if width < 8 or height < 2:
        raise ValueError(
            f"loss_curves: expected at least 8 x 2 characters, found {width} x {height}"
        )
    drawable = [replace(c, points=[p for p in c.points if math.isfinite(p[1])]) for c in curves]
    points = [point for curve in drawable for point in curve.points]
    if not points:
        return Text("no loss recorded yet")
    frame = _Frame.around(points, width, height)
    cells: list[list[tuple[str, str]]] = [[(" ", "")] * width for _ in range(height)]
    for curve in drawable:
        drawn = _marks(curve, frame) if curve.marks else _line(curve, frame)
        for (column, row), symbol in drawn.items():
            cells[row][column] = (symbol, curve.style)
    text = Text()
    for row, line in enumerate(cells):
        text.append(frame.row_label(row).rjust(_LABEL_WIDTH) + " ┤")
        for symbol, style in line:
            text.append(symbol, style=style)
        text.append("\n")
    last = f"{frame.last_step}"
    text.append(" " * (_LABEL_WIDTH + 1) + "└" + "─" * width + "\n")
    text.append(
        " " * (_LABEL_WIDTH + 2) + f"{frame.first_step}".ljust(width - len(last)) + last + "\n"
    )
    text.append(" " * (_LABEL_WIDTH + 2))
    for index, curve in enumerate(curves):
        text.append("   " if index else "")
        text.append(_MARK if curve.marks else "━━", style=curve.style)
        value = f"{curve.points[-1][1]:.3f}" if curve.points else "none yet"
        text.append(f" {curve.label} {value}")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Maps steps and losses to positions counted in dots from the top left."""

    first_step: int
    last_step: int
    low: float
    high: float
    width: int
    height: int

    @classmethod
    def around(cls, points: Sequence[tuple[int, float]], width: int, height: int) -> "_Frame":
        steps = [step for step, _ in points]
        losses = [loss for _, loss in points]
        return cls(
            first_step=min(steps),
            last_step=max(steps),
            low=min(losses),
            high=max(losses),
            width=width,
            height=height,
        )

    def dot(self, step: float, loss: float) -> tuple[int, int]:
        columns, rows = 2 * self.width - 1, 4 * self.height - 1
        across = (step - self.first_step) / max(self.last_step - self.first_step, 1)
        span = self.high - self.low
        down = (self.high - loss) / span if span > 0.0 else 0.5
        return round(across * columns), round(down * rows)

    def row_label(self, row: int) -> str:
        """The loss in the middle of a row of characters; every third row has one."""
        if row % 3 and row != self.height - 1:
            return ""
        down = (4 * row + 1.5) / (4 * self.height - 1)
        return f"{self.high - down * (self.high - self.low):.3f}"


def _marks(curve: Curve, frame: _Frame) -> dict[tuple[int, int], str]:
    dots = [frame.dot(step, loss) for step, loss in curve.points]
    return {(x // 2, y // 4): _MARK for x, y in dots}


def _line(curve: Curve, frame: _Frame) -> dict[tuple[int, int], str]:
    """Braille cells of the line through the curve's points."""
    bits: dict[tuple[int, int], int] = {}
    dots = [frame.dot(step, loss) for step, loss in curve.points]
    for (x0, y0), (x1, y1) in zip(dots, dots[1:] or dots, strict=False):
        length = max(abs(x1 - x0), abs(y1 - y0), 1)
        for i in range(length + 1):
            x = round(x0 + (x1 - x0) * i / length)
            y = round(y0 + (y1 - y0) * i / length)
            cell = (x // 2, y // 4)
            bits[cell] = bits.get(cell, 0) | _DOTS[x % 2][y % 4]
    return {cell: chr(_BRAILLE | value) for cell, value in bits.items()}

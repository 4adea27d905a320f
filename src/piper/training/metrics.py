"""Metrics of a run: an append-only ``metrics.jsonl`` and loss curves for the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

import msgspec
from rich.text import Text

from piper.errors import ConfigError


class TrainRecord(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="train", tag_field="kind"
):
    """One optimizer step: *loss* in nats per token, *seconds* of wall time for this step,
    *grad_norm* before clipping if gradients are clipped.
    """

    step: int
    loss: float
    seconds: float
    tokens_per_second: float
    grad_norm: float | None = None


class HeldOutRecord(msgspec.Struct, frozen=True, kw_only=True, tag="held_out", tag_field="kind"):
    """The mean loss on the held-out text after *step* optimizer steps."""

    step: int
    loss: float


Record: TypeAlias = TrainRecord | HeldOutRecord


class MetricsWriter:
    """Appends records to a file, one JSON object per line, each flushed when written.

    A context manager. Opening a file that ends in a line cut short (a killed run) drops that line.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _drop_unfinished_line(path)
            self._file = path.open("ab")
        except OSError as error:
            raise ConfigError(
                f"{path}: expected a file that can be written: {error.strerror}; choose another out_dir"
            ) from error

    def write(self, record: Record) -> None:
        """Append *record* and flush it."""
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[Record]:
    """The records of a metrics file, in order; a last line without its newline is left out.

    Raises:
        ConfigError: the file is unreadable, or a line is not a record (the message gives its number).
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: expected a metrics file: {error.strerror}") from error
    decoder = msgspec.json.Decoder(TrainRecord | HeldOutRecord)
    records: list[Record] = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            records.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}:{number}: expected a metrics record: {error}") from error
    return records


def rewrite_metrics(path: Path, records: Sequence[Record]) -> None:
    """Replace a metrics file, at once, by one of *records*.

    Raises:
        ConfigError: the file cannot be written.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
        new.replace(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: expected a file that can be written: {error.strerror}; choose another out_dir"
        ) from error


def _drop_unfinished_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete != len(content):
        with path.open("r+b") as file:
            file.truncate(complete)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points ``(step, loss)`` drawn in one colour under one label.

    *marks*: one filled circle per point instead of a fine line, so that two curves can be told
    apart without colour.
    """

    label: str
    points: Sequence[tuple[int, float]]
    style: str = "cyan"
    marks: bool = False


# A braille cell holds 2 x 4 dots; the bit of the dot in column x, row y.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BRAILLE = 0x2800
_MARK = "●"
_LABEL_WIDTH = 8


def loss_curves(curves: Sequence[Curve], width: int = 72, height: int = 12) -> Text:
    """Draw *curves* over one pair of axes, *width* x *height* characters without the labels.

    The text has a line per row, the axis of steps, and a legend with each curve's last value.
    Curves without points are named in the legend only.

    Raises:
        ValueError: *width* or *height* leaves no room.
    """
    if width < 8 or height < 2:
        raise ValueError(
            f"loss_curves: expected at least 8 x 2 characters, found {width} x {height}"
        )
    points = [point for curve in curves for point in curve.points]
    if not points:
        return Text("no loss recorded yet")
    frame = _Frame.around(points, width, height)
    cells: list[list[tuple[str, str]]] = [[(" ", "")] * width for _ in range(height)]
    for curve in curves:
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

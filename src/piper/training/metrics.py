"""Metrics of a run: an append-only ``metrics.jsonl`` and loss curves for the terminal."""

import math
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

import msgspec

from piper.errors import ConfigError


class TrainRecord(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="train", tag_field="kind"
):
    """One optimizer step: *loss* in nats per token (in the file null if it is no finite number), *seconds* of wall time for this step,
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
    records: list[Record] = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            records.append(_record(line))
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}:{number}: expected a metrics record: {error}") from error
    return records


def _record(line: bytes) -> Record:
    """The record in a line of JSON, which has null for a loss that is no finite number."""
    fields = msgspec.json.decode(line, type=dict[str, object])
    if fields.get("loss", 0.0) is None:
        fields["loss"] = math.nan
    record: Record = msgspec.convert(fields, TrainRecord | HeldOutRecord)
    return record


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

"""The committed results of a whole matrix: a table of all cells, and a summary."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from tests.equality.planned import Worst


@dataclass(frozen=True)
class Measured:
    """One cell's errors."""

    case: object
    worst: Worst


def write(
    name: str,
    folder: Path,
    factors: Mapping[str, object],
    measured: Sequence[Measured],
    summary: Iterable[str],
) -> None:
    """``<name>.csv``, a row per cell, and ``<name>.md``, the lines of *summary*."""
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*factors, "loss_error", "gradient_error", "state_error"])
        for m in measured:
            errors = (m.worst.loss, m.worst.gradients, m.worst.state)
            cells = [int(v) if isinstance(v, bool) else v for v in astuple(m.case)]
            table.writerow([*cells, *(f"{e:.1e}" for e in errors)])
    (folder / f"{name}.md").write_text("\n".join(summary) + "\n")

"""The committed results of the whole matrix."""

import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tests.equality import results
from tests.equality.matrix import FACTORS, STEPS, TOLERANCE, Case, run
from tests.equality.results import Measured


def measure(cases: Iterable[Case]) -> list[Measured]:
    """Run *cases*, models of one size together (they share a capture)."""
    ordered = sorted(cases, key=lambda c: (c.model, c.num_stages, c.optimizer, str(c)))
    return [Measured(case, run(case)) for case in ordered]


def write(measured: Sequence[Measured], folder: Path, seconds: float) -> None:
    """``equality_matrix.csv``, a row per cell, and ``equality_matrix.md``, a summary."""
    results.write("equality_matrix", folder, FACTORS, measured, _summary(measured, seconds))


def _summary(measured: Sequence[Measured], seconds: float) -> Iterable[str]:
    good = sum(m.worst.worst <= TOLERANCE for m in measured)
    yield "# Equality matrix"
    yield ""
    yield (
        f"{good} of {len(measured)} strategies equal plain single-process PyTorch to {TOLERANCE:.0e} in float64: loss, and on every "
        f"device every gradient, parameter and buffer, over {STEPS} steps."
    )
    yield ""
    yield "Factors: " + "; ".join(
        f"{name}: {', '.join(map(str, values))}" for name, values in FACTORS.items()
    )
    yield ""
    yield (
        "`custom` is a strategy file with an order of its own; `interleaved_1f1b` and `looped_bfs` have two stages per rank. The transformer's "
        "embedding is tied to its head, the U-Net's skips cross stages, `multi` has several inputs and outputs, some without a "
        "gradient. Adam has eps=1e-3, so that a constant factor in the gradients would show; SGD has momentum."
    )
    yield ""
    yield "Errors are |a - b| / max(|b|, 1e-6 of the largest norm of its kind), 2-norm. Largest error:"
    yield ""
    models, optimizers = FACTORS["model"], FACTORS["optimizer"]
    columns = [(model, optimizer) for model in models for optimizer in optimizers]
    yield (
        "| schedule | " + " | ".join(f"{model}, {optimizer}" for model, optimizer in columns) + " |"
    )
    yield "|---" * (len(columns) + 1) + "|"
    for schedule in FACTORS["schedule"]:
        cells = [
            max(
                m.worst.worst
                for m in measured
                if (m.case.schedule, m.case.model, m.case.optimizer) == (schedule, *column)
            )
            for column in columns
        ]
        yield f"| {schedule} | " + " | ".join(f"{cell:.1e}" for cell in cells) + " |"
    yield ""
    yield (
        f"Each cell of the table is {len(measured) // (len(columns) * len(FACTORS['schedule']))} strategies; all rows are in "
        f"[equality_matrix.csv](equality_matrix.csv). Made by `pytest -m full tests/equality/test_matrix.py` with torch "
        f"{torch.__version__} on {platform.machine()}, {seconds / 60:.0f} minutes in one process."
    )

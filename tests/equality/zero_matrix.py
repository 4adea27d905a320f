"""The matrix of sharded strategies: schedules × what is sharded × sizes × recomputation × tied
weights, in float64.
"""

import platform
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path

import torch
from tests.equality import eager, planned, results
from tests.equality.matrix import adam
from tests.equality.results import Measured
from tests.support.covering import cover
from torch import nn

import piper
from piper.capture import Captured, capture_with_constants
from piper.directives.base import Directive
from piper.models import Transformer, TransformerConfig, transformer_loss
from piper.plan.model import Plan

STEPS = 3
ROWS = 2
"""Rows of a microbatch."""

TOLERANCE = 1e-10
BUCKET = 5e-4
"""MiB of a message: room for a few parameters, not for all of a region."""

VOCABULARY, LENGTH, WIDTH = 7, 3, 4

FACTORS: dict[str, tuple[object, ...]] = {
    "schedule": ("gpipe", "1f1b", "interleaved_1f1b"),
    "zero": (0, 1, 2, 3),
    "pp": (1, 2, 4),
    "dp": (1, 2, 3),
    "recompute": (False, True),
    "tied": (False, True),
}


@dataclass(frozen=True)
class Case:
    """One cell of the matrix; the fields are the factors. ``zero`` is the level of sharding (0:
    none).
    """

    schedule: str
    zero: int
    pp: int
    dp: int
    recompute: bool
    tied: bool

    def __str__(self) -> str:
        ends = "-recompute" * self.recompute + "-tied" * self.tied
        return f"{self.schedule}-zero{self.zero}-pp{self.pp}-dp{self.dp}{ends}"

    @property
    def num_stages(self) -> int:
        return self.pp * self.virtual

    @property
    def virtual(self) -> int:
        return 2 if self.schedule == "interleaved_1f1b" else 1

    @property
    def microbatches(self) -> int:
        """Per replica: at least two, so that gradients add up, and what interleaving needs."""
        return max(2, self.pp)

    @property
    def pairs(self) -> frozenset[tuple[tuple[int, object], tuple[int, object]]]:
        """All pairs of factor values that occur in it."""
        return frozenset(combinations(enumerate(astuple(self)), 2))


def all_cases() -> list[Case]:
    """The whole matrix."""
    return [Case(*values) for values in product(*FACTORS.values())]


def sharded(case: Case) -> bool:
    """Whether something of *case* is sharded."""
    return case.zero > 0 and case.dp > 1


@cache
def covering_cases() -> tuple[Case, ...]:
    """A small part of the matrix in which every pair of values of any two factors occurs, and does
    so among the strategies that shard too; greedy, deterministic.
    """
    cases = sorted(all_cases(), key=lambda c: (c.dp * c.microbatches * c.num_stages, str(c)))
    return tuple(cover([c for c in cases if sharded(c)], cases))


def strategy(case: Case) -> list[Directive]:
    """The directives of *case*. A group of one replica is replicated too: nothing is left to
    shard.
    """
    groups = [list(range(case.dp * rank, case.dp * (rank + 1))) for rank in range(case.pp)]
    directives = piper.strategies.pipeline(
        case.schedule, groups, case.microbatches, num_virtual_stages=case.virtual
    )
    replicate = piper.Replicate(
        {},
        shard_optimizer=case.zero == 1,
        shard_grads=case.zero == 2,
        shard_params=case.zero == 3,
        bucket_size=BUCKET,
    )
    others = [d for d in directives if not isinstance(d, piper.Replicate)]
    return [replicate, *others, *([piper.Recompute({})] if case.recompute else [])]


def plan_of(case: Case, directives: Sequence[Directive] | None = None) -> Plan:
    """The verified plan of *case*; *directives* take the place of its own."""
    captured = _captured(case.num_stages, case.tied)
    dag = replace(captured.dag, batch_size=ROWS * case.dp * case.microbatches)
    plan = piper.plan(piper.apply(dag, directives or strategy(case)))
    assert plan.num_devices == case.pp * case.dp
    assert bool(plan.dag.shards) == sharded(case)
    piper.verify(plan)
    return plan


def run(case: Case, directives: Sequence[Directive] | None = None) -> planned.Worst:
    """Errors of *case* over all steps and devices; *directives* take the place of its own."""
    pieces = case.dp * case.microbatches
    found = planned.train(
        plan_of(case, directives),
        _captured(case.num_stages, case.tied).constants,
        _model(case.num_stages, case.tied),
        _batches(pieces),
        adam,
    )
    return planned.compare(found, _expected(case.num_stages, case.tied, pieces))


@cache
def _model(num_stages: int, tied: bool) -> nn.Module:
    torch.manual_seed(3)
    config = TransformerConfig(
        vocab_size=VOCABULARY,
        context=LENGTH,
        width=WIDTH,
        num_layers=num_stages,
        num_heads=2,
        mlp_ratio=2,
        tied_embedding=tied,
        num_stages=num_stages,
    )
    return Transformer(config).double()


@cache
def _captured(num_stages: int, tied: bool) -> Captured:
    model, (batch, *_) = _model(num_stages, tied), _batches(4)
    return capture_with_constants(model, transformer_loss, batch)


@cache
def _batches(pieces: int) -> list[eager.Batch]:
    torch.manual_seed(4)
    shape = (ROWS * pieces, LENGTH)
    return [
        (torch.randint(0, VOCABULARY, shape), torch.randint(0, VOCABULARY, shape))
        for _ in range(STEPS)
    ]


@cache
def _expected(num_stages: int, tied: bool, pieces: int) -> list[eager.Step]:
    model = _model(num_stages, tied)
    return eager.train(model, transformer_loss, _batches(pieces), pieces, adam)


# --- the committed results ------------------------------------------------------------------------


def measure(cases: Iterable[Case]) -> list[Measured]:
    """Run *cases*, models of one size together (they share a capture)."""
    ordered = sorted(cases, key=lambda c: (c.num_stages, c.tied, str(c)))
    return [Measured(case, run(case)) for case in ordered]


def write(measured: Sequence[Measured], folder: Path, seconds: float) -> None:
    """``zero_matrix.csv``, a row per cell, and ``zero_matrix.md``, a summary."""
    results.write("zero_matrix", folder, FACTORS, measured, _summary(measured, seconds))


def _summary(measured: Sequence[Measured], seconds: float) -> Iterable[str]:
    good = sum(m.worst.worst <= TOLERANCE for m in measured)
    yield "# Matrix of sharded strategies"
    yield ""
    yield (
        f"{good} of {len(measured)} strategies equal plain single-process PyTorch to {TOLERANCE:.0e} in float64: loss, and on every "
        f"device every gradient, parameter and buffer, or its slice of them, over {STEPS} steps."
    )
    yield ""
    shown = {name: [str(v).lower() for v in values] for name, values in FACTORS.items()}
    yield "Factors: " + "; ".join(f"{name}: {', '.join(v)}" for name, v in shown.items())
    yield ""
    yield (
        "`zero` is what is sharded over the `dp` replicas of each pipeline rank: nothing (0), the optimizer's state (1), gradients too (2), "
        f"parameters too (3). A transformer of width {WIDTH}, one block per stage, {ROWS} rows per microbatch, {BUCKET} MiB per message: "
        "sizes that 3 does not divide, several buckets per stage, slices that are empty. With `tied` the embedding is the head too. "
        "`interleaved_1f1b` has two stages per rank. `recompute` recomputes every stage. The optimizer is Adam with eps=1e-3, so that a "
        "constant factor in the gradients would show."
    )
    yield ""
    yield (
        "Errors are |a - b| / max(|b|, 1e-6 of the largest norm of its kind), 2-norm; b is the whole tensor where a is a slice. Largest error:"
    )
    yield ""
    columns = list(product(FACTORS["recompute"], FACTORS["tied"], (1, 2, 3)))
    heads = [
        f"dp {dp}{', tied' * bool(tied)}{', recompute' * bool(again)}"
        for again, tied, dp in columns
    ]
    yield "| schedule | zero | " + " | ".join(heads) + " |"
    yield "|---" * (len(columns) + 2) + "|"
    for schedule, zero in product(FACTORS["schedule"], FACTORS["zero"]):
        cells = [
            max(
                m.worst.worst
                for m in measured
                if (m.case.schedule, m.case.zero) == (schedule, zero)
                and (m.case.recompute, m.case.tied, m.case.dp) == column
            )
            for column in columns
        ]
        yield f"| {schedule} | {zero} | " + " | ".join(f"{cell:.1e}" for cell in cells) + " |"
    yield ""
    yield (
        f"Each cell is the worst of {len(FACTORS['pp'])} pipeline sizes; all rows are in [zero_matrix.csv](zero_matrix.csv). Made by "
        f"`pytest -m full tests/equality/test_zero.py` with torch {torch.__version__} on {platform.machine()}, "
        f"{seconds / 60:.0f} minutes in one process."
    )

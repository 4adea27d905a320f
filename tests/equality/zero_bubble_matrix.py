"""The matrix of schedules with split backwards: schedules × sizes × what is sharded × models, in
float64.
"""

import platform
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path

import torch
from tests.equality import eager, planned, results
from tests.equality.matrix import sgd
from tests.equality.results import Measured
from tests.support.covering import all_pairs, cover
from torch import Tensor, nn
from torch.nn import functional

import piper
from piper.api.strategies import stages_per_group
from piper.capture import Captured, capture_with_constants
from piper.directives.base import Directive
from piper.models import transformer_loss
from piper.plan.model import Plan

STEPS = 2
ROWS = 2
"""Rows of a microbatch."""

TOLERANCE = 1e-10
SMALL = 260
"""Most forwards of a case that `make test` runs."""

BUCKET = 5e-4
"""MiB of a message: room for a few parameters, not for all of a region."""

WIDTH, VOCABULARY, LENGTH = 4, 7, 3

FACTORS: dict[str, tuple[object, ...]] = {
    "schedule": ("zb_h1", "interleaved_zero_bubble", "zbv", "dualpipe", "dualpipev"),
    "pp": (2, 4, 8),
    "microbatches": ("fewest", "twice", "20"),
    "dp": (1, 2),
    "zero": (0, 1, 2, 3),
    "model": ("tied", "mixed"),
}


@dataclass(frozen=True)
class Case:
    """One cell; the fields are the factors. ``zero`` is the level of sharding (0: none)."""

    schedule: str
    pp: int
    microbatches: str
    dp: int
    zero: int
    model: str

    def __str__(self) -> str:
        return f"{self.schedule}-pp{self.pp}-{self.microbatches}-dp{self.dp}-zero{self.zero}-{self.model}"

    @property
    def virtual(self) -> int:
        return 2 if self.schedule == "interleaved_zero_bubble" else stages_per_group(self.schedule)

    @property
    def num_stages(self) -> int:
        return self.pp * self.virtual

    @property
    def num_microbatches(self) -> int:
        """Per replica. The fewest that the schedule has, twice that, or 20."""
        fewest = 2 * self.pp if self.schedule.startswith("dualpipe") else 1
        return {"fewest": fewest, "twice": 2 * fewest, "20": 20}[self.microbatches]

    @property
    def num_chunks(self) -> int:
        """Forwards of all devices."""
        return self.dp * self.num_microbatches * self.num_stages

    @property
    def pairs(self) -> frozenset[tuple[tuple[int, object], tuple[int, object]]]:
        """All pairs of factor values that occur in it."""
        return frozenset(combinations(enumerate(astuple(self)), 2))


def all_cases() -> list[Case]:
    """The whole matrix. One replica has nothing to shard."""
    cases = (Case(*values) for values in product(*FACTORS.values()))
    return [case for case in cases if case.zero == 0 or case.dp > 1]


@cache
def covering_cases() -> tuple[Case, ...]:
    """A small part in which every pair of values of any two factors occurs that does so in the
    whole; greedy, deterministic, small cases first.
    """
    cases = sorted(all_cases(), key=lambda c: (c.num_chunks, str(c)))
    small = [case for case in cases if case.num_chunks <= SMALL]
    return tuple(cover(small, wanted=all_pairs(cases)))


def strategy(case: Case) -> list[Directive]:
    """The directives of *case*."""
    groups = [list(range(case.dp * rank, case.dp * (rank + 1))) for rank in range(case.pp)]
    return piper.strategies.pipeline(
        case.schedule,
        groups,
        case.num_microbatches,
        num_virtual_stages=case.virtual,
        zero=case.zero,
        bucket_size=BUCKET,
    )


def plan_of(case: Case) -> Plan:
    """The verified plan of *case*."""
    captured = _captured(case.model, case.num_stages)
    dag = replace(captured.dag, batch_size=ROWS * case.dp * case.num_microbatches)
    plan = piper.plan(piper.apply(dag, strategy(case)))
    assert plan.num_devices == case.pp * case.dp
    piper.verify(plan)
    return plan


def run(case: Case) -> planned.Worst:
    """Errors of *case* over all steps and devices."""
    pieces = case.dp * case.num_microbatches
    found = planned.train(
        plan_of(case),
        _captured(case.model, case.num_stages).constants,
        _model(case.model, case.num_stages),
        _batches(case.model, pieces),
        sgd,
    )
    return planned.compare(found, _expected(case.model, case.num_stages, pieces))


# --- what is trained -------------------------------------------------------------------------------


class Twice(nn.Module):
    """``x·W·W``: one parameter, two uses, both of which need it for the gradient of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight @ self.weight


class Fused(nn.Module):
    """Two projections in one matrix, told apart by ``chunk``."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.both(x).chunk(2, dim=-1)
        return value * torch.sigmoid(gate)


def _norm() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))


def _frozen() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)


BLOCKS = (Twice, Fused, _frozen, nn.Tanh, _norm)


class Mixed(nn.Module):
    """A block of another kind in each stage; stages of the first half are read again by those of
    the second.
    """

    def __init__(self, num_stages: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BLOCKS[s % len(BLOCKS)]() for s in range(num_stages))

    def forward(self, x: Tensor) -> Tensor:
        outputs: list[Tensor] = []
        for stage, block in enumerate(self.blocks):
            with piper.annotate("PP", stage):
                x = x + block(x)
                source = len(self.blocks) - 1 - stage
                if source < stage - 1 and source % 2 == 0:
                    x = x + outputs[source].sin()
                outputs.append(x)
        return x


class Tied(nn.Module):
    """Tokens to logits; the embedding of the first stage is the head of the last."""

    def __init__(self, num_stages: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(_norm() for _ in range(num_stages))

    def forward(self, ids: Tensor) -> Tensor:
        x = ids
        for stage, block in enumerate(self.blocks):
            with piper.annotate("PP", stage):
                x = self.embedding(ids) if stage == 0 else x
                x = x + block(x)
                if stage == len(self.blocks) - 1:
                    x = x @ self.embedding.weight.T
        return x


@cache
def _model(name: str, num_stages: int) -> nn.Module:
    torch.manual_seed(3)
    return {"mixed": Mixed, "tied": Tied}[name](num_stages).double()


def _loss_fn(name: str) -> eager.LossFn:
    return functional.mse_loss if name == "mixed" else transformer_loss


@cache
def _captured(name: str, num_stages: int) -> Captured:
    (batch, *_) = _batches(name, 2)
    return capture_with_constants(_model(name, num_stages), _loss_fn(name), batch)


@cache
def _batches(name: str, pieces: int) -> list[eager.Batch]:
    torch.manual_seed(4)
    rows = ROWS * pieces

    def batch() -> eager.Batch:
        if name == "mixed":
            return tuple(torch.randn(rows, WIDTH, dtype=torch.float64) for _ in range(2))
        return tuple(torch.randint(0, VOCABULARY, (rows, LENGTH)) for _ in range(2))

    return [batch() for _ in range(STEPS)]


@cache
def _expected(name: str, num_stages: int, pieces: int) -> list[eager.Step]:
    model = _model(name, num_stages)
    return eager.train(model, _loss_fn(name), _batches(name, pieces), pieces, sgd)


# --- the committed results ------------------------------------------------------------------------


def measure(cases: Iterable[Case]) -> list[Measured]:
    """Run *cases*, models of one size together (they share a capture)."""
    ordered = sorted(cases, key=lambda c: (c.model, c.num_stages, str(c)))
    return [Measured(case, run(case)) for case in ordered]


def write(measured: Sequence[Measured], folder: Path, seconds: float) -> None:
    """``zero_bubble_matrix.csv``, a row per cell, and ``zero_bubble_matrix.md``, a summary."""
    results.write("zero_bubble_matrix", folder, FACTORS, measured, _summary(measured, seconds))


def _summary(measured: Sequence[Measured], seconds: float) -> Iterable[str]:
    good = sum(m.worst.worst <= TOLERANCE for m in measured)
    yield "# Matrix of schedules with split backwards"
    yield ""
    yield (
        f"{good} of {len(measured)} strategies equal plain single-process PyTorch to {TOLERANCE:.0e} in float64: loss, and on every "
        f"device every gradient and parameter, or its slice of them, over {STEPS} steps of SGD with momentum."
    )
    yield ""
    shown = {name: [str(v) for v in values] for name, values in FACTORS.items()}
    yield "Factors: " + "; ".join(f"{name}: {', '.join(v)}" for name, v in shown.items())
    yield ""
    yield (
        "`microbatches` per replica: the fewest that the schedule has, twice that, or 20. `zero` is what is sharded over the `dp` replicas "
        "of each pipeline rank: nothing (0), the optimizer's state (1), gradients too (2), parameters too (3). `tied`: stages of LayerNorm with a "
        "linear layer, the embedding of the first being the head of the last. `mixed`: stages of x·W·W, a fused projection with chunk, "
        "a frozen layer, no parameter, LayerNorm with a linear layer, and skips. `interleaved_zero_bubble` has two stages per rank."
    )
    yield ""
    yield "Errors are |a - b| / max(|b|, 1e-6 of the largest norm of its kind), 2-norm. Largest error:"
    yield ""
    columns = list(dict.fromkeys((m.case.model, m.case.dp, m.case.zero) for m in measured))
    columns.sort()
    yield (
        "| schedule | pp | " + " | ".join(f"{m}, dp {dp}, zero {z}" for m, dp, z in columns) + " |"
    )
    yield "|---" * (len(columns) + 2) + "|"
    for schedule, pp in product(FACTORS["schedule"], FACTORS["pp"]):
        cells = [
            max(
                m.worst.worst
                for m in measured
                if (m.case.schedule, m.case.pp) == (schedule, pp)
                and (m.case.model, m.case.dp, m.case.zero) == column
            )
            for column in columns
        ]
        yield f"| {schedule} | {pp} | " + " | ".join(f"{cell:.1e}" for cell in cells) + " |"
    yield ""
    yield (
        "Each cell is the worst of three numbers of microbatches; all rows are in [zero_bubble_matrix.csv](zero_bubble_matrix.csv). Made "
        f"by `pytest -m full tests/equality/test_zero_bubble.py` with torch {torch.__version__} on {platform.machine()}, "
        f"{seconds / 60:.0f} minutes in one process."
    )

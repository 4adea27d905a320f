"""The equality matrix: schedules × sizes × models × optimizers, each against plain PyTorch in
float64.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path

import torch
from tests.equality import eager, planned
from tests.support.covering import cover
from torch import nn

import piper
from piper.capture import Captured, capture_with_constants
from piper.directives.base import Directive
from piper.models import (
    MLP,
    MLPConfig,
    Multi,
    MultiConfig,
    Transformer,
    TransformerConfig,
    UNet,
    UNetConfig,
    mlp_loss,
    multi_loss,
    transformer_loss,
    unet_loss,
)

STEPS = 3
ROWS = 2
"""Rows of a microbatch."""

TOLERANCE = 1e-10
VIRTUAL = ("interleaved_1f1b", "looped_bfs")
"""Schedules that run with two stages on each rank."""

FACTORS: dict[str, tuple[object, ...]] = {
    "schedule": ("gpipe", "1f1b", *VIRTUAL, "custom"),
    "pp": (1, 2, 4),
    "dp": (1, 2, 4),
    "microbatches": (1, 2, 4, 8),
    "model": ("mlp", "transformer", "unet", "multi"),
    "optimizer": ("adam", "sgd"),
}


@dataclass(frozen=True)
class Case:
    """One cell of the matrix; the fields are the factors."""

    schedule: str
    pp: int
    dp: int
    microbatches: int
    model: str
    optimizer: str

    def __str__(self) -> str:
        return f"{self.schedule}-pp{self.pp}-dp{self.dp}-m{self.microbatches}-{self.model}-{self.optimizer}"

    @property
    def num_stages(self) -> int:
        return self.pp * (2 if self.schedule in VIRTUAL else 1)

    @property
    def pairs(self) -> frozenset[tuple[tuple[int, object], tuple[int, object]]]:
        """All pairs of factor values that occur in it."""
        return frozenset(combinations(enumerate(astuple(self)), 2))


def all_cases() -> list[Case]:
    """The whole matrix."""
    return [Case(*values) for values in product(*FACTORS.values())]


@cache
def covering_cases() -> tuple[Case, ...]:
    """A small part of the matrix in which every pair of values of any two factors occurs.

    Greedy, deterministic: always the case with most pairs that are still missing; of equals the one
    with fewest microbatches in all.
    """
    cases = sorted(all_cases(), key=lambda c: (c.dp * c.microbatches * c.num_stages, str(c)))
    return tuple(cover(cases))


def run(case: Case) -> planned.Worst:
    """Errors of *case* over all steps and devices."""
    captured, model, batches = _captured(case.model, case.num_stages), *_data(case)
    dag = replace(captured.dag, batch_size=ROWS * case.dp * case.microbatches)
    plan = piper.plan(piper.apply(dag, strategy(case)))
    assert plan.num_devices == case.pp * case.dp
    piper.verify(plan)
    found = planned.train(plan, captured.constants, model, batches, OPTIMIZERS[case.optimizer])
    return planned.compare(found, _expected(_single_process(case)))


def strategy(case: Case) -> Sequence[Directive]:
    """The directives of *case*."""
    groups = [list(range(case.dp * rank, case.dp * (rank + 1))) for rank in range(case.pp)]
    if case.schedule == "custom":
        return _from_file(groups, case.microbatches)
    virtual = 2 if case.schedule in VIRTUAL else 1
    return piper.strategies.pipeline(
        case.schedule, groups, case.microbatches, num_virtual_stages=virtual
    )


def _from_file(groups: Sequence[Sequence[int]], microbatches: int) -> Sequence[Directive]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "strategy.json"
        path.write_text(json.dumps(custom_strategy(groups, microbatches)))
        return piper.load_strategy(path)


def custom_strategy(groups: Sequence[Sequence[int]], microbatches: int) -> list[dict[str, object]]:
    """A strategy file as a user may write it: odd microbatches go first, two forwards may overlap,
    the last stage alternates.
    """
    last = len(groups) - 1
    turn = [*range(1, microbatches, 2), *range(0, microbatches, 2)]

    def step(pass_: str, stage: int, microbatch: int) -> dict[str, object]:
        return {"PP": stage, "MB": microbatch, "PASS": pass_}

    def order(stage: int) -> list[list[dict[str, object]]]:
        if stage == last:
            return [[step(p, stage, m)] for m in turn for p in "FB"]
        forwards = [[step("F", stage, m) for m in turn[:2]]]
        forwards += [[step("F", stage, m)] for m in turn[2:]]
        return forwards + [[step("B", stage, m)] for m in turn]

    directives: list[dict[str, object]] = [
        {"op": "place", "filter": {"PP": stage}, "devices": list(group)}
        for stage, group in enumerate(groups)
    ]
    if len(groups[0]) > 1:
        directives.append({"op": "replicate", "filter": {}, "devices": "placed"})
    directives.append(
        {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": microbatches}
    )
    return directives + [{"op": "order", "filters": order(stage)} for stage in range(len(groups))]


# --- what is trained -------------------------------------------------------------------------------


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """With an eps that does not hide a constant factor in the gradients."""
    return torch.optim.Adam(parameters, lr=1e-2, eps=1e-3)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


OPTIMIZERS: dict[str, eager.MakeOptimizer] = {"adam": adam, "sgd": sgd}

VOCABULARY, LENGTH = 7, 3


@dataclass(frozen=True)
class Kind:
    """A model by number of stages, its loss, and batches by number of rows."""

    build: Callable[[int], nn.Module]
    loss_fn: eager.LossFn
    batch: Callable[[int], eager.Batch]


def _tokens(rows: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, LENGTH))


def _float(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


KINDS = {
    "mlp": Kind(
        lambda stages: MLP(
            MLPConfig(
                in_features=3, width=4, out_features=2, num_layers=max(stages, 2), num_stages=stages
            )
        ),
        mlp_loss,
        lambda rows: (_float(rows, 3), _float(rows, 2)),
    ),
    "transformer": Kind(
        lambda stages: Transformer(
            TransformerConfig(
                vocab_size=VOCABULARY,
                context=LENGTH,
                width=4,
                num_layers=stages,
                num_heads=2,
                mlp_ratio=2,
                tied_embedding=True,
                num_stages=stages,
            )
        ),
        transformer_loss,
        lambda rows: (_tokens(rows), _tokens(rows)),
    ),
    "unet": Kind(
        lambda stages: UNet(UNetConfig(channels=1, width=2, num_stages=stages)),
        unet_loss,
        lambda rows: (_float(rows, 1, 8, 8), _float(rows, 1, 8, 8)),
    ),
    "multi": Kind(
        lambda stages: Multi(MultiConfig(vocab_size=VOCABULARY, width=4, num_stages=stages)),
        multi_loss,
        lambda rows: (
            {"ids": _tokens(rows), "mask": _tokens(rows) > 2, "gain": 0.7},
            (_tokens(rows), _float(rows)),
        ),
    ),
}


@cache
def _model(name: str, num_stages: int) -> nn.Module:
    torch.manual_seed(3)
    return KINDS[name].build(num_stages).double()


@cache
def _captured(name: str, num_stages: int) -> Captured:
    kind = KINDS[name]
    return capture_with_constants(_model(name, num_stages), kind.loss_fn, kind.batch(4))


def _data(case: Case) -> tuple[nn.Module, list[eager.Batch]]:
    model = _model(case.model, case.num_stages)
    torch.manual_seed(4)
    rows = ROWS * case.dp * case.microbatches
    return model, [KINDS[case.model].batch(rows) for _ in range(STEPS)]


def _single_process(case: Case) -> Case:
    """The case whose reference is that of *case* too: it depends on the model's stages and the
    number of microbatches alone.
    """
    return replace(
        case,
        schedule="1f1b",
        pp=case.num_stages,
        dp=1,
        microbatches=case.dp * case.microbatches,
    )


@cache
def _expected(case: Case) -> list[eager.Step]:
    model, batches = _data(case)
    return eager.train(
        model,
        KINDS[case.model].loss_fn,
        batches,
        case.microbatches,
        OPTIMIZERS[case.optimizer],
    )

"""The matrix of strategies under bfloat16: schedules × what is sharded × replicas × recomputation ×
tied weights, against plain PyTorch.
"""

import copy
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from itertools import combinations, product

import torch
from tests.equality import eager, planned
from tests.equality.matrix import adam
from tests.support.covering import cover
from torch import nn
from torch.func import functional_call

import piper
from piper.capture import Captured, capture_with_constants
from piper.directives.base import Directive
from piper.models import Transformer, TransformerConfig, transformer_loss
from piper.plan.model import Plan

STEPS, ROWS, MICROBATCHES, RANKS = 3, 2, 2, 2
TOLERANCE = 1e-5
BUCKET = 5e-4
"""MiB of a message: room for a few parameters, not for all of a region."""

VOCABULARY, LENGTH, WIDTH = 7, 3, 4

FACTORS: dict[str, tuple[object, ...]] = {
    "schedule": ("gpipe", "1f1b", "interleaved_1f1b"),
    "zero": (0, 1, 2, 3),
    "dp": (1, 2),
    "recompute": (False, True),
    "tied": (False, True),
}


@dataclass(frozen=True)
class Case:
    """One cell of the matrix; the fields are the factors."""

    schedule: str
    zero: int
    dp: int
    recompute: bool
    tied: bool

    def __str__(self) -> str:
        ends = "-recompute" * self.recompute + "-tied" * self.tied
        return f"{self.schedule}-zero{self.zero}-dp{self.dp}{ends}"

    @property
    def virtual(self) -> int:
        return 2 if self.schedule == "interleaved_1f1b" else 1

    @property
    def pairs(self) -> frozenset[tuple[tuple[int, object], tuple[int, object]]]:
        """All pairs of factor values that occur in it."""
        return frozenset(combinations(enumerate(astuple(self)), 2))


def all_cases() -> list[Case]:
    """The whole matrix."""
    return [Case(*values) for values in product(*FACTORS.values())]


@cache
def covering_cases() -> tuple[Case, ...]:
    """A small part of the matrix in which every pair of values of any two factors occurs; greedy,
    deterministic.
    """
    cases = sorted(all_cases(), key=lambda c: (c.dp * c.virtual, c.recompute, str(c)))
    return tuple(sorted(cover(cases), key=lambda c: (c.virtual, c.tied, str(c))))


def strategy(case: Case) -> list[Directive]:
    """The directives of *case*."""
    groups = [list(range(case.dp * rank, case.dp * (rank + 1))) for rank in range(RANKS)]
    directives = piper.strategies.pipeline(
        case.schedule,
        groups,
        MICROBATCHES,
        num_virtual_stages=case.virtual,
        zero=case.zero if case.dp > 1 else 0,
        bucket_size=BUCKET if case.dp > 1 else None,
    )
    return [*directives, *([piper.Recompute({})] if case.recompute else [])]


def plan_of(case: Case) -> Plan:
    """The verified plan of *case*."""
    captured = _captured(RANKS * case.virtual, case.tied)
    dag = replace(captured.dag, batch_size=ROWS * case.dp * MICROBATCHES)
    plan = piper.plan(piper.apply(dag, strategy(case)))
    piper.verify(plan)
    return plan


def run(case: Case) -> planned.Worst:
    """Errors of *case* over all steps and devices."""
    stages, pieces = RANKS * case.virtual, case.dp * MICROBATCHES
    constants = _captured(stages, case.tied).constants
    model, batches = _model(stages, case.tied), _batches(pieces)
    found = planned.train(plan_of(case), constants, model, batches, adam)
    return planned.compare(found, _expected(stages, case.tied, pieces))


def train(
    model: nn.Module,
    loss_fn: eager.LossFn,
    batches: Sequence[eager.Batch],
    num_microbatches: int,
    make_optimizer: eager.MakeOptimizer,
    *,
    copy_per_name: bool = True,
) -> list[eager.Step]:
    """Plain PyTorch: float32 parameters, the model run on bfloat16 copies, its output in float32.

    With a copy per name autograd adds up the gradients of a tied weight in float32; else in
    bfloat16.
    """
    model = copy.deepcopy(model)
    optimizer = make_optimizer(list(model.parameters()))
    steps: list[eager.Step] = []
    for batch in batches:
        size = eager.count_rows(batch[0]) // num_microbatches
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for m in range(num_microbatches):
            inputs, targets = (eager.rows(part, m * size, (m + 1) * size) for part in batch)
            named = model.named_parameters(remove_duplicate=False)
            copies = {name: parameter.bfloat16() for name, parameter in named}
            short = copies if copy_per_name else _shared(model, copies)
            output = functional_call(model, short, (inputs,), tie_weights=False)
            loss = loss_fn(output.float(), targets)
            (loss / num_microbatches).backward()
            total += float(loss.detach())
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        steps.append(eager.Step(total / num_microbatches, gradients, eager.state_of(model)))
    return steps


def _shared(model: nn.Module, copies: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One of *copies* for all names of a parameter."""
    named = dict(model.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in reversed(named.items())}
    return {name: copies[first[id(parameter)]] for name, parameter in named.items()}


@cache
def _model(num_stages: int, tied: bool) -> nn.Module:
    torch.manual_seed(3)
    return Transformer(
        TransformerConfig(
            vocab_size=VOCABULARY,
            context=LENGTH,
            width=WIDTH,
            num_layers=num_stages,
            num_heads=2,
            mlp_ratio=2,
            tied_embedding=tied,
            num_stages=num_stages,
        )
    )


@cache
def _captured(num_stages: int, tied: bool) -> Captured:
    model, (batch, *_) = _model(num_stages, tied), _batches(4)
    return capture_with_constants(model, transformer_loss, batch, precision="bf16")


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
    return train(_model(num_stages, tied), transformer_loss, _batches(pieces), pieces, adam)

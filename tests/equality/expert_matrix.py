"""The matrix of expert parallelism: schedules × experts over devices × replicas × pipeline × what
is sharded × form of the region, in float64.
"""

from dataclasses import astuple, dataclass, replace
from functools import cache
from itertools import combinations, product

import torch
from tests.equality import eager, planned
from tests.equality.matrix import adam
from tests.support.covering import cover
from torch import nn

import piper
from piper.capture import Captured, capture_with_constants
from piper.directives.base import Directive
from piper.models import MoEConfig, moe_loss
from piper.models.moe import Mixture
from piper.plan.model import Plan

STEPS = 2
ROWS = 2
"""Rows of a microbatch."""

TOLERANCE = 1e-10
BUCKET = 2e-4
"""MiB of a message: room for a few parameters, not for all of a region."""

VOCABULARY, LENGTH, EXPERTS = 7, 3, 4

FACTORS: dict[str, tuple[object, ...]] = {
    "schedule": ("gpipe", "1f1b", "interleaved_1f1b", "zbv", "dualpipev"),
    "ep": (1, 2, 4),
    "dp": (1, 2, 4),
    "pp": (1, 2),
    "zero": (0, 1, 2, 3),
    "form": ("capacity", "dropless"),
    "recompute": (False, True),
}


@dataclass(frozen=True)
class Case:
    """One cell of the matrix; the fields are the factors. Each stage is on ``ep * dp`` devices:
    ``dp`` replicas of groups that share the experts among ``ep``; the rest of the stage has ``ep *
    dp`` replicas.
    """

    schedule: str
    ep: int
    dp: int
    pp: int
    zero: int
    form: str
    recompute: bool

    def __str__(self) -> str:
        end = "-recompute" * self.recompute
        return (
            f"{self.schedule}-ep{self.ep}-dp{self.dp}-pp{self.pp}-zero{self.zero}-{self.form}{end}"
        )

    @property
    def size(self) -> int:
        """Devices of a stage."""
        return self.ep * self.dp

    @property
    def virtual(self) -> int:
        return 2 if self.schedule in ("interleaved_1f1b", "zbv", "dualpipev") else 1

    @property
    def microbatches(self) -> int:
        """Per replica: at least two, so that gradients add up; DualPipeV needs two per rank."""
        return 2 * self.pp if self.schedule == "dualpipev" else 2

    @property
    def num_stages(self) -> int:
        return self.pp * self.virtual

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
    cases = sorted(all_cases(), key=lambda c: (c.size * c.num_stages, str(c)))
    return tuple(cover(cases))


def strategy(case: Case) -> list[Directive]:
    """The directives of *case*."""
    groups = [list(range(case.size * r, case.size * (r + 1))) for r in range(case.pp)]
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
    devices = case.size * case.pp
    shard = piper.Shard(
        {"EP": "*"}, devices=[list(range(d, d + case.ep)) for d in range(0, devices, case.ep)]
    )
    places = [d for d in directives if isinstance(d, piper.Place)]
    others = [d for d in directives if not isinstance(d, (piper.Place, piper.Replicate))]
    recompute = [piper.Recompute({})] if case.recompute else []
    return [replicate, *places, shard, *others, *recompute]


def plan_of(case: Case) -> Plan:
    """The verified plan of *case*."""
    dag = captured(case.num_stages, case.form).dag
    dag = replace(dag, batch_size=ROWS * case.size * case.microbatches)
    plan = piper.plan(piper.apply(dag, strategy(case)))
    assert plan.num_devices == case.pp * case.size
    assert bool(plan.dag.expert_groups) == (case.ep > 1)
    assert bool(plan.dag.shards) == (case.zero > 0 and case.size > 1)
    piper.verify(plan)
    return plan


def run(case: Case) -> planned.Worst:
    """Errors of *case* over all steps and devices."""
    pieces = case.size * case.microbatches
    found = planned.train(
        plan_of(case),
        captured(case.num_stages, case.form).constants,
        model_of(case.num_stages, case.form),
        batches(pieces),
        adam,
    )
    return planned.compare(found, expected(case.num_stages, case.form, pieces))


class Stack(nn.Module):
    """An embedding, a mixture of experts per stage, a head; no attention, which is the same
    everywhere.
    """

    def __init__(self, num_stages: int, form: str) -> None:
        super().__init__()
        config = MoEConfig(
            width=4,
            num_heads=1,
            num_experts=EXPERTS,
            expert_width=3,
            capacity_factor=1.0 if form == "capacity" else None,
        )
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.mixtures = nn.ModuleList(Mixture(config, i) for i in range(num_stages))
        self.head = nn.Linear(config.width, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        last = len(self.mixtures) - 1
        for stage, mixture in enumerate(self.mixtures):
            with piper.annotate("PP", stage):
                if stage == 0:
                    x, auxiliary = self.embedding(ids), torch.zeros((), dtype=torch.float64)
                out, loss = mixture(x)
                x, auxiliary = x + out, auxiliary + loss
                if stage == last:
                    x = self.head(x)
        return x, auxiliary


@cache
def model_of(num_stages: int, form: str) -> nn.Module:
    """The model of that many stages."""
    torch.manual_seed(3)
    return Stack(num_stages, form).double()


@cache
def captured(num_stages: int, form: str) -> Captured:
    """Its capture; the rows of a batch do not matter to it."""
    model, (batch, *_) = model_of(num_stages, form), batches(4)
    return capture_with_constants(model, moe_loss, batch)


@cache
def batches(pieces: int) -> list[eager.Batch]:
    """A batch per step of that many microbatches."""
    torch.manual_seed(4)
    shape = (ROWS * pieces, LENGTH)
    return [
        (torch.randint(0, VOCABULARY, shape), torch.randint(0, VOCABULARY, shape))
        for _ in range(STEPS)
    ]


@cache
def expected(num_stages: int, form: str, pieces: int) -> list[eager.Step]:
    """What plain PyTorch makes of them."""
    return eager.train(model_of(num_stages, form), moe_loss, batches(pieces), pieces, adam)

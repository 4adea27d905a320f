"""The matrix of experts on groups of their own: schedules × where the experts are × pipeline × what
is sharded × form of the region, in float64.
"""

from dataclasses import astuple, dataclass, replace
from functools import cache
from itertools import combinations, product

from msgspec import structs
from tests.equality import expert_matrix, planned
from tests.equality.matrix import adam
from tests.support.covering import cover

import piper
from piper.directives.base import Directive
from piper.plan.model import Plan

ROWS, TOLERANCE, BUCKET = expert_matrix.ROWS, expert_matrix.TOLERANCE, expert_matrix.BUCKET

GROUPS: dict[str, tuple[int, list[list[int]]]] = {
    "apart-1-2": (1, [[1, 2]]),
    "around-1-4": (1, [[0, 1, 2, 3]]),
    "around-2-4": (2, [[2, 0, 3, 1]]),
    "beside-2-2": (2, [[1, 2]]),
    "inside-4-2": (4, [[1, 2]]),
    "apart-2-1": (2, [[2]]),
    "lists-2-2x2": (2, [[0, 2], [1, 3]]),
    "lists-4-2x1": (4, [[4], [5]]),
}
"""Of one pipeline rank, whose devices count from 0: how many of the first devices have the dense
layers, and the lists that share experts.
"""

FACTORS: dict[str, tuple[object, ...]] = {
    "schedule": ("gpipe", "1f1b", "zbv", "dualpipev"),
    "groups": tuple(GROUPS),
    "pp": (1, 2),
    "zero": (0, 1, 2, 3),
    "form": ("capacity", "dropless"),
    "recompute": (False, True),
}


@dataclass(frozen=True)
class Case:
    """One cell of the matrix; the fields are the factors."""

    schedule: str
    groups: str
    pp: int
    zero: int
    form: str
    recompute: bool

    def __str__(self) -> str:
        end = "-recompute" * self.recompute
        return f"{self.schedule}-{self.groups}-pp{self.pp}-zero{self.zero}-{self.form}{end}"

    @property
    def dense(self) -> int:
        """Replicas of everything but experts."""
        return GROUPS[self.groups][0]

    @property
    def lists(self) -> list[list[int]]:
        return GROUPS[self.groups][1]

    @property
    def size(self) -> int:
        """Devices of a pipeline rank."""
        return max(self.dense, 1 + max(d for group in self.lists for d in group))

    @property
    def virtual(self) -> int:
        return 2 if self.schedule in ("zbv", "dualpipev") else 1

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
    """The directives of *case*: experts are where those of their stage's dense layers are, counted
    from the rank's first device.
    """
    first = [case.size * rank for rank in range(case.pp)]
    directives = piper.strategies.pipeline(
        case.schedule,
        [[base + d for d in range(case.dense)] for base in first],
        case.microbatches,
        num_virtual_stages=case.virtual,
    )
    replicate = piper.Replicate(
        {},
        shard_optimizer=case.zero == 1,
        shard_grads=case.zero == 2,
        shard_params=case.zero == 3,
        bucket_size=BUCKET,
    )
    places = [d for d in directives if isinstance(d, piper.Place)]
    dense = [structs.replace(p, filter={**p.filter, "EP": None}) for p in places]
    shards = [
        piper.Shard(
            {"EP": place.filter["PP"]},
            devices=[[place.devices[0] + d for d in group] for group in case.lists],
        )
        for place in places
    ]
    others = [d for d in directives if not isinstance(d, (piper.Place, piper.Replicate))]
    recompute = [piper.Recompute({})] if case.recompute else []
    return [replicate, *dense, *shards, *others, *recompute]


def plan_of(case: Case) -> Plan:
    """The verified plan of *case*."""
    captured = expert_matrix.captured(case.num_stages, case.form)
    dag = replace(captured.dag, batch_size=ROWS * case.dense * case.microbatches)
    plan = piper.plan(piper.apply(dag, strategy(case)))
    assert plan.num_devices == case.pp * case.size
    assert plan.num_replicas == case.dense
    assert bool(plan.dag.expert_groups) == (len(case.lists[0]) > 1)
    piper.verify(plan)
    return plan


def run(case: Case) -> planned.Worst:
    """Errors of *case* over all steps and devices."""
    pieces = case.dense * case.microbatches
    found = planned.train(
        plan_of(case),
        expert_matrix.captured(case.num_stages, case.form).constants,
        expert_matrix.model_of(case.num_stages, case.form),
        expert_matrix.batches(pieces),
        adam,
    )
    return planned.compare(found, expert_matrix.expected(case.num_stages, case.form, pieces))

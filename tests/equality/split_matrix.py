"""The matrix of split backwards: ZB-H1 × models that are hard to split × sharding × recomputation,
in float64.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import cache
from itertools import combinations, product

import torch
from tests.cases.equal import adamw, mse, randint, randn, rolled
from tests.equality import eager, planned
from tests.support.covering import cover
from tests.support.zero_bubble import zb_h1
from torch import nn
from torch.nn import functional

import piper
from piper.api.programs import Programs
from piper.directives.base import Directive
from piper.models import Transformer, TransformerConfig, transformer_loss
from piper.plan.model import Plan

TOLERANCE = 1e-10
BUCKET = 2e-4
"""MiB of a message: room for some of a region's parameters."""

MICROBATCHES = 3
WIDTH = 4


class Stages(nn.Module):
    """``block(stage)`` on each of a number of stages, one after the other."""

    def __init__(self, num_stages: int, block: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(stage) for stage in range(num_stages))

    def forward(self, x):
        for stage, block in enumerate(self.blocks):
            with piper.annotate("PP", stage):
                x = block(x)
        return x


class Square(nn.Module):
    """``x @ W @ W`` and a parameter of the shape of one row: its gradient is the activation's,
    summed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = (nn.Parameter(torch.randn(s, WIDTH) * 0.6) for s in (WIDTH, 1))

    def forward(self, x):
        return x @ self.w @ self.w + self.b * x.cos()


class Fused(nn.Module):
    """Fused projections: a chunk of three, and an unbind of two, which a custom function
    combines.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.pair = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        a, b = self.pair(x + q.sigmoid() * k + v).view(-1, 2, WIDTH).unbind(1)
        return Product.apply(a, b)


class Product(torch.autograd.Function):
    """``a · tanh(b)`` with a backward of its own."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b.tanh()

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        t = b.tanh()
        return grad * t, grad * a * (1 - t * t)


class Normed(nn.Module):
    """LayerNorm, GroupNorm and RMSNorm with weights and biases, and a parameter that is added as it
    is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.group = nn.LayerNorm(WIDTH), nn.GroupNorm(1, WIDTH)
        self.rms = nn.RMSNorm(WIDTH)
        self.linear, self.shift = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))
        for norm in (self.layer, self.group, self.rms):
            nn.init.uniform_(norm.weight, 0.5, 1.5)

    def forward(self, x):
        return self.rms(self.group(self.linear(self.layer(x))).tanh() + self.shift)


class Conv(nn.Module):
    """Convolutions and BatchNorm (without buffers: replicas would write them)."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(2, 3, 3, padding=1, bias=False)
        self.b = nn.ConvTranspose2d(3, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(3, track_running_stats=False)

    def forward(self, x):
        return x + self.b(self.norm(self.a(x)).relu())


class Skips(nn.Module):
    """Each stage of the first half is read by its mirror image, across all stages between."""

    def __init__(self, num_stages: int) -> None:
        super().__init__()
        half = num_stages // 2
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(half))
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(half))

    def forward(self, x):
        skips = []
        for stage, layer in enumerate(self.down):
            with piper.annotate("PP", stage):
                x = layer(x).tanh()
                skips.append(x)
        for stage, layer in enumerate(self.up, len(self.down)):
            with piper.annotate("PP", stage):
                x = layer(torch.cat([x, skips.pop()], -1)).sin()
        return x


class Frozen(nn.Module):
    """Every other stage has no trained parameter; the first one has none of any kind."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).requires_grad_(stage % 2 == 1)
        self.first = stage == 0

    def forward(self, x):
        return x.sin() if self.first else self.linear(x).tanh()


class Nested(nn.Module):
    """Regions inside a region: its backward is several chunks; the parameter around them is used in
    two of these.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.outer(x).tanh()
        with piper.annotate("EP", 0):
            g = self.inner(h).sigmoid() * h
        return self.outer(g + x)


class Dropped(nn.Module):
    """Dropout before and after a product."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return functional.dropout(self.b(functional.dropout(self.a(x), 0.3).tanh()), 0.2)


@dataclass(frozen=True)
class Kind:
    """A model by number of stages, its loss, batches by number of rows."""

    build: Callable[[int], nn.Module]
    loss_fn: eager.LossFn
    batch: Callable[[int], eager.Batch]


def _rows(count: int) -> eager.Batch:
    return randn(count, WIDTH), randn(count, WIDTH, seed=1)


def _plain(block: Callable[[int], nn.Module]) -> Kind:
    return Kind(lambda stages: Stages(stages, block), mse, _rows)


KINDS = {
    "tied": Kind(
        lambda stages: Transformer(
            TransformerConfig(
                vocab_size=7,
                context=3,
                width=4,
                num_layers=stages,
                num_heads=2,
                mlp_ratio=2,
                tied_embedding=True,
                num_stages=stages,
            )
        ),
        transformer_loss,
        lambda rows: (randint(7, rows, 3), randint(7, rows, 3, seed=1)),
    ),
    "square": _plain(lambda _: Square()),
    "fused": _plain(lambda _: Fused()),
    "normed": _plain(lambda _: Normed()),
    "conv": Kind(
        lambda stages: Stages(stages, lambda _: Conv()),
        mse,
        lambda rows: (randn(rows, 2, 3, 3), randn(rows, 2, 3, 3, seed=1)),
    ),
    "skips": Kind(Skips, mse, _rows),
    "frozen": _plain(Frozen),
    "nested": _plain(lambda _: Nested()),
    "dropped": _plain(lambda _: Dropped()),
}

FACTORS: dict[str, tuple[object, ...]] = {
    "model": tuple(KINDS),
    "pp": (2, 4),
    "zero": (0, 1, 2, 3),
    "dp": (1, 2),
    "recompute": ("no", "before", "after"),
}


@dataclass(frozen=True)
class Case:
    """One cell of the matrix; the fields are the factors. ``recompute`` comes before the order,
    after it, or not at all.
    """

    model: str
    pp: int
    zero: int
    dp: int
    recompute: str

    def __str__(self) -> str:
        ends = "" if self.recompute == "no" else f"-recompute {self.recompute}"
        return f"{self.model}-pp{self.pp}-zero{self.zero}-dp{self.dp}{ends}"

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
    deterministic. First among those that shard over two replicas, then among all.
    """
    cases = sorted(all_cases(), key=lambda c: (c.dp * c.pp, str(c)))
    sharded = [c for c in cases if c.zero and c.dp > 1 and c.pp == 2]
    return tuple(cover(sharded, cases))


def strategy(case: Case) -> list[Directive]:
    """The directives of *case*."""
    groups = [list(range(case.dp * stage, case.dp * (stage + 1))) for stage in range(case.pp)]
    replicate = piper.Replicate(
        {},
        shard_optimizer=case.zero == 1,
        shard_grads=case.zero == 2,
        shard_params=case.zero == 3,
        bucket_size=BUCKET,
    )
    recompute = [piper.Recompute({})]
    return [
        *piper.placements.chain(groups),
        replicate,
        piper.Split({}, num_microbatches=MICROBATCHES),
        *(recompute if case.recompute == "before" else []),
        *zb_h1(case.pp, MICROBATCHES),
        *(recompute if case.recompute == "after" else []),
    ]


@cache
def model_of(kind: str, num_stages: int) -> nn.Module:
    """The model of *kind* with its first weights."""
    torch.manual_seed(5)
    return KINDS[kind].build(num_stages).double()


def plan_of(case: Case) -> Plan:
    """The verified plan of *case*."""
    return _program(case)[0]


def _program(case: Case):
    kind, model = KINDS[case.model], model_of(case.model, case.pp)
    batch = kind.batch(2 * case.dp * MICROBATCHES)
    program = Programs(model, kind.loss_fn, strategy(case)).training(batch)
    piper.verify(program.plan)
    return program.plan, program.constants, model, batch


def run(case: Case) -> float:
    """The largest error of two steps on all devices; of dropout, which plain PyTorch draws
    otherwise, the error of one step.
    """
    kind = KINDS[case.model]
    if case.model == "dropped":
        batch = kind.batch(2 * case.dp * MICROBATCHES)
        model = model_of(case.model, case.pp)
        report = piper.check(model, kind.loss_fn, strategy(case), batch, optimizer=adamw)
        return max(report.max_loss_error, report.max_grad_error, report.max_param_error)
    plan, constants, model, batch = _program(case)
    batches = [rolled(batch, step) for step in range(2)]
    found = planned.train(plan, constants, model, batches, adamw)
    count = plan.num_replicas * plan.num_microbatches
    expected = eager.train(model, kind.loss_fn, batches, count, adamw)
    return planned.compare(found, expected).worst

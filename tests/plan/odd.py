"""A small model with everything that makes memory hard to foretell, and steps of it under many
strategies.
"""

from dataclasses import dataclass, replace
from functools import cache
from random import Random

import torch
from torch import nn

import piper
from piper.capture import Captured, annotate, capture_with_constants
from piper.capture.precision import make_precision
from piper.directives.base import Directive
from piper.ir.dag import Clip, GradientUse, Norm
from piper.ir.edit import use_gradients
from piper.plan.model import Plan
from piper.schedules import SCHEDULES

ROWS = 2
"""Of a microbatch."""

FP16 = piper.Precision(
    compute=torch.float16, loss_scale=piper.LossScale(init=2.0**10, growth_interval=2)
)
PRECISIONS = {"float32": None, "bf16": make_precision("bf16"), "fp16": FP16}
EXTRAS = {
    "": [],
    "offload": [piper.Offload({})],
    "recompute": [piper.Recompute({})],
    "both": [piper.Recompute({"PP": 0}), piper.Offload({})],
}


class Odd(nn.Module):
    """A scalar; a weight shared by the first and the last stage; a frozen weight; one that another
    stage reads without training it; one that nothing uses; a buffer; dropout; sizes that no group
    divides.
    """

    def __init__(self, num_stages: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(num_stages))
        self.head = nn.Linear(5, 3)
        self.gain, self.shared = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(5))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("offset", torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = len(self.layers) - 1
        for stage, layer in enumerate(self.layers):
            with annotate("PP", stage):
                x = nn.functional.dropout(layer(x).tanh(), 0.1)
                if stage == 0:
                    x = x * self.shared * self.frozen
                if stage == last:
                    x = x + self.offset.to(x.dtype) * self.shared.tanh()
                    x = self.head(x + self.layers[0].bias.detach()) * self.gain
        return x


def mse(outputs, targets):
    return nn.functional.mse_loss(outputs, targets)


def weighted(outputs, targets):
    weight = (targets > 0).float()
    return (weight * (outputs - targets) ** 2).sum(), weight.sum()


LOSSES = {"mse": mse, "weighted": weighted}


@dataclass(frozen=True)
class Step:
    """A training step of the model: two pipeline ranks × ``dp`` replicas."""

    schedule: str
    zero: int = 0
    dp: int = 2
    extra: str = ""
    precision: str = "float32"
    loss: str = "mse"
    use: GradientUse = GradientUse.UPDATE
    clipped: bool = False
    bucket_size: float | None = None
    microbatches: int = 4

    def __str__(self) -> str:
        given = [self.schedule, f"zero{self.zero}", f"dp{self.dp}", self.extra, self.precision]
        more = [self.loss, self.use.value, "clipped" * self.clipped]
        return "-".join(word for word in (*given, *more) if word)

    @property
    def num_stages(self) -> int:
        chosen = SCHEDULES[self.schedule]
        return 2 * (2 if chosen.placement.virtual_stages else chosen.placement.stages_per_rank)

    @property
    def strategy(self) -> list[Directive]:
        groups = [list(range(self.dp * rank, self.dp * (rank + 1))) for rank in range(2)]
        return [
            *piper.strategies.pipeline(
                self.schedule,
                groups,
                self.microbatches,
                num_virtual_stages=self.num_stages // 2
                if SCHEDULES[self.schedule].placement.virtual_stages
                else None,
                zero=self.zero,
                bucket_size=self.bucket_size,
            ),
            *EXTRAS[self.extra],
        ]

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        make = torch.Generator().manual_seed(0)
        rows = ROWS * self.dp * self.microbatches
        return torch.randn(rows, 5, generator=make), torch.randn(rows, 3, generator=make)

    def plan(self) -> tuple[Odd, Plan, Captured]:
        """The model, the verified plan, what was captured."""
        model, found = captured(self.num_stages, self.loss, self.precision)
        policy = PRECISIONS[self.precision]
        scaled = policy is not None and policy.loss_scale is not None
        clip = Clip(Norm.L2, 1.0 if self.clipped else None) if scaled or self.clipped else None
        dag = replace(found.dag, batch_size=ROWS * self.dp * self.microbatches)
        dag = use_gradients(dag, self.use, clip, loss_scaled=scaled).dag
        plan = piper.plan(piper.apply(dag, self.strategy))
        piper.verify(plan)
        return model, plan, found


def random_step(choose: Random) -> Step:
    return Step(
        schedule=choose.choice(sorted(SCHEDULES)),
        zero=choose.randrange(4),
        dp=choose.choice((1, 2, 2)),
        extra=choose.choice(list(EXTRAS)),
        precision=choose.choice(list(PRECISIONS)),
        loss=choose.choice(list(LOSSES)),
        use=choose.choice(list(GradientUse)),
        clipped=choose.choice((False, True)),
        bucket_size=choose.choice((None, 1e-4)),
    )


@cache
def captured(num_stages: int, loss: str, precision: str) -> tuple[Odd, Captured]:
    model = Odd(num_stages)
    batch = torch.randn(ROWS, 5), torch.randn(ROWS, 3)
    found = capture_with_constants(model, LOSSES[loss], batch, precision=PRECISIONS[precision])
    return model, found

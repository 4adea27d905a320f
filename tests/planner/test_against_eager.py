"""Strategies on small models that exercise what the planner decides, held against eager PyTorch in
float64.
"""

import pytest
import torch
from torch import nn

import piper


class Stages(nn.Module):
    """Three regions: the second result of the first goes to both others; the last uses the first
    one's weight once more.
    """

    def __init__(self, *, detached: bool, counted: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.detached, self.counted = detached, counted
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        with piper.annotate("PP"):
            if self.counted:
                self.steps += 1
            first = torch.tanh(self.layers[0](x))
        with piper.annotate("PP"):
            h = torch.tanh(self.layers[1](first))
        with piper.annotate("PP"):
            weight = self.layers[0].weight
            weight = weight.detach() if self.detached else weight
            return self.layers[2](h + first) @ weight


def mean(outputs, targets):
    return ((outputs - targets) ** 2).mean()


def weighted(outputs, targets):
    valid = (targets > 0).to(outputs.dtype)
    return (((outputs - targets) ** 2) * valid).sum(), valid.sum()


@pytest.mark.parametrize("loss", [mean, weighted])
@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("replicas", [1, 2])
def test_shared_weight_and_skip(loss, detached, replicas):
    torch.manual_seed(0)
    model = Stages(detached=detached, counted=replicas == 1)
    groups = [[s * replicas + r for r in range(replicas)] for s in range(3)]
    strategy = [
        *piper.placements.chain(groups),
        piper.Replicate({}, bucket_size=1e-4),
        piper.Split({}, num_microbatches=4),
        *piper.schedules.one_f_one_b(3, 4),
    ]
    report = piper.check(
        model,
        loss,
        strategy,
        (torch.randn(16, 6), torch.randn(16, 6)),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    )
    assert report.ok, str(report)

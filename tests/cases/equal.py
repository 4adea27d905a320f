"""Train a model under a strategy on threads, and in plain PyTorch, in float64; every device's copy
of everything must agree.
"""

import copy
from collections.abc import Sequence

import torch
from tests.equality import eager, planned
from torch import nn

from piper.api.programs import Programs
from piper.directives.base import Directive
from piper.plan.model import Plan

TOLERANCE = 1e-10


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def assert_equal(
    model: nn.Module,
    loss_fn: eager.LossFn,
    strategy: Sequence[Directive],
    batch: eager.Batch,
    *,
    optimizer: eager.MakeOptimizer = sgd,
    steps: int = 2,
    **backend: object,
) -> Plan:
    """Train *steps* steps on *batch* (rolled by one row each time) both ways; raise unless all is
    equal.
    """
    model = copy.deepcopy(model).double()
    batches = [rolled(batch, step) for step in range(steps)]
    program = Programs(model, loss_fn, strategy).training(batches[0])
    plan = program.plan
    found = planned.train(plan, program.constants, model, batches, optimizer, **backend)
    count = plan.num_replicas * plan.num_microbatches
    worst = planned.compare(found, eager.train(model, loss_fn, batches, count, optimizer))
    assert worst.worst <= TOLERANCE, worst
    return plan


def rolled(tree: object, shift: int) -> object:
    """Float64 tensors with the rows rotated, so that no two steps see the same microbatches."""
    if isinstance(tree, torch.Tensor):
        wide = tree.double() if tree.is_floating_point() else tree
        return wide.roll(shift, 0)
    if isinstance(tree, dict):
        return {key: rolled(child, shift) for key, child in tree.items()}
    if isinstance(tree, tuple):
        return tuple(rolled(child, shift) for child in tree)
    return tree


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randint(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def mse(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, targets)

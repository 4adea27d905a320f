"""Run a plan on threads and look at every device's copy of everything."""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from tests.equality.eager import Batch, MakeOptimizer, Step
from torch import Tensor, nn

from piper.backends.inprocess import InProcessBackend
from piper.plan.model import Plan
from piper.runtime.batch import signature
from piper.runtime.state import OptimizerSpec

FLOOR = 1e-6
"""Norms below this fraction of the largest of their kind count as that much."""


@dataclass
class Planned:
    """One step: the loss; per device the gradients that its optimizer got, and its parameters and buffers."""

    loss: float
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    state: list[dict[str, Tensor]] = field(default_factory=list)


def train(
    plan: Plan,
    constants: Mapping[str, Tensor],
    model: nn.Module,
    batches: Sequence[Batch],
    make_optimizer: MakeOptimizer,
    *,
    seed: int = 0,
    **options: object,
) -> list[Planned]:
    """One step per batch from *model*'s weights. *options* are those of the backend."""
    seen: list[dict[str, Tensor]] = [{} for _ in range(plan.num_devices)]

    def observe(gradients: Mapping[str, Tensor]) -> None:
        device = int(threading.current_thread().name.rpartition(" ")[2])
        for name, gradient in gradients.items():
            assert name not in seen[device], f"device {device} updates {name} twice"
            seen[device][name] = gradient.detach().clone()

    tensors = {
        n: t.detach()
        for named in (model.named_parameters, model.named_buffers)
        for n, t in named(remove_duplicate=False)
    }
    steps: list[Planned] = []
    with InProcessBackend(threads=1, **options) as backend:
        backend.start(plan.num_devices)
        backend.load("plan", plan, signature(batches[0]), constants)
        backend.initialise("plan", tensors, OptimizerSpec(make_optimizer, observe=observe))
        for number, batch in enumerate(batches):
            (result,) = backend.run("plan", [batch], first_step=number, seed=seed).steps
            losses = result.values["loss"].values()
            weights = result.values.get("weight", dict.fromkeys(result.values["loss"], 1.0))
            copies = backend.copies()
            steps.append(
                Planned(
                    sum(losses) / sum(weights.values()),
                    [dict(gradients) for gradients in seen],
                    [{**c.parameters, **c.buffers} for c in copies],
                )
            )
            for gradients in seen:
                gradients.clear()
    return steps


@dataclass(frozen=True)
class Worst:
    """Largest errors over all steps and devices: of loss, gradients, state."""

    loss: float
    gradients: float
    state: float

    @property
    def worst(self) -> float:
        return max(self.loss, self.gradients, self.state)


def compare(found: Sequence[Planned], expected: Sequence[Step]) -> Worst:
    """Errors of *found*; a name that no device has, or a gradient that a holder of its parameter lacks, is infinitely wrong."""
    assert len(found) == len(expected)
    loss = gradients = state = 0.0
    for mine, theirs in zip(found, expected, strict=True):
        loss = max(loss, _scalar(mine.loss, theirs.loss))
        assert set(theirs.state) <= {name for held in mine.state for name in held}
        for got, held in zip(mine.gradients, mine.state, strict=True):
            wanted = {n: g for n, g in theirs.gradients.items() if n in held}
            assert got.keys() == wanted.keys()
            gradients = max(gradients, _tensors(got, theirs.gradients))
            state = max(state, _tensors(held, theirs.state))
    return Worst(loss, gradients, state)


def _tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest error of *found*, all of whose names *expected* has; norms count among all of *expected*."""
    largest = max((float(t.double().norm()) for t in expected.values()), default=0.0)
    worst = 0.0
    for name, tensor in found.items():
        distance = float((tensor.double() - expected[name].double()).norm())
        scale = max(float(expected[name].double().norm()), FLOOR * largest)
        error = 0.0 if distance == 0.0 else distance / scale
        assert not math.isnan(error), f"{name} is not a number"
        worst = max(worst, error)
    return worst


def _scalar(found: float, expected: float) -> float:
    error = abs(found - expected) / max(abs(expected), torch.finfo(torch.float64).tiny)
    assert not math.isnan(error), "the loss is not a number"
    return error

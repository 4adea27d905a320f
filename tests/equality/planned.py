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
from piper.runtime.optimizer import OptimizerSpec
from piper.runtime.slices import Shard, Slice

FLOOR = 1e-6
"""Norms below this fraction of the largest of their kind count as that much."""


@dataclass
class Planned:
    """One step: the loss; per device the gradients that its optimizer got, and its parameters and
    buffers.

    Where a device trains a slice of a parameter, the gradient is that slice's, and ``shards`` has
    the slice besides what it holds whole.
    """

    loss: float
    gradients: list[dict[str, Tensor | Shard]] = field(default_factory=list)
    state: list[dict[str, Tensor]] = field(default_factory=list)
    shards: list[dict[str, Shard]] = field(default_factory=list)


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
    seen: list[dict[str, Tensor | Shard]] = [{} for _ in range(plan.num_devices)]

    def observe(gradients: Mapping[str, Tensor], slices: Mapping[str, Slice]) -> None:
        device = int(threading.current_thread().name.rpartition(" ")[2])
        for name, gradient in gradients.items():
            assert name not in seen[device], f"device {device} updates {name} twice"
            copy, part = gradient.detach().clone(), slices.get(name)
            seen[device][name] = copy if part is None else Shard(part, copy)

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
                    [c.shards for c in copies],
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
    """Errors of *found*; a name that no device has, or a gradient that a holder of its parameter
    lacks, is infinitely wrong.
    """
    assert len(found) == len(expected)
    loss = gradients = state = 0.0
    for mine, theirs in zip(found, expected, strict=True):
        loss = max(loss, _scalar(mine.loss, theirs.loss))
        _assert_all_there(mine, theirs)
        for got, held, shards in zip(mine.gradients, mine.state, mine.shards, strict=True):
            wanted = {n for n in theirs.gradients if n in held or n in shards}
            assert got.keys() == wanted
            gradients = max(gradients, _tensors(got, theirs.gradients))
            state = max(state, _tensors(held, theirs.state), _tensors(shards, theirs.state))
    return Worst(loss, gradients, state)


def _assert_all_there(mine: Planned, theirs: Step) -> None:
    """Every name is held whole somewhere, or all its slices are."""
    whole = {name for held in mine.state for name in held}
    for name in set(theirs.state) - whole:
        parts = {shards[name].part for shards in mine.shards if name in shards}
        counts = {(part.experts[1], part.count) for part in parts}
        assert len(counts) == 1, f"{name} is held nowhere, or cut in different ways: {counts}"
        experts, slices = counts.pop()
        wanted = {(e, i) for e in range(experts) for i in range(slices)}
        assert {(part.experts[0], part.index) for part in parts} == wanted, f"slices of {name}"


def _tensors(found: Mapping[str, Tensor | Shard], expected: Mapping[str, Tensor]) -> float:
    """The largest error of *found*, all of whose names *expected* has; norms count among all of
    *expected*.

    The error of a slice is relative to the whole tensor. A copy in a shorter type than is expected
    must be what is expected, rounded.
    """
    largest = max((float(t.double().norm()) for t in expected.values()), default=0.0)
    worst = 0.0
    for name, entry in found.items():
        tensor, wanted = entry, expected[name]
        if isinstance(entry, Shard):
            tensor, wanted = entry.tensor, entry.part.of(wanted)
        assert tensor.shape == wanted.shape, name
        wanted = wanted.to(tensor.dtype)
        distance = float((tensor.double() - wanted.double()).norm())
        scale = max(float(expected[name].double().norm()), FLOOR * largest)
        error = 0.0 if distance == 0.0 else distance / scale
        assert not math.isnan(error), f"{name} is not a number"
        worst = max(worst, error)
    return worst


def _scalar(found: float, expected: float) -> float:
    error = abs(found - expected) / max(abs(expected), torch.finfo(torch.float64).tiny)
    assert not math.isnan(error), "the loss is not a number"
    return error

"""The loss of given outputs and targets, as numbers."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from piper.capture.joint import LossFn
from piper.capture.loss import read_loss

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4}
"""Relative difference that rounding explains, by the type of the loss."""

COARSE = 3e-2
"""The same for shorter types."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A loss: a mean, or a sum and its weight; computed in ``dtype``."""

    total: float
    weight: float | None
    dtype: torch.dtype

    @property
    def value(self) -> float:
        """The mean that it stands for."""
        if self.weight is None:
            return self.total
        return self.total / self.weight if self.weight else math.nan

    @property
    def finite(self) -> bool:
        """Whether it says something: a part without any weight does, if its sum is finite."""
        return math.isfinite(self.total) and (self.weight is None or math.isfinite(self.weight))

    @property
    def tolerance(self) -> float:
        """What rounding explains."""
        return TOLERANCE.get(self.dtype, COARSE)


def measure(loss_fn: LossFn, outputs: object, targets: object) -> Measured:
    """What *loss_fn* says of *outputs*; always with the same random numbers."""
    torch.manual_seed(0)
    with torch.no_grad():
        loss = read_loss(loss_fn(outputs, targets))
    weight = None if loss.weight is None else float(loss.weight)
    return Measured(float(loss.value), weight, loss.value.dtype)


def without_traces(loss_fn: LossFn) -> LossFn:
    """*loss_fn*, or a copy of one that is a module, which may count and remember."""
    return copy.deepcopy(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn


def is_repeatable(loss_fn: LossFn, outputs: object, targets: object) -> bool:
    """Whether *loss_fn* says the same again, whatever random numbers it draws."""

    def seeded(seed: int) -> Callable[[object, object], object]:
        def call(outputs: object, targets: object) -> object:
            torch.manual_seed(seed)
            return loss_fn(outputs, targets)

        return call

    first, again = (measure(seeded(seed), outputs, targets) for seed in (1, 2))
    return first.total == again.total and first.weight == again.weight

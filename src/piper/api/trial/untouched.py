"""Leave a model, and the random numbers of the process, as they were found."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from piper.capture.states import Attributes


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Undo what happens inside to the attributes of *model*'s modules, its parameters' ``.grad``,
    and the global random states of Python, numpy and torch.
    """
    attributes = [Attributes(module) for module in model.modules()]
    gradients = [(p, p.grad) for p in model.parameters()]
    python, legacy, seeds = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 (what models use)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        torch.set_rng_state(seeds)
        for saved in attributes:
            saved.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient

"""The global random states of a process, which belong to the user."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Afterwards the global generators of ``random``, NumPy (if it is loaded) and PyTorch's CPU are
    as before, whatever user code that is only tried draws.
    """
    numpy = sys.modules.get("numpy")
    drawn = None if numpy is None else numpy.random.get_state()
    python = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(drawn)

"""Pause the cyclic garbage collector while many long-lived objects are made."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection inside.

    Capture and planning make hundreds of thousands of objects that stay; the collector would walk
    over all of them again and again, which makes time grow faster than the plan.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

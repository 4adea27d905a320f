"""Pause the cyclic garbage collector while many long-lived objects are made."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection inside.

    Planning makes hundreds of thousands of objects that all stay; the collector would walk over all of
    them again and again, which makes time grow faster than the plan.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

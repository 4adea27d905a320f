"""What is captured does not depend on where ``piper.compile`` is called: under ``torch.no_grad()``,
in inference mode, under autocast, in several threads.
"""

import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from piper.errors import PiperWarning

_ONE_AT_A_TIME = threading.RLock()
"""Tracing sets flags and replaces functions of torch that all threads share."""


@contextmanager
def plain_surroundings() -> Iterator[None]:
    """Gradients are recorded, no autocast is on, and no other thread is in here."""
    with _ONE_AT_A_TIME, ExitStack() as stack:
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                warnings.warn(
                    f"torch.autocast is on for {device!r} around this call, and ignored: what is trained is the model by itself. Give precision= (or "
                    "enter autocast in the model's forward)",
                    PiperWarning,
                    stacklevel=5,
                )
                stack.enter_context(torch.autocast(device, enabled=False))
        yield

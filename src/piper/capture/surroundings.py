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


class InThisThread:
    """A flag that is true in the thread that made it and false in all others."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __bool__(self) -> bool:
        return threading.get_ident() == self._thread

    def __or__(self, other: bool) -> bool:
        return bool(self) or other

    __ror__ = __or__

    def __and__(self, other: bool) -> bool:
        return bool(self) and other

    __rand__ = __and__


@contextmanager
def plain_surroundings() -> Iterator[None]:
    """Gradients are recorded, new tensors are on the CPU, no autocast is on, and no other thread is in here."""
    with _ONE_AT_A_TIME, ExitStack() as stack:
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.device("cpu"))
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

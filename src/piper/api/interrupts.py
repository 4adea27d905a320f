"""Ctrl-C between steps, not within one."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class _Late:
    """Notes the first Ctrl-C; with the second, both are handled as they were to be."""

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self._handler = handler
        self._noted = 0

    def note(self, number: int, frame: FrameType | None) -> None:
        """What the signal calls."""
        self._noted += 1
        if self._noted > 1:
            self.deliver(number, frame)

    def deliver(self, number: int = signal.SIGINT, frame: FrameType | None = None) -> None:
        """Handle what was noted."""
        noted, self._noted = self._noted, 0
        for _ in range(noted):
            self._handler(number, frame)


@contextmanager
def late_interrupts() -> Iterator[None]:
    """A first Ctrl-C inside takes effect at the end; a second one at once.

    What it does then is what it did before: in general it raises ``KeyboardInterrupt``. Only the
    main thread can catch signals: in another one, and where Ctrl-C is ignored, nothing changes.
    """
    handler = signal.getsignal(signal.SIGINT)
    mine = threading.current_thread() is threading.main_thread()
    if not mine or not callable(handler) or isinstance(getattr(handler, "__self__", None), _Late):
        yield
        return
    late = _Late(handler)
    signal.signal(signal.SIGINT, late.note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        late.deliver()

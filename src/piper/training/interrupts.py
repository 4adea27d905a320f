"""Ctrl-C between steps, not within one."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class Interrupts:
    """While entered, the first Ctrl-C sets ``requested`` and lets the program go on; the next
    raises ``KeyboardInterrupt``.

    Only the main thread can catch signals: entered in another one, it changes nothing.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Self:
        self._catches = threading.current_thread() is threading.main_thread()
        if self._catches:
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._catches:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

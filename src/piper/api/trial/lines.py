"""At which line of the user's code does something change?"""

import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TypeAlias

from piper.capture.explain import described_line, is_library_file, is_user_file, model_frame

Trace: TypeAlias = Callable[[FrameType, str, object], object]


def line_of_change(run: Callable[[], object], token: Callable[[], object]) -> str:
    """``file:line (code)`` of the line during which the value of *token* first changes while *run*
    runs; empty if it does not, or no line of the model does it. The line is the user's own; a
    library's where the user's code is not running.
    """
    finder = _Finder(token)
    before = sys.gettrace()
    sys.settrace(finder.called)  # type: ignore[arg-type]  # what it returns is of the same kind
    try:
        with suppress(Exception):  # what changed before it is still of interest
            run()
    finally:
        sys.settrace(before)
    return finder.found


class _Finder:
    """Looks after each line."""

    def __init__(self, token: Callable[[], object]) -> None:
        self._token = token
        self._value = token()
        self._last: tuple[str, int] | None = None
        self.found = ""

    def called(self, frame: FrameType, event: str, _: object) -> Trace | None:
        """Trace the frames of the model."""
        name = frame.f_code.co_filename
        if self.found or event != "call" or not (is_user_file(name) or is_library_file(name)):
            return None
        self._look()
        return self._line

    def _line(self, frame: FrameType, event: str, _: object) -> Trace | None:
        self._look()
        if self.found:
            return None
        if event == "line":
            self._last = (frame.f_code.co_filename, frame.f_lineno)
        elif event == "return":
            self._last = model_frame(frame.f_back)
        return self._line

    def _look(self) -> None:
        if self.found or self._last is None:
            return
        if self._token() != self._value:
            self.found = described_line(*self._last)

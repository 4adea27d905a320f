"""Errors of a failed trace in the user's words. Uses private torch."""

import linecache
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from piper.errors import CaptureError


def explained(error: Exception) -> CaptureError:
    """*error* as a capture error that names the user's line and a remedy."""
    where = user_line(error.__traceback__)
    if isinstance(error, DataDependentOutputException):
        return CaptureError(
            f"{where}: the model turns a tensor's value into a Python number ({error.func}: .item(), "
            f"bool(tensor), int(tensor) or control flow on it), but one graph serves every batch. "
            f"Compute with tensors instead (torch.where, masks), or pass the number as a non-tensor input"
        )
    if isinstance(error, DynamicOutputShapeException):
        return CaptureError(
            f"{where}: {error.func} makes a tensor whose shape depends on the data. Use an operation "
            f"with a fixed shape (torch.where with three arguments, masks, top-k, padding)"
        )
    if isinstance(error, GuardOnDataDependentSymNode):
        return CaptureError(
            f"{where}: a size depends on the data: {error}. Use fixed sizes and masks"
        )
    text = str(error)
    if "set_ on a graph input" in text:
        return CaptureError(
            f"{where}: the forward calls set_ on a parameter or a buffer, which gives it other memory; write a buffer in place instead: "
            "self.buffer.copy_(new)"
        )
    if "mutating a non-functional tensor" in text:
        return CaptureError(
            f"{where}: the forward writes a tensor that the model does not register; make it a buffer "
            f"(register_buffer), so that its value is kept from step to step"
        )
    first = text.strip().splitlines()[0] if text.strip() else ""
    return CaptureError(f"{where}: capturing the model failed: {type(error).__name__}: {first}")


def user_line(trace: TracebackType | None, default: str = "in the model") -> str:
    """``file:line (code)`` of the innermost frame of the user's code; if *trace* has none, of the
    innermost one of an installed library other than torch; else *default*.
    """
    frames = [f for f in traceback.extract_tb(trace) if not is_inside(f.filename)]
    own = [f for f in frames if is_user_file(f.filename)]
    frames = own or [f for f in frames if is_library_file(f.filename)]
    if not frames:
        return default
    frame = frames[-1]
    return f"{frame.filename}:{frame.lineno} ({(frame.line or '').strip()})"


def line_of_call() -> str:
    """``file:line (code)`` of the innermost frame of the model's code that is running: the user's,
    else a library's; empty if there is none.
    """
    found = model_frame(sys._getframe(1))  # noqa: SLF001 (the documented way to a caller)
    return "" if found is None else described_line(*found)


def model_frame(frame: FrameType | None) -> tuple[str, int] | None:
    """File and line of the innermost frame from *frame* outwards that is of the model's code: the
    user's, else a library's. What called piper is not looked at.
    """
    library: tuple[str, int] | None = None
    while frame is not None and not frame.f_code.co_filename.startswith(_API):
        name = frame.f_code.co_filename
        if is_user_file(name):
            return name, frame.f_lineno
        if library is None and is_library_file(name):
            library = name, frame.f_lineno
        frame = frame.f_back
    return library


def described_line(name: str, number: int) -> str:
    """``file:line (code)``."""
    return f"{name}:{number} ({linecache.getline(name, number).strip()})"


_PIPER = str(Path(__file__).parents[1])
_MODELS = str(Path(_PIPER, "models"))
_API = str(Path(_PIPER, "api"))


def is_inside(filename: str) -> bool:
    """Whether a file is torch's, or piper's and no example model."""
    if filename.startswith(_MODELS):
        return False
    if filename.startswith(_TYPED):
        return False
    return filename.startswith((torch.__path__[0], _PIPER, "<"))


_TYPED = ("<stdin>", "<string>", "<ipython-input")
"""Code that was typed in; other names in angle brackets are of generated code."""


def is_user_file(filename: str) -> bool:
    """Whether code of that file is the user's own: neither torch's, piper's nor of an installed
    library.
    """
    return not (is_inside(filename) or _is_installed(filename) or filename.startswith(_STANDARD))


def is_library_file(filename: str) -> bool:
    """Whether code of that file is of an installed library other than torch."""
    return _is_installed(filename) and not is_inside(filename)


_STANDARD = sysconfig.get_paths()["stdlib"]


def _is_installed(filename: str) -> bool:
    return "/site-packages/" in filename or "/dist-packages/" in filename

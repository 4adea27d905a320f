"""Where users' code meets piper's: what is raised here shows the user's own frames and the message.

A mistake of the user is a :class:`~piper.errors.PiperError`, or an exception that the user's own
code raised while piper called it (a model, a loss, a data function). Of its traceback, and of those
of its causes, the frames of piper, torch, Ray and the standard library are left out; a cause that
has no other frame, and says nothing that the error does not say, is not shown. Any other exception
is a bug of piper and keeps all. :func:`piper.errors.show_internals` says to keep all always.

A class or function is public by ``@public``; everything that :mod:`piper` exports is.
"""

import functools
import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import FrameType, FunctionType, TracebackType
from typing import TypeVar, cast

from piper.errors import (
    ArgumentError,
    Interrupted,
    PiperError,
    PiperWarning,
    internals_shown,
    nearest,
)

_PUBLIC_DUNDERS = {"__init__", "__call__", "__enter__", "__exit__"}

_MACHINERY = ("torch", "ray", "msgspec")
"""Libraries between the user's call and the user's code, besides piper and the standard one."""


def _folder(file: str) -> str:
    return str(Path(file).parent) + os.sep


_PIPER = _folder(__file__)
_MODELS = _folder(_PIPER + "models/any.py")  # models as users write them
_PACKAGES = ("site-packages", "dist-packages")  # may lie in the standard library's folder
_STANDARD = _folder(os.__file__)

T = TypeVar("T", bound=Callable[..., object])


def public(thing: T) -> T:
    """Decorator: what the function, or the methods of the class, raise for a mistake of the user is
    shown without piper's own frames.
    """
    if isinstance(thing, type):
        for name, member in list(vars(thing).items()):
            if name in _PUBLIC_DUNDERS or not name.startswith("_"):
                _make_public(thing, name, member)
        return thing
    return cast("T", _wrapped(thing))


def _make_public(cls: type, name: str, member: object) -> None:
    if isinstance(member, FunctionType):
        setattr(cls, name, _wrapped(member))
    elif isinstance(member, (classmethod, staticmethod)):
        setattr(cls, name, type(member)(_wrapped(member.__func__)))
    elif isinstance(member, property) and member.fget is not None:
        setattr(cls, name, member.getter(_wrapped(member.fget)))


def _wrapped(function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        __tracebackhide__ = True  # IPython and pytest heed it
        outside = sys.exception()  # what the caller is handling is the caller's
        try:
            return _called(function, args, kwargs)
        except (Exception, Interrupted) as error:
            if is_users(error) and not internals_shown():
                error.__traceback__ = trimmed(error, outside)
            raise  # which adds no frame of its own

    return call


def warn(message: str) -> None:
    """Warn the user of something legal, at the line of theirs that called piper."""
    warnings.warn(message, PiperWarning, stacklevel=1 + _users_frame()[0])


def users_line() -> str:
    """``file:line`` of the user's code that is calling piper."""
    frame = _users_frame()[1]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _users_frame() -> tuple[int, FrameType]:
    """The innermost frame of the user's, and how many frames above the caller it is."""
    level, frame = 0, sys._getframe(1)  # noqa: SLF001 (what `warnings` does)
    while frame.f_back is not None and _Code.of(frame) is not _Code.USERS:
        level, frame = level + 1, frame.f_back
    return level, frame


def _called(
    function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """What the function returns. Raises :class:`ArgumentError` for arguments that it does not
    take.
    """
    __tracebackhide__ = True
    try:
        return function(*args, **kwargs)
    except TypeError as error:
        here = error.__traceback__
        if here is None or here.tb_next is not None:  # raised inside
            raise
        names = [name for name in inspect.signature(function).parameters if name != "self"]
        unknown = next((nearest(name, names) for name in kwargs if name not in names), "")
        raise ArgumentError(f"{error}{unknown}; it takes {', '.join(names)}") from None


def is_users(error: BaseException) -> bool:
    """Whether *error* is for the user to mend: raised by piper on purpose, or by the user's code."""
    if isinstance(error, (PiperError, Interrupted)):
        return True
    codes = [_Code.of(entry.tb_frame) for entry in _entries(error.__traceback__)]
    codes = [code for code in codes if code is not _Code.BETWEEN]
    return bool(codes) and codes[-1] is _Code.USERS


def shown(error: BaseException) -> str:
    """*error* and its traceback as text, as :func:`public` would leave it."""
    if is_users(error) and not internals_shown():
        error.__traceback__ = trimmed(error)
    return "".join(traceback.format_exception(error)).rstrip()


def trimmed(error: BaseException, outside: BaseException | None = None) -> TracebackType | None:
    """What is left of *error*'s traceback; what it was raised from (up to *outside*, which is not
    touched) is cut down in place. What is not shown any more is still its ``__context__``.
    """
    seen = {id(error), id(outside)}
    current = error
    while (link := _shown_origin(current)) is not None and id(link) not in seen:
        seen.add(id(link))
        explicit = current.__cause__ is link
        link.__traceback__ = _of_the_user(link)
        if link.__traceback__ is None and (not explicit or str(link) in str(current)):
            # Setting the cause, whatever it is, keeps the context from being shown.
            current.__context__, current.__cause__ = link, _shown_origin(link)
            if current.__cause__ is not None and id(current.__cause__) in seen:
                current.__cause__ = None
        else:
            current = link
    return _of_the_user(error)


def _shown_origin(error: BaseException) -> BaseException | None:
    """What a traceback of *error* shows before it."""
    if error.__cause__ is not None or error.__suppress_context__:
        return error.__cause__
    return error.__context__


def _of_the_user(error: BaseException) -> TracebackType | None:
    """The frames of *error*'s traceback that are the user's."""
    trace, raised_by_piper = error.__traceback__, isinstance(error, PiperError)
    kept: TracebackType | None = None
    entries = list(_entries(trace))
    while raised_by_piper and entries and _is_model(entries[-1].tb_frame):
        entries.pop()  # a model of piper.models that refuses what it was given
    for entry in reversed(entries):
        if _Code.of(entry.tb_frame) is _Code.USERS:
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


class _Code(Enum):
    """Whose code a frame runs."""

    USERS = "the user's, models of piper.models among it"
    PIPERS = "piper's"
    BETWEEN = "of what both stand on"

    @staticmethod
    def of(frame: FrameType) -> "_Code":
        file = frame.f_code.co_filename
        if file.startswith(
            "<"
        ):  # made while running: by a dataclass, by torch, by the user's shell
            return _of_generated(file, str(frame.f_globals.get("__name__", "")))
        if file.startswith(_PIPER):
            return _Code.USERS if _is_model(frame) else _Code.PIPERS
        standard = file.startswith(_STANDARD) and not any(part in file for part in _PACKAGES)
        return _Code.BETWEEN if standard or file.startswith(_machinery()) else _Code.USERS


def _is_model(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_MODELS)


def _of_generated(file: str, module: str) -> _Code:
    if file.startswith(("<frozen ", "<eval_with_key>")):
        return _Code.BETWEEN
    package = module.partition(".")[0]
    if file.startswith("<piper ") or package == "piper":
        return _Code.PIPERS
    between = package in _MACHINERY or package in sys.stdlib_module_names
    return _Code.BETWEEN if between else _Code.USERS


def _machinery() -> tuple[str, ...]:
    """The folders of those libraries of that kind that are loaded."""
    loaded = (sys.modules.get(name) for name in _MACHINERY)
    files = (getattr(module, "__file__", None) for module in loaded)
    return tuple(_folder(file) for file in files if file)

"""Every error that piper raises for a user's mistake or a failed run.

One class per kind of error. Each message says what was expected, what was found, where, and what to
do about it. A Python ``AssertionError`` escaping from piper is a bug of piper.

The traceback of a mistake shows the user's own frames; :func:`show_internals` shows piper's too.
"""

import difflib
from collections.abc import Iterable, Sequence


class PiperError(Exception):
    """Base of all errors raised on purpose."""


class PiperWarning(UserWarning):
    """Something legal that is probably not what was meant."""


class CaptureError(PiperError):
    """The model, its loss or the example batch cannot be captured as one graph."""


class AnnotationError(PiperError):
    """A region annotation is used wrongly."""


class FilterError(PiperError):
    """A directive's filter names a region, tag or microbatch that exists nowhere."""


class DirectiveError(PiperError):
    """A directive cannot be applied to this training DAG."""


class PlacementError(DirectiveError):
    """A node is unplaced, placed twice, or placed on devices that do not fit."""


class OrderError(DirectiveError):
    """An order contradicts the data flow or itself."""


class SplitError(DirectiveError):
    """The batch cannot be split as asked."""


class ScheduleError(PiperError):
    """A schedule does not exist for these numbers of stages, ranks or microbatches."""


class StrategyFileError(PiperError):
    """A strategy file is malformed."""


class PlanError(PiperError):
    """A plan file is malformed or from another version."""


class MemoryBudgetError(PiperError):
    """A device needs more memory for a step than it may use."""


class PictureError(PiperError):
    """A timeline cannot be drawn, or its picture not written."""


class VerificationError(PiperError):
    """A plan violates an invariant and must not be run."""


class ConfigError(PiperError):
    """A configuration or data file is missing, unreadable or malformed, or an argument is wrong."""


class ArgumentError(ConfigError, TypeError):
    """A public function or class is called with arguments that it does not take."""


class StateError(PiperError):
    """Model or optimizer state does not fit the model."""


class CheckpointError(StateError):
    """A checkpoint cannot be written, is damaged, or is from another version or training."""


class BatchError(PiperError):
    """A batch does not fit the captured model or the strategy."""


class RunError(PiperError):
    """A step failed on a device."""


class CommunicationError(RunError):
    """A message was lost, malformed, or its peer is gone: usually a consequence of another
    failure.
    """


class AbortedError(CommunicationError):
    """This device stopped because another one failed first."""


class CompileError(RunError):
    """A chunk cannot be compiled."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C ended a call of a trainer between two steps: what was done is kept, and the trainer can
    be used as before. ``results`` has what the call's steps computed.
    """

    def __init__(self, message: str, results: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.results = tuple(results)


class CheckError(PiperError):
    """A strategy does not compute what single-process training computes."""


_shown = {"internals": False}


def show_internals(show: bool = True) -> None:
    """Whether the traceback of a mistake shows piper's own frames, too. By default it shows the
    user's, and the message. A bug of piper always shows all.
    """
    _shown["internals"] = show


def internals_shown() -> bool:
    """What :func:`show_internals` said last."""
    return _shown["internals"]


def expect(value: object, kind: type, what: str, remedy: str) -> None:
    """Raise :class:`ConfigError` unless *value*, which a user gave as *what*, is a *kind*; *remedy*
    says where one comes from.
    """
    if not isinstance(value, kind):
        found = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise ConfigError(f"{what}: expected a {kind.__name__}, found {found}; {remedy}")


def nearest(word: str, words: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for the closest of *words*, whatever its case, or an empty
    string.
    """
    close = closest(word, words)
    return "" if close is None else f" (did you mean {close!r}?)"


def closest(word: str, words: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The closest of *words*, whatever its case, if one is at least as close as *cutoff* says."""
    known: dict[str, str] = {}  # by what is compared: case says little
    for each in words:
        known.setdefault(each.lower(), each)
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=cutoff)
    return known[close[0]] if close else None

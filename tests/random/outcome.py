"""What became of a case."""

import hashlib
import linecache
import re
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.random.cases import Case, size, smaller
from tests.random.source import definitions
from tests.random.trial import Diverged, Wrong, train

from piper.api.programs import Programs
from piper.errors import BatchError, CaptureError, PiperError, RunError, StateError
from piper.runtime.batch import signature

EQUAL, DIVERGED, REFUSED = "equal", "diverged", "refused"
WRONG, CRASHED, HUNG = "wrong", "crashed", "hung"
FAILURES = (WRONG, CRASHED, HUNG)
SECONDS = 120
"""How long a case may take before it counts as hung."""

HERE = Path(__file__).parent
_IS_A_BUG = ("bug of piper", "does not compute what", "different kernels", "verifier")


@dataclass(frozen=True, slots=True)
class Outcome:
    """``kind``; ``reason``: the class and text of what was raised; ``detail``: the end of its
    traceback.
    """

    kind: str
    reason: str = ""
    detail: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.kind in FAILURES

    @property
    def group(self) -> str:
        """The reason without numbers and names, to count by."""
        return re.sub(r"'[^']*'|\[[^\]]*\]|\d+", "…", self.reason)[:110]


def generator() -> str:
    """What the meaning of a seed depends on, as a short digest."""
    names = ("cases.py", "layouts.py", "source.py", "reference.py", "trial.py")
    text = b"".join((HERE / name).read_bytes() for name in names)
    return hashlib.blake2b(text, digest_size=5).hexdigest()


class _TimeOut(BaseException):
    pass


@contextmanager
def _limited(seconds: int):
    def stop(*_: object) -> None:
        raise _TimeOut

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def shared_captures():
    """Within it, models with the same text are captured once: what a strategy makes of a capture
    changes nothing about it.
    """
    original, made = Programs._capture, {}

    def capture(self, batch, size, *, grad):
        model = self.model
        key = (model.text, size, grad, signature(batch), repr(self.precision), model.training)
        if key not in made:
            if len(made) > 30:
                made.clear()
            made[key] = original(self, batch, size, grad=grad)
        return made[key]

    Programs._capture = capture
    try:
        yield
    finally:
        Programs._capture = original


def namespace(case: Case) -> dict[str, object]:
    """The definitions of *case*, as if they were a module."""
    text = definitions(case)
    name = f"random_case_{case.seed}"
    file = f"<{name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    found: dict[str, object] = {"__name__": name}
    exec("import torch\nfrom torch import nn\nfrom torch.nn import functional\nimport piper", found)
    exec(compile(text, file, "exec"), found)
    found["Model"].text = text[: text.index("ROWS =")]
    return found


def outcome(case: Case, seconds: int = SECONDS) -> Outcome:
    """Run *case*."""
    start = time.monotonic()
    try:
        with _limited(seconds):
            train(namespace(case))
        found = Outcome(EQUAL)
    except Diverged as error:
        found = Outcome(DIVERGED, str(error))
    except Wrong as error:
        found = Outcome(WRONG, str(error))
    except _TimeOut:
        found = Outcome(HUNG, f"more than {seconds} s", traceback.format_exc()[-1500:])
    except PiperError as error:
        found = _raised(error)
    except Exception as error:  # noqa: BLE001 (whatever it is, it is a finding)
        found = Outcome(CRASHED, _reason(error), traceback.format_exc()[-3000:])
    return replace(found, seconds=round(time.monotonic() - start, 2))


def _raised(error: PiperError) -> Outcome:
    text = str(error)
    expected = not isinstance(error, RunError) and not any(word in text for word in _IS_A_BUG)
    if type(error).__name__ == "VerificationError":
        expected = False
    if isinstance(error, CaptureError) and "not compute" in text:
        expected = False
    assert isinstance(error, BatchError | StateError | PiperError)
    kind = REFUSED if expected else CRASHED
    return Outcome(kind, _reason(error), "" if expected else traceback.format_exc()[-3000:])


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:600]}"


def shrink(case: Case, found: Outcome, run: Callable[[Case], Outcome], tries: int = 80) -> Case:
    """A smaller case that fails alike: by the same kind, and the same class of error."""
    word = found.reason.split(":")[0] if found.kind == CRASHED else ""

    def alike(other: Outcome) -> bool:
        return other.kind == found.kind and other.reason.startswith(word)

    going = True
    while going and tries > 0:
        going = False
        for option in smaller(case):
            if size(option) > size(case) + 20 or tries <= 0:
                continue
            tries -= 1
            try:
                works = alike(run(option))
            except Exception:  # noqa: BLE001 (a smaller case that makes no sense)
                works = False
            if works:
                case, going = option, True
                break
    return case

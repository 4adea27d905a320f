"""Why a call to a worker failed, as a report that crosses process boundaries."""

from collections.abc import Sequence
from dataclasses import dataclass

from piper.boundary import shown
from piper.errors import (
    AbortedError,
    CommunicationError,
    PiperError,
    RunError,
)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a worker's call failed: a report that crosses process boundaries. ``kind`` is the class
    to raise.
    """

    device: int
    kind: type[PiperError]
    message: str

    @property
    def rank(self) -> int:
        """Order of causes: real errors, then lost peers, then workers that were told to stop."""
        if issubclass(self.kind, AbortedError):
            return 2
        return 1 if issubclass(self.kind, CommunicationError) else 0

    def error(self) -> PiperError:
        """The exception to raise on the driver."""
        return self.kind(self.message)


def failure_of(device: int, error: BaseException) -> Failure:
    """The report of *error*, raised on *device*. Piper's own errors say where they happened."""
    if isinstance(error, PiperError):
        return Failure(device, type(error), str(error))
    return Failure(
        device, RunError, f"device {device}: {type(error).__name__}: {error}\n{shown(error)}"
    )


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The one that explains the others."""
    return min(failures, key=lambda failure: (failure.rank, failure.device))

"""Whoever follows a run: is told how it goes on."""

from pathlib import Path
from typing import Protocol

from piper.training.metrics import (
    HeldOutRecord,
)


class Watcher(Protocol):
    """Is told how a run goes on."""

    def begin(self, what: str, steps: int | None = None) -> None:
        """A new part of the run begins; with *steps* it is so many steps long."""

    def advance(self, steps: int, loss: float, tokens_per_second: float) -> None:
        """So many more steps are done; the last had *loss*, in nats per token."""

    def evaluated(self, record: HeldOutRecord) -> None:
        """The held-out loss was taken."""

    def saved(self, path: Path) -> None:
        """A checkpoint was written."""


class Silent:
    """A :class:`Watcher` that says nothing."""

    def begin(self, what: str, steps: int | None = None) -> None:
        """Nothing."""

    def advance(self, steps: int, loss: float, tokens_per_second: float) -> None:
        """Nothing."""

    def evaluated(self, record: HeldOutRecord) -> None:
        """Nothing."""

    def saved(self, path: Path) -> None:
        """Nothing."""

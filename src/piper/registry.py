"""A registry maps the name of a kind (a directive, a schedule, a device) to the one that implements
it.
"""

from collections.abc import Iterator, Mapping
from typing import TypeVar

from piper.errors import PiperError, nearest

T = TypeVar("T")


def snake_case(name: str) -> str:
    """``AllReduce`` → ``all_reduce``: the registered name of a class."""
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


class Registry(Mapping[str, T]):
    """Name → implementation, filled at import time by the files of one folder.

    Looking up an unknown name raises ``error`` with the known names and the nearest one.
    """

    def __init__(self, kind: str, error: type[PiperError]) -> None:
        self._kind = kind
        self._error = error
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> T:
        """Register *entry*; a second entry under one name is a bug of the caller."""
        assert name not in self._entries, f"{self._kind} {name!r} is registered twice"
        self._entries[name] = entry
        return entry

    def __getitem__(self, name: str) -> T:
        known = ", ".join(sorted(self._entries))
        if not isinstance(name, str):
            raise self._error(
                f"a {self._kind} is named by a text, found {type(name).__name__}: {name!r:.80}; known: {known}"
            )
        try:
            return self._entries[name]
        except KeyError:
            raise self._error(
                f"unknown {self._kind} {name!r}{nearest(name, self._entries)}; known: {known}"
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

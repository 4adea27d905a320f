"""How large things are printed: what they are and how much there is, in a line."""

from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


class _Text:
    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def brief(summary: Callable[[T], str]) -> Callable[[type[T]], type[T]]:
    """Class decorator: ``repr`` is the class's name and the *summary*, in parentheses; wherever it
    is shown (prompts, debuggers, messages of exceptions, rich). It reads sizes and visits nothing.
    """

    def shorten(cls: type[T]) -> type[T]:
        def text(self: T) -> str:
            try:
                return summary(self)
            except AttributeError:  # a debugger looks at it while it is being made
                return "not made yet"

        def short(self: T) -> str:
            return f"{type(self).__name__}({text(self)})"

        def rich(self: T) -> Iterator[_Text]:
            yield _Text(text(self))

        # msgspec and dataclasses made others, of all fields.
        type.__setattr__(cls, "__repr__", short)
        type.__setattr__(cls, "__rich_repr__", rich)
        return cls

    return shorten


def count(number: int, what: str) -> str:
    """``"1 step"``, ``"2 steps"``; *what* is the singular of a regular noun."""
    return f"{number} {what}{'' if number == 1 else 's'}"

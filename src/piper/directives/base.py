"""What a directive is: a frozen description of one rewrite of the training DAG."""

from typing import TypeVar

import msgspec

from piper.errors import StrategyFileError
from piper.ir.dag import Dag
from piper.ir.edit import Edit
from piper.ir.select import Selector
from piper.registry import Registry


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


class Directive(
    msgspec.Struct,
    frozen=True,
    tag_field="op",
    tag=_snake,
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """One rewrite. Subclasses live in one file each; their fields are their JSON form.

    Directives of a strategy are applied in program order. ``number`` is a directive's place in it, counted from 0.
    """

    def apply(self, dag: Dag, number: int, selector: Selector) -> Edit:
        """The rewritten DAG; only core nodes change, derived nodes are remade by the caller. *selector* is over *dag*'s nodes."""
        raise NotImplementedError

    def describe(self) -> str:
        """The directive as a user would write it, shortened to one line."""
        text = repr(self)
        return text if len(text) <= 160 else f"{text[:157]}..."


DIRECTIVES: Registry[type[Directive]] = Registry("directive", StrategyFileError)

D = TypeVar("D", bound=type[Directive])


def directive(cls: D) -> D:
    """Class decorator: register a directive under its ``op`` name."""
    DIRECTIVES.add(_snake(cls.__name__), cls)
    return cls

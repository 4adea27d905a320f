"""What a directive is: a frozen description of one rewrite of the training DAG."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from piper.errors import DirectiveError, StrategyFileError
from piper.ir.dag import Chunk, Dag
from piper.ir.edit import Edit
from piper.ir.select import Filter, Selector
from piper.registry import Registry, snake_case


class Directive(
    msgspec.Struct,
    frozen=True,
    tag_field="op",
    tag=snake_case,
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """One rewrite. Subclasses live in one file each; their fields are their JSON form.

    Directives of a strategy are applied in program order. ``number`` is a directive's place in it,
    counted from 0.
    """

    def apply(self, dag: Dag, number: int, selector: Selector) -> Edit:
        """The rewritten DAG; only core nodes change, derived nodes are remade by the caller.
        *selector* finds *dag*'s nodes.
        """
        raise NotImplementedError

    @classmethod
    def check_together(cls, dag: Dag, given: "Sequence[tuple[int, Directive]]") -> None:
        """Raise if *given*, all directives of this kind in a strategy with their numbers, cannot be
        meant so together. *dag* is what the whole strategy made.
        """

    def describe(self) -> str:
        """The directive as a user would write it, shortened to one line."""
        first, *options = msgspec.structs.fields(self)
        arguments = [repr(getattr(self, first.name))]
        for field in options:
            value = getattr(self, field.name)
            if field.required or value != _default(field):
                arguments.append(f"{field.name}={value!r}")
        text = f"{type(self).__name__}({', '.join(arguments)})"
        return text if len(text) <= 160 else f"{text[:157]}..."


def _default(field: msgspec.structs.FieldInfo) -> object:
    make = field.default_factory
    return field.default if make is msgspec.NODEFAULT else make()


DIRECTIVES: Registry[type[Directive]] = Registry("directive", StrategyFileError)

D = TypeVar("D", bound=type[Directive])


def directive(cls: D) -> D:
    """Class decorator: register a directive under its ``op`` name."""
    DIRECTIVES.add(snake_case(cls.__name__), cls)
    return cls


def matching_chunks(dag: Dag, selector: Selector, filter_: Filter) -> list[Chunk]:
    """The core chunks that *filter_* matches, for a directive that changes them.

    Raises :class:`DirectiveError` for a filter that names communication or updates: these follow
    from the chunks.
    """
    chunks: list[Chunk] = []
    for node in selector.find(filter_):
        chunk = dag.nodes[node]
        if not isinstance(chunk, Chunk) or chunk.derived:
            raise DirectiveError(
                f"filter {dict(filter_)} matches {chunk.label!r}; communication, sums and updates follow the chunks "
                "that they serve: match those"
            )
        chunks.append(chunk)
    return chunks

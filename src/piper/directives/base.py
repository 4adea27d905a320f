"""What a directive is: a frozen description of one rewrite of the training DAG."""

from collections.abc import Sequence
from functools import cache
from typing import Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec.structs import force_setattr

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
    counted from 0. Making one raises :class:`DirectiveError` for a field of another type; tuples
    and ranges become lists.
    """

    def __post_init__(self) -> None:
        for name, type_ in _fields(type(self)):
            given = getattr(self, name)
            try:
                plain = msgspec.to_builtins(given, enc_hook=_listed)
                force_setattr(self, name, msgspec.convert(plain, type_))
            except (msgspec.ValidationError, TypeError) as error:
                where, expected = _complaint(str(error))
                raise DirectiveError(
                    f"{type(self).__name__}: {name}{where}: {expected}, found {name}={given!r}; write for instance "
                    f"{name}={_example(name, type_)}"
                ) from error

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


_EXAMPLES = {
    "filter": '{"PP": 0}',
    "filters": '[[{"PP": 0, "MB": 0, "PASS": "F"}], [{"PP": 0, "MB": 0, "PASS": "B"}]]',
    "devices": "[0, 1]",
    "dim_name": '"MB"',
    "num_microbatches": "4",
    "bucket_size": "25.0",
    "capacity_factor": "1.25",
    "replicated": '["router.*"]',
    "save": '["matmul"]',
}
"""How a field is written."""

_WORDS = {
    "object": "a mapping of tags",
    "array": "a list",
    "int": "an integer",
    "float": "a number",
    "str": "a text",
    "bool": "True or False",
    "null": "None",
}
"""Python's words for msgspec's."""


@cache
def _fields(cls: type[Directive]) -> tuple[tuple[str, object], ...]:
    return tuple((field.name, field.type) for field in msgspec.structs.fields(cls))


def _listed(value: object) -> object:
    """What may stand for a list, besides what msgspec knows."""
    if isinstance(value, range):
        return list(value)
    raise TypeError(f"Expected plain data, got `{type(value).__name__}`")


def _complaint(message: str) -> tuple[str, str]:
    """Where in a field something is wrong, and what was expected there, of msgspec's *message*."""
    problem, _, where = message.partition(" - at `$")
    place = where.rstrip("`").replace("[...]", "[…]")
    if not problem.startswith("Expected"):
        return place, "expected another value"
    expected = problem.removeprefix("Expected ").partition(", got")[0].strip("`")
    return place, "expected " + " or ".join(_WORDS.get(w, w) for w in expected.split(" | "))


def _example(name: str, type_: object) -> str:
    """Values that field *name* may have."""
    values = [repr(v) for kind in (type_, *get_args(type_)) for v in _literals(kind)]
    if name in _EXAMPLES:
        values.insert(0, _EXAMPLES[name])
    return " or ".join(values) or ("True" if type_ is bool else f'"my_{name}"')


def _literals(kind: object) -> tuple[object, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


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

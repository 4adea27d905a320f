"""What a directive is: a frozen description of one rewrite of the training DAG."""

import operator
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Literal, SupportsIndex, TypeVar, get_args, get_origin

import msgspec
from msgspec.structs import force_setattr

from piper.boundary import public
from piper.errors import ArgumentError, DirectiveError, StrategyFileError, nearest
from piper.ir.dag import Chunk, Dag
from piper.ir.edit import Edit
from piper.ir.select import Filter, FilterValue, Selector
from piper.registry import Registry, snake_case


class _Kind(msgspec.StructMeta):
    """The class of the classes of directives: says what is wrong with a call of one."""

    if not TYPE_CHECKING:  # which takes the arguments from the fields

        @public
        def __call__(cls, *given: object, **named: object) -> object:  # noqa: N805 (a class)
            names = [field.name for field in msgspec.structs.fields(cls)]
            for name, value in zip(names, given, strict=False):
                _refuse_misplaced(cls, name, value, [n for n in names if n not in named])
            try:
                return super().__call__(*given, **named)
            except TypeError as error:
                unknown = next((nearest(name, names) for name in named if name not in names), "")
                complaint = str(error)[:1].lower() + str(error)[1:]
                raise ArgumentError(
                    f"{cls.__name__}: {complaint}{unknown}; it takes {', '.join(names)}"
                ) from None


class Directive(
    msgspec.Struct,
    metaclass=_Kind,
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
                force_setattr(self, name, _converted(given, type_))
            except (msgspec.ValidationError, TypeError) as error:
                where, expected = _complaint(str(error))
                raise DirectiveError(
                    f"{type(self).__name__}: {name}{where}: {expected}, found {name}={given!r}; write for instance "
                    f"{name}={_example(name, type_)}{_REMARKS.get(name, '')}"
                ) from None

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

    def tags_made(self) -> tuple[str, ...]:
        """Tags that the directive gives nodes, for the filters of later ones."""
        return ()

    def tags_named(self) -> set[str]:
        """Tags that its filters name."""
        groups: list[list[dict[str, FilterValue]]] = getattr(self, "filters", [])
        own: dict[str, FilterValue] = getattr(self, "filter", {})
        return {name for group in [[own], *groups] for each in group for name in each}

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

_REMARKS = {
    "devices": " (devices are numbers, counted from 0 over all machines; which processor each is, is the backend's matter)"
}
"""What else is to be known of a field."""

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


def _converted(given: object, type_: object) -> object:
    """*given* as a value of *type_*. Raises what msgspec does for anything else."""
    if isinstance(given, (set, frozenset)) and get_origin(type_) is not dict:
        raise TypeError("Expected a list, whose order counts (a set has none)")
    return msgspec.convert(msgspec.to_builtins(given, enc_hook=_listed), type_)


def _refuse_misplaced(
    cls: type[Directive], name: str, given: object, others: Sequence[str]
) -> None:
    """Raise :class:`ArgumentError` for a positional argument that is no *name*, but one of the
    *others*.
    """
    types = dict(_fields(cls))
    # Many fields are texts or may be None: these say nothing.
    if given is None or isinstance(given, str) or _fits(given, types[name]):
        return
    if meant := [other for other in others if other != name and _fits(given, types[other])]:
        raise ArgumentError(
            f"{cls.__name__}: {given!r} is given as {name}, and looks like {meant[0]}; write "
            f"{cls.__name__}({name}=…, {meant[0]}={given!r})"
        )


def _fits(given: object, type_: object) -> bool:
    try:
        _converted(given, type_)
    except (msgspec.ValidationError, TypeError):
        return False
    return True


def _listed(value: object) -> object:
    """What may stand for a list or an integer, besides what msgspec knows."""
    if isinstance(value, range):
        return list(value)
    if isinstance(value, SupportsIndex):
        with suppress(TypeError):  # tensors have the method, whatever they hold
            return operator.index(value)
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

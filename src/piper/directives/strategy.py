"""Strategies: lists of directives, applied in program order, and their JSON form."""

import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

import msgspec

from piper.boundary import public
from piper.directives.base import DIRECTIVES, Directive
from piper.directives.published import in_our_form
from piper.errors import DirectiveError, FilterError, PiperError, StrategyFileError, expect, nearest
from piper.ir.check import check_dag
from piper.ir.dag import Dag
from piper.ir.derive import derive
from piper.ir.select import Selector, known_tags
from piper.pausing import collector_paused
from piper.reading import decode_json, read_file

Strategy: TypeAlias = Sequence[Directive]


@public
def apply(dag: Dag, strategy: Strategy, *, tags_of: Dag | None = None) -> Dag:
    """*dag* rewritten by each directive in program order; invariants are checked after each.

    Neighbouring directives of one kind (a whole placement, a whole schedule) count as one. An error
    names the directive that caused it and is of the class that its ``apply`` documents;
    :class:`DirectiveError` is raised for what is no list of directives. Filters may also name tags
    of *tags_of*, a DAG of the same model to which the strategy was applied (in training, which may
    have regions that evaluation has not): here they match nothing.
    """
    expect(dag, Dag, "apply", "piper.capture makes one")
    strategy = as_strategy(strategy)
    start = len(dag.directives)
    dag = replace(dag, directives=(*dag.directives, *(d.describe() for d in strategy)))
    elsewhere = {} if tags_of is None else known_tags(tags_of)
    _refuse_early(dag, strategy, start, elsewhere)
    with collector_paused():
        dag = derive(dag)
        for _, run in groupby(enumerate(strategy, start), key=lambda item: type(item[1])):
            dag = _apply_run(dag, list(run), elsewhere)
        kinds: dict[type[Directive], list[tuple[int, Directive]]] = {}
        for number, directive in enumerate(strategy, start):
            kinds.setdefault(type(directive), []).append((number, directive))
        for kind, given in kinds.items():
            kind.check_together(dag, given)
    return dag


def as_strategy(given: Iterable[object]) -> tuple[Directive, ...]:
    """*given* as a strategy. Raises :class:`DirectiveError` for what is no list of directives."""
    if isinstance(given, (Directive, str, Mapping)) or not isinstance(given, Iterable):
        hint = _remedy(given)
        if isinstance(given, (str, Path)):
            hint = "; piper.load_strategy reads a file, piper.strategies.pipeline makes one"
        raise DirectiveError(
            f"a strategy is a list of directives, [piper.Place(...), ...], found {_kind(given)}{hint}"
        )
    strategy: list[Directive] = []
    for number, entry in enumerate(given):
        if isinstance(entry, Directive):
            strategy.append(entry)
            continue
        raise DirectiveError(
            f"entry {number} of the strategy: expected a directive such as piper.Place(...), found {_kind(entry)}{_remedy(entry)}"
        )
    return tuple(strategy)


def _kind(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"{type(value).__name__}: {reprlib.repr(value)}"


def _remedy(entry: object) -> str:
    """What to do about an *entry* of a strategy that is no directive."""
    if isinstance(entry, (list, tuple)):
        return "; unpack it with *"
    if isinstance(entry, type) and issubclass(entry, Directive):
        return f"; make one: {entry.__name__}(...)"
    if callable(entry):
        name = getattr(entry, "__name__", "it")
        return f"; call it: {name}(...), and give the directives that it returns"
    return ""


def _refuse_early(
    dag: Dag, strategy: Strategy, start: int, elsewhere: Mapping[str, Collection[int]]
) -> None:
    """Raise :class:`FilterError` for a directive that names a tag which only a later one makes."""
    known = {*known_tags(dag), *elsewhere}
    for number, directive in enumerate(strategy):
        for name in sorted(directive.tags_named() - known):
            later = (d for d in strategy[number:] if name in d.tags_made())
            if (maker := next(later, None)) is not None:
                place = start + strategy.index(maker)
                raise FilterError(
                    f"directive {start + number}, {directive.describe()}: names tag {name!r}, which no node has yet: directive {place}, "
                    f"{maker.describe()}, makes it; put the {type(maker).__name__} before it"
                )
        known.update(directive.tags_made())


def _apply_run(
    dag: Dag, run: Sequence[tuple[int, Directive]], elsewhere: Mapping[str, Collection[int]]
) -> Dag:
    first, last = run[0][0], run[-1][0]
    where = ""
    selector = Selector(dag, elsewhere)
    try:
        for number, directive in run:
            where = f"directive {number}, {dag.directives[number]}"
            edit = directive.apply(dag, number, selector)
            if edit.remap:  # all else keeps ids and tags, which is what filters see
                selector = Selector(edit.dag, elsewhere)
            dag = edit.dag
        if last > first:
            where = f"directives {first} to {last}, the last of them {dag.directives[last]}"
        dag = derive(dag)
        check_dag(dag)
    except PiperError as error:
        raise type(error)(f"{where}: {error}") from error
    return dag


@public
def dump_strategy(strategy: Strategy, path: str | Path) -> None:
    """Write a strategy as a JSON list of objects ``{"op": "place", ...}``, one directive a line.

    Raises :class:`DirectiveError` for what is no strategy, :class:`StrategyFileError` if the file
    cannot be written.
    """
    strategy = as_strategy(strategy)
    lines = [msgspec.json.encode(directive).decode() for directive in strategy]
    try:
        Path(path).write_text("[\n" + ",\n".join(lines) + "\n]\n")
    except OSError as error:
        raise StrategyFileError(f"cannot write strategy file {path}: {error.strerror}") from error


@public
def load_strategy(path: str | Path) -> list[Directive]:
    """Read a strategy file: ours, or one of the system that the paper published
    (:mod:`piper.directives.published`).

    Raises :class:`StrategyFileError` with the path inside the file for a malformed file, an unknown
    directive, field or pass. Whether a tag exists depends on the model: :func:`apply` says.
    """
    text = read_file(Path(path), f"cannot read strategy file {path}", StrategyFileError)
    form = (
        f"strategy file {path} must be a JSON list of objects like "
        '{"op": "place", "filter": {"PP": 0}, "devices": [0]}'
    )
    items = decode_json(text, list[dict[str, object]], form, StrategyFileError)
    return [_directive(item, f"{path}: $[{i}]") for i, item in enumerate(items)]


def _directive(item: dict[str, object], where: str) -> Directive:
    op = item.get("op")
    if not isinstance(op, str):
        raise StrategyFileError(
            f'{where}: every directive has a field "op" naming it; known: {", ".join(sorted(DIRECTIVES))}'
        )
    try:
        cls = DIRECTIVES[op]
    except StrategyFileError as error:
        raise StrategyFileError(f"{where}.op: {error}") from error
    item = in_our_form(item, where)
    known = [field.encode_name for field in msgspec.structs.fields(cls)]
    for name in item:
        if name != "op" and name not in known:
            raise StrategyFileError(
                f"{where}.{name}: directive {op!r} has no such field{nearest(name, known)}; fields: {', '.join(known)}"
            )
    try:
        return msgspec.convert(item, cls)
    except msgspec.ValidationError as error:
        raise StrategyFileError(f"{where}: {error}") from error

"""Sizes that are known only when the batch is split: integer expressions over named symbols.

An expression is Python syntax over symbols, integers and ``+ - * // % **``, comparisons, ``and``,
``or``, ``not``, ``min``, ``max``, ``abs``; for instance ``"6*s0"`` or ``"s0 >= 2"``.

Expressions come from files too. What is no such expression, is longer or deeper than
:mod:`piper.limits` says, or has a value beyond 64 bits on the way is refused, after work that is
linear in its length.
"""

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import TypeAlias

import msgspec

from piper.errors import CaptureError
from piper.limits import MAX_EXPRESSION, MAX_EXPRESSION_DEPTH, MAX_NUMBER

Number: TypeAlias = int | float | bool


class Expr(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="expr"):
    """An integer expression over symbols, in Python syntax."""

    text: str

    def __str__(self) -> str:
        return self.text


Dim: TypeAlias = int | Expr


def evaluate(text: str, bindings: Mapping[str, int]) -> Number:
    """The value of the expression *text* with every symbol bound by *bindings*.

    Raises :class:`CaptureError` for what is no expression, an unbound symbol, an operation that is
    not supported, a division by zero, a number that is not finite or beyond 64 bits.
    """
    try:
        return _value(_parse(text), bindings, text)
    except ZeroDivisionError:
        raise CaptureError(
            f"size expression {_short(text)} divides by zero under {dict(bindings)}"
        ) from None


def bind(dim: Dim, bindings: Mapping[str, int]) -> int:
    """The size of a dimension under *bindings*. Raises :class:`CaptureError` if it is not a whole
    number.
    """
    if not isinstance(dim, Expr):
        return dim
    size = evaluate(dim.text, bindings)
    if size != int(size):
        raise CaptureError(
            f"size expression {_short(dim.text)} is {size} under {dict(bindings)}; a size is a whole number"
        )
    return int(size)


def symbols_of(text: str) -> frozenset[str]:
    """The symbols in an expression. Raises :class:`CaptureError` for what is no expression."""
    return _symbols(_parse(text))


def _symbols(tree: ast.expr) -> frozenset[str]:
    calls = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return frozenset(
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in calls
    )


@lru_cache(maxsize=4096)
def _parse(text: str) -> ast.expr:
    if len(text) > MAX_EXPRESSION:
        raise CaptureError(
            f"size expression {_short(text)} has {len(text)} characters, expected at most {MAX_EXPRESSION}"
        )
    if (nested := _nesting(text)) > MAX_EXPRESSION_DEPTH:
        raise CaptureError(
            f"size expression {_short(text)} is nested {nested} deep, expected at most {MAX_EXPRESSION_DEPTH}"
        )
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise CaptureError(
            f"size expression {_short(text)} is not an expression: {error.msg}"
        ) from None
    except (ValueError, MemoryError, RecursionError) as error:
        raise CaptureError(
            f"size expression {_short(text)} is not an expression: {error}"
        ) from None
    for depth, node in _walk(tree):
        if depth > MAX_EXPRESSION_DEPTH:
            raise CaptureError(
                f"size expression {_short(text)} is nested more than {MAX_EXPRESSION_DEPTH} deep"
            )
        if not _is_known(node):
            raise CaptureError(f"size expression {_short(text)} uses an unsupported operation")
    return tree


def _nesting(text: str) -> int:
    """How deep parentheses and signs in front of each other go, at most: what Python's parser calls
    itself for. Powers and comparisons count as well, as these may be nested without parentheses.
    """
    depth = deepest = run = 0
    for character in text:
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        run = run + 1 if character in "-+~*" else run if character.isspace() else 0
        deepest = max(deepest, depth + run)
    return max(deepest, text.count("**"), text.count("not "))


def _walk(tree: ast.expr) -> Iterator[tuple[int, ast.AST]]:
    """The nodes below *tree* that an expression consists of, and how deep they are."""
    waiting: list[tuple[int, ast.AST]] = [(0, tree)]
    while waiting:
        depth, node = waiting.pop()
        yield depth, node
        if isinstance(node, ast.Call):
            waiting += [(depth + 1, child) for child in node.args]
        else:
            waiting += [(depth + 1, child) for child in ast.iter_child_nodes(node)]


_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Number, Number], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}
_CALLS: dict[str, Callable[..., Number]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "int": int,
    "float": float,
}
_SEVERAL = frozenset({"min", "max"})
"""Those that take two arguments or more; the others take one."""

_PARTS = (ast.Name, ast.BoolOp, ast.And, ast.Or, ast.Load, *_BINARY, *_COMPARE, *_UNARY)


def _is_known(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=bool() | int() | float()):
            return True
        case ast.BinOp(op=op):
            return type(op) in _BINARY
        case ast.UnaryOp(op=op):
            return type(op) in _UNARY
        case ast.Compare(ops=ops):
            return all(type(op) in _COMPARE for op in ops)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _CALLS:
            return len(args) > 1 if name in _SEVERAL else len(args) == 1
        case _:
            return isinstance(node, _PARTS)


def _value(tree: ast.expr, bindings: Mapping[str, int], text: str) -> Number:
    """The value of a tree of :func:`_parse`."""
    match tree:
        case ast.Constant(value=bool() | int() | float() as value):
            return _bounded(value, text)
        case ast.Name(id=name):
            if name in bindings:
                return _bounded(bindings[name], text)
            raise CaptureError(
                f"size expression {_short(text)} uses symbol {name!r}, which is not bound; "
                f"bound: {', '.join(bindings) or 'none'}"
            )
        case ast.BinOp(left=left, op=op, right=right):
            one, other = _value(left, bindings, text), _value(right, bindings, text)
            return _combined(op, one, other, text)
        case ast.UnaryOp(op=op, operand=operand):
            return _UNARY[type(op)](_value(operand, bindings, text))
        case ast.BoolOp(op=ast.And(), values=values):
            return all(_value(v, bindings, text) for v in values)
        case ast.BoolOp(values=values):
            return any(_value(v, bindings, text) for v in values)
        case ast.Compare(left=left, ops=ops, comparators=rights):
            terms = [_value(t, bindings, text) for t in (left, *rights)]
            return all(
                _COMPARE[type(o)](a, b) for o, a, b in zip(ops, terms, terms[1:], strict=False)
            )
        case ast.Call(func=ast.Name(id=name), args=args):
            return _bounded(_CALLS[name](*(_value(a, bindings, text) for a in args)), text)
        case _:
            raise CaptureError(f"size expression {_short(text)} uses an unsupported operation")


def _combined(op: ast.operator, one: Number, other: Number, text: str) -> Number:
    # The operands have 64 bits at most, so that only a power could be long.
    if isinstance(op, ast.Pow) and isinstance(other, int) and abs(other) > 64 and abs(one) > 1:
        raise CaptureError(_too_large(text))
    try:
        found = _BINARY[type(op)](one, other)
    except OverflowError:
        raise CaptureError(_too_large(text)) from None
    if isinstance(found, complex):
        raise CaptureError(f"size expression {_short(text)} has a value that is no real number")
    return _bounded(found, text)


def _bounded(value: Number, text: str) -> Number:
    if not math.isfinite(value) if isinstance(value, float) else abs(value) > MAX_NUMBER:
        raise CaptureError(_too_large(text))
    return value


def _too_large(text: str) -> str:
    return f"size expression {_short(text)} has a value on the way that is not finite or beyond 64 bits"


def _short(text: str) -> str:
    return repr(text) if len(text) <= 60 else f"{text[:60]!r}…"

"""Sizes that are known only when the batch is split: integer expressions over named symbols.

An expression is Python syntax over symbols, integers and ``+ - * // % **``, comparisons, ``and``,
``or``, ``not``, ``min``, ``max``, ``abs``; for instance ``"6*s0"`` or ``"s0 >= 2"``.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TypeAlias

import msgspec

from piper.errors import CaptureError

Number: TypeAlias = int | float | bool


class Expr(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="expr"):
    """An integer expression over symbols, in Python syntax."""

    text: str

    def __str__(self) -> str:
        return self.text


Dim: TypeAlias = int | Expr


def evaluate(text: str, bindings: Mapping[str, int]) -> Number:
    """The value of the expression *text* with every symbol bound by *bindings*.

    Raises :class:`CaptureError` for an unbound symbol, an operation that is not supported, a
    division by zero.
    """
    try:
        return _value(_parse(text), bindings, text)
    except ZeroDivisionError:
        raise CaptureError(
            f"size expression {text!r} divides by zero under {dict(bindings)}"
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
            f"size expression {dim.text!r} is {size} under {dict(bindings)}; a size is a whole number"
        )
    return int(size)


@lru_cache(maxsize=4096)
def _parse(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise CaptureError(f"size expression {text!r} is not an expression: {error.msg}") from None


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
_CALLS: dict[str, Callable[..., Number]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "int": int,
    "float": float,
}


def _value(tree: ast.expr, bindings: Mapping[str, int], text: str) -> Number:
    match tree:
        case ast.Constant(value=bool() | int() | float() as value):
            return value
        case ast.Name(id=name) if name in bindings:
            return bindings[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left, bindings, text), _value(right, bindings, text))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, bindings, text)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, bindings, text)
        case ast.BoolOp(op=ast.And(), values=values):
            return all(_value(v, bindings, text) for v in values)
        case ast.BoolOp(op=ast.Or(), values=values):
            return any(_value(v, bindings, text) for v in values)
        case ast.Compare(left=left, ops=ops, comparators=rights):
            terms = [_value(t, bindings, text) for t in (left, *rights)]
            return all(
                _COMPARE[type(o)](a, b) for o, a, b in zip(ops, terms, terms[1:], strict=False)
            )
        case ast.Call(func=ast.Name(id=name), args=args) if name in _CALLS:
            return _CALLS[name](*(_value(a, bindings, text) for a in args))
        case ast.Name(id=name):
            raise CaptureError(
                f"size expression {text!r} uses symbol {name!r}, which is not bound; "
                f"bound: {', '.join(bindings) or 'none'}"
            )
        case _:
            raise CaptureError(f"size expression {text!r} uses an unsupported operation")

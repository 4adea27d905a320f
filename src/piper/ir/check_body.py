"""Whether a body is what it says: straight-line calls of listed operators, each on what came before
it, that can become code as they stand.

Bodies come from files too. What passes here is evaluated, unrolled and written as Python code
without a further question, so everything in it is looked at once: names, references, constants,
sizes. Work is linear in the size of the body.
"""

import math
from collections.abc import Collection, Iterator
from keyword import iskeyword

from piper.dtypes import DType
from piper.errors import CaptureError
from piper.ir.body import (
    GETITEM,
    Arg,
    Body,
    Call,
    Const,
    Literal,
    Ref,
    Sequence,
    TensorSpec,
)
from piper.ir.operators import is_random, refusal
from piper.ir.symbols import Expr, symbols_of
from piper.limits import MAX_DIMS, MAX_LITERAL, MAX_NESTING, MAX_NUMBER, MAX_TEXT

_LAYOUTS = frozenset({"strided"})
_MEMORY_FORMATS = frozenset(
    {"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"}
)
_FLOATS = frozenset({"inf", "-inf", "nan"})


def body_problems(body: Body, symbols: Collection[str], allowed: Collection[str]) -> Iterator[str]:
    """What is wrong with *body*, each with its place. *symbols* are the names that sizes may use,
    *allowed* patterns of operators of other libraries (see :func:`~piper.ir.operators.refusal`).
    """
    for i, spec in enumerate(body.inputs):
        yield from _at(f"input {i}", spec_problems(spec, symbols))
    check = _Arguments(symbols)
    count = len(body.inputs)
    for k, call in enumerate(body.calls):
        texts = [*_call_problems(body, k, allowed), *check.problems(call, count + k)]
        yield from _at(f"call {k}, {call.target[:80]}", texts)
    end = count + len(body.calls)
    for i, ref in enumerate(body.outputs):
        if not 0 <= ref < end:
            yield f"output {i}: value {ref} does not exist; there are {end}"
        elif ref >= count and len(body.calls[ref - count].results) != 1:
            yield f"output {i}: value {ref} is several tensors; pick one with {GETITEM}"
    if not 0 <= body.num_rngs <= len(body.calls):
        yield f"it says that it has {body.num_rngs} random streams, and has {len(body.calls)} calls"


def is_keyword_name(name: str) -> bool:
    """Whether *name* may be written as the name of an argument."""
    return name.isascii() and name.isidentifier() and not iskeyword(name)


def spec_problems(spec: TensorSpec, symbols: Collection[str]) -> Iterator[str]:
    """What is wrong with a shape."""
    if len(spec.shape) > MAX_DIMS:
        yield f"expected at most {MAX_DIMS} dimensions, found {len(spec.shape)}"
        return
    for size in spec.shape:
        if isinstance(size, Expr):
            yield from _expression_problems(size, symbols)
        elif not 0 <= size <= MAX_NUMBER:
            yield f"expected sizes from 0 to 2^63 - 1, found {_number(size)}"
    known = [size for size in spec.shape if not isinstance(size, Expr)]
    if math.prod(known) * spec.dtype.itemsize > MAX_NUMBER:
        yield f"{len(known)} sizes make more than 2^63 bytes"


def _at(place: str, texts: Iterator[str] | list[str]) -> Iterator[str]:
    return (f"{place}: {text}" for text in texts)


def _number(value: int) -> str:
    """*value* for people; one of many digits is not written out."""
    return str(value) if abs(value) <= 1 << 128 else f"a number of {value.bit_length()} bits"


def _call_problems(body: Body, k: int, allowed: Collection[str]) -> Iterator[str]:
    """Of the call itself: operator, random stream, results, what getitem picks."""
    call = body.calls[k]
    if (text := refusal(call.target, allowed)) is not None:
        yield text
        return
    if not call.results:
        yield "it has no results"
    random = is_random(call.target)
    if random is not None and random != (call.rng is not None):
        yield (
            "it draws random numbers and names no stream"
            if random
            else "it names a random stream and draws none"
        )
    if call.rng is not None and not 0 <= call.rng < body.num_rngs:
        yield f"random stream {call.rng} does not exist; there are {body.num_rngs}"
    if call.target == GETITEM:
        yield from _pick_problems(body, k)


def _pick_problems(body: Body, k: int) -> Iterator[str]:
    call, count = body.calls[k], len(body.inputs)
    match call.args, call.kwargs, call.results:
        case (Ref(index=ref), int() as number), (), (_,) if not isinstance(number, bool):
            if not count <= ref < count + k:
                return  # said of the reference, or of an input, which is one tensor
            there = len(body.calls[ref - count].results)
            if not 0 <= number < there:
                yield f"result {_number(number)} of value {ref} does not exist; there are {there}"
        case _:
            yield "expected a value and the number of one of its results"


class _Arguments:
    """The check of calls' arguments."""

    def __init__(self, symbols: Collection[str]) -> None:
        self._symbols = symbols

    def problems(self, call: Call, end: int) -> Iterator[str]:
        """Of a call that may read the values before *end*."""
        for i, arg in enumerate(call.args):
            yield from _at(f"argument {i}", self._argument(arg, end, 0))
        names: set[str] = set()
        for name, arg in call.kwargs:
            if not is_keyword_name(name):
                yield f"{name!r:.80} is not the name of an argument"
                continue
            if name in names:
                yield f"argument {name} is given twice"
            names.add(name)
            yield from _at(f"argument {name}", self._argument(arg, end, 0))

    def _argument(self, arg: Arg, end: int, depth: int) -> Iterator[str]:
        match arg:
            case Ref(index=index):
                if not 0 <= index < end:
                    yield f"value {_number(index)} does not exist yet; there are {end} before it"
            case Expr():
                yield from _expression_problems(arg, self._symbols)
            case Const():
                yield from _const_problems(arg)
            case Literal():
                yield from self._literal(arg)
            case Sequence(items=items):
                if depth == MAX_NESTING:
                    yield f"lists are nested more than {MAX_NESTING} deep"
                    return
                for item in items:
                    yield from self._argument(item, end, depth + 1)
            case str():
                yield from _text_problems(arg)
            case _:
                yield from _number_problems(arg)

    def _literal(self, arg: Literal) -> Iterator[str]:
        if texts := list(spec_problems(arg.spec, self._symbols)):
            yield from texts
            return
        if len(arg.values) > MAX_LITERAL:
            yield f"a tensor of {len(arg.values)} elements is written out, expected at most {MAX_LITERAL}"
            return
        if all(isinstance(size, int) for size in arg.spec.shape) and arg.spec.numel() != len(
            arg.values
        ):
            yield f"a tensor of {arg.spec.numel()} elements has {len(arg.values)} values"
        for value in arg.values:
            yield from _number_problems(value)


def _text_problems(text: str) -> Iterator[str]:
    # Texts name modes ("floor", "ij,jk->ik"), never files.
    if len(text) > MAX_TEXT:
        yield f"expected a text of at most {MAX_TEXT} characters, found {len(text)}"
    elif not text.isprintable() or any(c in text for c in "/\\~") or "://" in text:
        yield f"{text!r:.80} could be the name of a file, which no argument may be"


def _number_problems(value: object) -> Iterator[str]:
    match value:
        case None | bool():
            return
        case int():
            if abs(value) > MAX_NUMBER + 1:
                yield f"expected a number of 64 bits, found {_number(value)}"
        case float():
            if not math.isfinite(value):
                yield f"{value} is written as a constant of kind 'float'"
        case _:
            yield f"a {type(value).__name__} is no argument"


def _const_problems(const: Const) -> Iterator[str]:
    kind, text = const.kind, const.text
    match kind:
        case "dtype":
            known = text in DType.__members__.values()
        case "device":
            known = text == "here"
        case "layout":
            known = text in _LAYOUTS
        case "memory_format":
            known = text in _MEMORY_FORMATS
        case "float":
            known = text in _FLOATS
        case "complex":
            known = _is_complex(text)
        case _:
            known = False
    if not known:
        yield f"unknown constant {kind!r:.40} {text!r:.80}"


def _is_complex(text: str) -> bool:
    try:
        return len(text) <= 80 and text.isascii() and bool(complex(text) or True)
    except ValueError:
        return False


def _expression_problems(expr: Expr, symbols: Collection[str]) -> Iterator[str]:
    try:
        unknown = sorted(symbols_of(expr.text) - frozenset(symbols))
    except CaptureError as error:
        yield str(error)
        return
    if unknown:
        known = ", ".join(sorted(symbols)) or "none"
        yield f"size expression {expr.text!r:.80} uses symbol {unknown[0]!r:.40}; known: {known}"

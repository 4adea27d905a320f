"""Which outputs of a chunk share memory: with an input, with each other, with a larger tensor that
they are views of.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from piper.ir.body import GETITEM, Body, Call, call_refs
from piper.ir.views import VIEWS

IN_PLACE_SUMS = frozenset(
    f"aten.{name}.default"
    for name in ["binary_cross_entropy", "mse_loss", "smooth_l1_loss", "soft_margin_loss"]
)
"""Losses whose scalar result stays in the memory of the elementwise losses, as large as the first
argument.
"""


RESHAPES = frozenset(
    f"aten.{name}"
    for name in [
        "_reshape_alias",
        "_unsafe_view",
        "alias",
        "detach",
        "permute",
        "reshape",
        "squeeze",
        "t",
        "transpose",
        "unsqueeze",
        "view",
    ]
)
"""Those of :data:`VIEWS` whose result has each element of its argument once."""


@dataclass(frozen=True, slots=True)
class Made:
    """Memory that a chunk allocates: ``nbytes``, number ``number`` of the chunk. Equal numbers are
    the same memory.
    """

    number: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Given:
    """The memory that input ``index`` of a chunk is in."""

    index: int


Memory: TypeAlias = Made | Given


def output_memory(body: Body, bindings: Mapping[str, int]) -> tuple[Memory, ...]:
    """The memory that each output of *body* is in; *bindings* gives the symbols their sizes."""
    # Per reference, the memory of each result: a call may have several.
    found: list[tuple[Memory, ...]] = [(Given(i),) for i in range(len(body.inputs))]
    sizes: list[tuple[int, ...]] = [(spec.nbytes(bindings),) for spec in body.inputs]
    count = 0
    for call in body.calls:
        base, size = _viewed(call, found), _sizes(call, sizes, bindings)
        if base is None:
            base = tuple(Made(count + i, nbytes) for i, nbytes in enumerate(size))
            count += len(size)
        found.append(base)
        sizes.append(size)
    return tuple(found[ref][0] for ref in body.outputs)


def owned_outputs(body: Body) -> tuple[bool, ...]:
    """Whether each output of *body* is the whole of memory that is nothing else's: it may be
    written to where nothing reads the output any more.

    So it is what one of torch's own operators newly made, no view of it but one with all its
    elements, and in the memory of neither an input nor another output. (In a captured graph an
    operator of torch's that is no view makes new tensors. What a user's operator does is not
    known.)
    """
    # Per reference and result, a number for its memory if it is owned so far.
    found: list[tuple[int | None, ...]] = [(None,) for _ in body.inputs]
    memory: list[tuple[int, ...]] = [(-1 - i,) for i in range(len(body.inputs))]
    count = 0
    for call in body.calls:
        refs, name = call_refs(call), call.target.rsplit(".", 1)[0]
        if call.target == GETITEM:
            index = _index(call)
            found.append((found[refs[0]][index],))
            memory.append((memory[refs[0]][index],))
            continue
        made = tuple(range(count, count + max(len(call.results), 1)))
        count += len(made)
        if name not in VIEWS:
            owned = name.startswith("aten.") and call.target not in IN_PLACE_SUMS
            found.append(made if owned else (None,) * len(made))
            memory.append(made)
        elif not refs:  # a view of a literal, which all executions share
            found.append((None,) * len(made))
            memory.append(made)
        else:
            (before,), (base,) = found[refs[0]], memory[refs[0]]
            found.append((before if name in RESHAPES else None,) * len(made))
            memory.append((base,) * len(made))
    places = [memory[ref][0] for ref in body.outputs]
    return tuple(
        found[ref][0] is not None and places.count(place) == 1
        for ref, place in zip(body.outputs, places, strict=True)
    )


def _sizes(
    call: Call, sizes: list[tuple[int, ...]], bindings: Mapping[str, int]
) -> tuple[int, ...]:
    """Bytes of each of *call*'s results; ``sizes`` are those of the references before."""
    if call.target == GETITEM:
        return (sizes[call_refs(call)[0]][_index(call)],)
    if call.target in IN_PLACE_SUMS:
        return sizes[call_refs(call)[0]]
    return tuple(0 if spec is None else spec.nbytes(bindings) for spec in call.results)


def _viewed(call: Call, found: list[tuple[Memory, ...]]) -> tuple[Memory, ...] | None:
    """The memory of *call*'s results if they are views; ``None`` if they are new."""
    refs = call_refs(call)
    if call.target == GETITEM:
        return (found[refs[0]][_index(call)],)
    if call.target.rsplit(".", 1)[0] not in VIEWS or not refs:
        return None
    (base,) = found[refs[0]]
    return (base,) * len(call.results)


def _index(call: Call) -> int:
    index = call.args[1]
    assert isinstance(index, int), "getitem in a chunk's body takes a number"
    return index

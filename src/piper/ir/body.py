"""The body of a chunk: straight-line tensor code as data, free of torch.

A body is a list of calls of ATen operators. Names are local and positional: reference ``i`` below
``len(inputs)`` is input ``i``, reference ``len(inputs) + k`` is the result of call ``k``. So the
same layer, wherever it stands in a model and however often, has one body, found by its content
hash.

Bodies are pure: no call mutates an input, no call reads global state. Random calls name an ``rng``
slot; the chunk that uses the body says which random stream fills the slot.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from piper.brief import brief, count
from piper.dtypes import DType
from piper.ids import BodyId
from piper.ir.symbols import Dim, Expr, bind

GETITEM = "operator.getitem"
"""The call that picks one result of a call that has several."""


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tensor"):
    """Shape (sizes may be expressions over symbols) and element type."""

    shape: tuple[Dim, ...]
    dtype: DType

    def bound(self, bindings: Mapping[str, int]) -> "TensorSpec":
        """The same spec with every symbolic size replaced by its number."""
        if all(isinstance(d, int) for d in self.shape):
            return self
        return TensorSpec(tuple(bind(d, bindings) for d in self.shape), self.dtype)

    def sizes(self, bindings: Mapping[str, int]) -> tuple[int, ...]:
        """The shape in numbers; *bindings* gives the symbols their sizes."""
        return tuple(bind(d, bindings) for d in self.shape)

    def numel(self, bindings: Mapping[str, int] | None = None) -> int:
        """Number of elements; *bindings* gives the symbols their sizes."""
        return math.prod(self.sizes(bindings or {}))

    def nbytes(self, bindings: Mapping[str, int] | None = None) -> int:
        """Bytes of the elements."""
        return self.numel(bindings) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(str(d) for d in self.shape)}]"


class Ref(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ref"):
    """A value of the body: an input, or the result of a call (a tuple for a multi-result call)."""

    index: int


class Const(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="const"):
    """A constant that JSON has no word for.

    ``kind`` is ``dtype`` (text a :class:`DType`), ``device`` (text ``here``: the device that runs
    the body), ``layout``, ``memory_format``, ``float`` (text ``inf``, ``-inf`` or ``nan``) or
    ``complex``.
    """

    kind: str
    text: str


class Literal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="literal"):
    """A small constant tensor, elements in row-major order (``values`` as Python numbers)."""

    spec: TensorSpec
    values: tuple[int | float | bool, ...]


class Sequence(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sequence"):
    """A list or tuple of arguments."""

    items: "tuple[Arg, ...]"


Arg: TypeAlias = Ref | Expr | Const | Literal | Sequence | bool | int | float | str | None


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One operator call.

    ``target`` is an ATen overload such as ``aten.mm.default``, or ``operator.getitem``, which picks
    one result of a multi-result call. ``results`` has the spec of each result (``None`` for a
    result that is not a tensor). ``rng`` is the slot of the random stream that a random call draws
    from.
    """

    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    results: tuple[TensorSpec | None, ...]
    rng: int | None = None


def _brief_body(it: "Body") -> str:
    return f"{len(it.inputs)} inputs, {count(len(it.calls), 'call')}, {len(it.outputs)} outputs"


@brief(_brief_body)
class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Inputs, calls in order, outputs (references), and the number of ``rng`` slots."""

    inputs: tuple[TensorSpec, ...]
    calls: tuple[Call, ...]
    outputs: tuple[int, ...]
    num_rngs: int = 0


def body_id(body: Body) -> BodyId:
    """Content hash of a body: of what is written, so that ``1`` and ``1.0``, equal in Python,
    differ.
    """
    return BodyId(hashlib.blake2b(msgspec.json.encode(body), digest_size=12).hexdigest())


def argument_refs(arg: Arg) -> tuple[int, ...]:
    """References inside an argument, in order of appearance."""
    if isinstance(arg, Ref):
        return (arg.index,)
    if isinstance(arg, Sequence):
        return tuple(index for item in arg.items for index in argument_refs(item))
    return ()


def call_refs(call: Call) -> tuple[int, ...]:
    """All references that a call reads."""
    arguments = (*call.args, *(arg for _, arg in call.kwargs))
    return tuple(index for arg in arguments for index in argument_refs(arg))

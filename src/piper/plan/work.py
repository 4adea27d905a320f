"""How much work a chunk body is: floating-point operations, bytes of memory traffic, operator
calls.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from piper.dtypes import DType
from piper.ir.body import GETITEM, Body, Call, Ref, TensorSpec, call_refs
from piper.ir.views import VIEWS
from piper.ops.base import Instruction
from piper.plan.model import DevicePlan


@dataclass(frozen=True, slots=True)
class CallWork:
    """One operator call: floating-point operations, bytes that it reads and writes, element type of
    what it computes with.
    """

    flops: float
    nbytes: int
    dtype: DType


@dataclass(frozen=True, slots=True)
class BodyWork:
    """A body: its calls that do something (views do not), in order."""

    calls: tuple[CallWork, ...]

    @property
    def flops(self) -> float:
        """Floating-point operations of matrix products, convolutions and attention."""
        return sum(call.flops for call in self.calls)

    @property
    def nbytes(self) -> int:
        """Bytes that the calls read and write, each by itself."""
        return sum(call.nbytes for call in self.calls)


def body_work(body: Body, bindings: Mapping[str, int]) -> BodyWork:
    """The work of *body*; *bindings* gives the symbols their sizes."""
    return BodyWork(tuple(work for _, work in working_calls(body, bindings)))


def working_calls(body: Body, bindings: Mapping[str, int]) -> Iterator[tuple[int, CallWork]]:
    """The calls of *body* that do something, with their numbers among all."""
    specs: list[TensorSpec | None] = list(body.inputs)
    results: list[tuple[TensorSpec | None, ...]] = [(spec,) for spec in body.inputs]
    for number, call in enumerate(body.calls):
        if call.target == GETITEM:
            index = call.args[1]
            assert isinstance(index, int), "getitem in a chunk's body takes a number"
            results.append((results[call_refs(call)[0]][index],))
            specs.append(results[-1][0])
            continue
        if call.target.rsplit(".", 1)[0] not in VIEWS:
            made = [s for s in call.results if s is not None]
            read = [s for ref in call_refs(call) for s in results[ref] if s is not None]
            nbytes = sum(s.nbytes(bindings) for s in (*made, *read))
            dtype = made[0].dtype if made else DType.FLOAT32
            yield number, CallWork(call_flops(call, specs, bindings), nbytes, dtype)
        results.append(call.results)
        specs.append(call.results[0] if call.results else None)


def call_flops(
    call: Call, specs: Sequence[TensorSpec | None], bindings: Mapping[str, int]
) -> float:
    """2·m·n·k for products; 4·b·h·s·s·d for attention (10 where it goes backward); 2·(elements
    out)·(weights per output channel) for a convolution, twice that backward; 0 for the rest.
    ``specs`` are those of the references before the call.
    """
    result = call.results[0] if call.results else None
    if result is None:
        return 0.0
    operands = [specs[a.index] for a in call.args if isinstance(a, Ref)]
    name = call.target.split(".")[1] if "." in call.target else call.target
    first = next((s for s in operands if s is not None), None)
    second = operands[1] if len(operands) > 1 else None
    if name in ("mm", "bmm") and first is not None:
        return 2.0 * result.numel(bindings) * first.sizes(bindings)[-1]
    if name in ("addmm", "baddbmm") and second is not None:
        return 2.0 * result.numel(bindings) * second.sizes(bindings)[-1]
    if "scaled_dot_product" in name and first is not None and len(first.shape) == 4:
        batch, heads, length, width = first.sizes(bindings)
        factor = 10.0 if "backward" in name else 4.0
        return factor * math.prod((batch, heads, length, length, width))
    if name == "convolution" and second is not None:
        return 2.0 * result.numel(bindings) * math.prod(second.sizes(bindings)[1:])
    if name == "convolution_backward" and len(operands) > 2 and operands[2] is not None:
        assert first is not None
        return 4.0 * first.numel(bindings) * math.prod(operands[2].sizes(bindings)[1:])
    return 0.0


def touched_bytes(mine: DevicePlan, instruction: Instruction) -> int:
    """Bytes of what an instruction of a device reads and writes."""
    slots = mine.slots
    return sum(slots[s].message.nbytes for s in (*instruction.reads(), *instruction.writes()))

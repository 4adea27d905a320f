"""Parts of bodies: cut out of one, put together to another."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from msgspec.structs import replace as replace_struct

from piper.ir import body as ir
from piper.ir.body import Arg, Body, Ref, TensorSpec, call_refs

Reference: TypeAlias = int
"""Into a body: below the number of inputs an input, else a call."""

Local: TypeAlias = int
"""A value, by a number that means something to those who share it."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some calls of a body, in order. ``rng`` has the ordinals of the whole body's random calls.
    ``reads`` says which values the references are that the calls do not make; ``makes`` which
    references the values are that others read.
    """

    body: Body
    rng: tuple[int, ...]
    calls: Sequence[int]
    reads: Mapping[Reference, Local]
    makes: Mapping[Local, Reference]


def whole(
    body: Body, inputs: Sequence[Local], outputs: Sequence[Local], rng: tuple[int, ...]
) -> Part:
    """All calls of *body*, which is called with the values *inputs* and whose results are the
    values *outputs*.
    """
    makes = dict(zip(outputs, body.outputs, strict=True))
    return Part(body, rng, range(len(body.calls)), dict(enumerate(inputs)), makes)


def assemble(
    parts: Sequence[Part], outputs: Iterable[Local]
) -> tuple[Body, tuple[Local, ...], tuple[int, ...]]:
    """One body that runs *parts* in turn and returns *outputs*; the values that it reads; its
    random calls' ordinals.
    """
    made = {value for part in parts for value in part.makes}
    specs: dict[Local, TensorSpec] = {}
    for part in reversed(parts):
        for ref, value in part.reads.items():
            if value not in made:
                specs.setdefault(value, spec_of(part.body, ref))
    where: dict[Local, Reference] = {value: i for i, value in enumerate(specs)}
    calls: list[ir.Call] = []
    rng: list[int] = []
    for part in parts:
        refs = {ref: where[value] for ref, value in part.reads.items()}
        for position in part.calls:
            call = part.body.calls[position]
            refs[len(part.body.inputs) + position] = len(specs) + len(calls)
            slot = None
            if call.rng is not None:
                slot = len(rng)
                rng.append(part.rng[call.rng])
            calls.append(renamed(call, refs, slot))
        where.update({value: refs[ref] for value, ref in part.makes.items()})
    body = Body(
        tuple(specs.values()), tuple(calls), tuple(where[v] for v in outputs), num_rngs=len(rng)
    )
    return body, tuple(specs), tuple(rng)


def slice_calls(
    body: Body, wanted: Iterable[Reference], stop: Collection[Reference]
) -> tuple[list[int], list[Reference]]:
    """The calls that *wanted* depend on, and the references where the search ended: inputs and
    those of *stop*.
    """
    calls: set[int] = set()
    ends: set[Reference] = set()
    waiting = list(wanted)
    while waiting:
        ref = waiting.pop()
        position = ref - len(body.inputs)
        if position < 0 or ref in stop:
            ends.add(ref)
        elif position not in calls:
            calls.add(position)
            waiting.extend(call_refs(body.calls[position]))
    return sorted(calls), sorted(ends)


def spec_of(body: Body, ref: Reference) -> TensorSpec:
    """Shape and type of the tensor that *ref* refers to."""
    if ref < len(body.inputs):
        return body.inputs[ref]
    (spec,) = body.calls[ref - len(body.inputs)].results
    assert spec is not None, f"reference {ref} is not a tensor"
    return spec


def renamed(call: ir.Call, refs: Mapping[Reference, Reference], slot: int | None) -> ir.Call:
    """*call* with other references and another random slot."""
    return replace_struct(
        call,
        args=tuple(_renamed_argument(arg, refs) for arg in call.args),
        kwargs=tuple((name, _renamed_argument(arg, refs)) for name, arg in call.kwargs),
        rng=slot,
    )


def _renamed_argument(arg: Arg, refs: Mapping[Reference, Reference]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(refs[arg.index])
    if isinstance(arg, ir.Sequence):
        return ir.Sequence(tuple(_renamed_argument(item, refs) for item in arg.items))
    return arg

"""A body cut at its random calls, so that what lies between can be compiled."""

from collections.abc import Iterable
from dataclasses import dataclass

from piper.ir import body as ir
from piper.ir.parts import renamed, spec_of
from piper.ir.views import VIEWS


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a body, as a body. ``inputs`` and ``outputs`` are references of the whole body.

    ``random`` pieces draw random numbers, with the whole body's random slots; the others draw none.
    """

    body: ir.Body
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    random: bool

    @property
    def computes(self) -> bool:
        """Whether it does more than look at its inputs in another way."""
        return any(
            call.target != ir.GETITEM and call.target.rpartition(".")[0] not in VIEWS
            for call in self.body.calls
        )


def cut_at_random_calls(body: ir.Body) -> tuple[Piece, ...]:
    """*body* as pieces to be run in order: as few as there can be if random calls stand alone.

    Calls that no output needs are left out. A result of several parts stays with what picks from
    it.
    """
    wanted = _needed(body)
    phases: dict[int, list[int]] = {}
    for position, phase in enumerate(_phases(body)):
        if len(body.inputs) + position in wanted:
            phases.setdefault(phase, []).append(position)
    parts = [phases[phase] for phase in sorted(phases)]
    read_later = [{ref for p in part for ref in ir.call_refs(body.calls[p])} for part in parts]
    pieces = []
    for number, part in enumerate(parts):
        later = set(body.outputs).union(*read_later[number + 1 :])
        pieces.append(_piece(body, part, later))
    return tuple(pieces)


def _needed(body: ir.Body) -> set[int]:
    needed = set(body.outputs)
    for position in range(len(body.calls) - 1, -1, -1):
        if len(body.inputs) + position in needed:
            needed.update(ir.call_refs(body.calls[position]))
    return needed


def _phases(body: ir.Body) -> list[int]:
    """The phase of each call: even ones compute, odd ones draw. A call comes as early as its
    arguments allow.
    """
    count, phases = len(body.inputs), list[int]()
    for call in body.calls:
        before = [phases[ref - count] for ref in ir.call_refs(call) if ref >= count]
        latest = max(before, default=0)
        if call.target == ir.GETITEM:
            phases.append(latest)
        elif call.rng is None:
            phases.append(latest + latest % 2)
        else:  # a draw whose arguments are drawn in the same phase is one phase of draws later
            phases.append(latest + 1 if latest % 2 == 0 else latest + 2)
    return phases


def _piece(body: ir.Body, positions: Iterable[int], read_later: set[int]) -> Piece:
    count, positions = len(body.inputs), list(positions)
    own = {count + position for position in positions}
    reads = [ref for p in positions for ref in ir.call_refs(body.calls[p]) if ref not in own]
    inputs = tuple(dict.fromkeys(reads))
    outputs = tuple(ref for ref in sorted(own) if ref in read_later)
    names = {ref: index for index, ref in enumerate((*inputs, *sorted(own)))}
    calls = tuple(
        renamed(body.calls[position], names, body.calls[position].rng)
        for position in sorted(positions)
    )
    specs = tuple(spec_of(body, ref) for ref in inputs)
    part = ir.Body(specs, calls, tuple(names[ref] for ref in outputs), body.num_rngs)
    return Piece(part, inputs, outputs, any(call.rng is not None for call in calls))

"""Which contributions a chunk adds to their totals itself, each as soon as it is made, instead of
keeping all of them to its end.

A plan says that a chunk makes contributions, and that an ``Accumulate`` adds them later. Where that
can happen within the chunk, it does, as autograd does it: then one contribution at a time is alive,
not one per parameter of the chunk. The result is the same, since between the two nothing touches
the total or the contributions; so what holds for the plan (see ``piper.verify``) holds for what is
executed.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TypeAlias

from piper.ids import Slot, Stream
from piper.ops.accumulate import Accumulate
from piper.ops.base import Instruction
from piper.ops.compute import Compute
from piper.ops.p2p import Send
from piper.plan.model import freed_behind, frees_behind

Added: TypeAlias = Mapping[Slot, Slot]
"""For contributions, the slots of what they are added to."""


def added_within(instructions: Sequence[Instruction]) -> Mapping[int, Added]:
    """For each chunk of a device's program (by position) that adds contributions itself: these; the
    same for the ``Accumulate`` that has nothing to add for them any more, and for what frees their
    slots, which are never filled.

    That is so for a contribution which is added in place, on the chunk's stream, and freed right
    after it, if only that stream has touched it and what it is added to, and nothing does in
    between: then no wait in between concerns them. Nor if the device sends something in between: a
    send must not wait for additions.
    """
    found: dict[int, Added] = {}
    touched: dict[Stream, set[Slot]] = {}  # so far
    for number, instruction in enumerate(instructions):
        touched.setdefault(instruction.stream, set()).update(_slots(instruction))
        at = _following(instructions, number) if isinstance(instruction, Compute) else None
        if at is None:
            continue
        elsewhere = [slots for stream, slots in touched.items() if stream != instruction.stream]
        added = {
            right: left
            for right, left in _added(instructions, number, at).items()
            if not any(left in slots or right in slots for slots in elsewhere)
        }
        if added:
            found[number] = found[at] = added
            found.update(dict.fromkeys(frees_behind(instructions, at), added))
    return found


def wholly_added(instructions: Sequence[Instruction]) -> frozenset[int]:
    """The positions of every ``Accumulate`` that has nothing left to add, as chunks do it."""
    return frozenset(
        number
        for number, added in added_within(instructions).items()
        if isinstance(instruction := instructions[number], Accumulate)
        and added.keys() >= set(instruction.right)
    )


def _slots(instruction: Instruction) -> tuple[Slot, ...]:
    return (*instruction.reads(), *instruction.writes(), *instruction.frees())


def _following(instructions: Sequence[Instruction], number: int) -> int | None:
    """The position of the ``Accumulate`` for what chunk *number* makes, unless a send comes
    first.
    """
    chunk = instructions[number]
    for position in range(number + 1, len(instructions)):
        following = instructions[position]
        if isinstance(following, Accumulate) and following.stream == chunk.stream:
            return position if following.node == chunk.node else None
        if isinstance(following, Send | Compute):
            return None
    return None


def _added(instructions: Sequence[Instruction], number: int, at: int) -> dict[Slot, Slot]:
    """Contributions that ``Accumulate`` *at* adds in place and that, like what they are added to,
    nothing touches since chunk *number*.
    """
    chunk, addition = instructions[number], instructions[at]
    assert isinstance(chunk, Compute)
    assert isinstance(addition, Accumulate)
    between = islice(instructions, number + 1, at)
    touched = {*chunk.inputs, *(slot for instruction in between for slot in _slots(instruction))}
    made = freed_behind(instructions, at).intersection(chunk.outputs)
    return {
        right: left
        for total, left, right in zip(addition.totals, addition.left, addition.right, strict=True)
        if right in made
        and (total == left or left in addition.moved)
        and touched.isdisjoint((total, left, right))
        and addition.right.count(right) == chunk.outputs.count(right) == 1
    }

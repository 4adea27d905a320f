"""Only memory that is nothing else's is added to in place.

A contribution that an ``Accumulate`` moves into the total is overwritten: so nothing else may be in
its memory. That nothing reads the slot itself afterwards, or at the same time, is what the checks
of lifetimes and races find, since the slot is freed there.
"""

from collections.abc import Iterator, Mapping

from piper.ids import BodyId, Slot
from piper.ir.storages import owned_outputs
from piper.ops.accumulate import Accumulate
from piper.ops.all_reduce import AllReduceBucket
from piper.ops.compute import Compute
from piper.ops.reduce_scatter import ReduceScatterBucket
from piper.verify.trace import Problem, Subject, Trace

CHECK = "ownership"


def check_ownership(subject: Subject) -> Iterator[Problem]:
    """Problems in issue order, device by device."""
    owned = {name: owned_outputs(body) for name, body in subject.dag.bodies.items()}
    for trace in subject.traces:
        yield from _check(subject, trace, owned)


def _check(
    subject: Subject, trace: Trace, owned: Mapping[BodyId, tuple[bool, ...]]
) -> Iterator[Problem]:
    mine: set[Slot] = set()
    for i, instruction in enumerate(trace.instructions):
        match instruction:
            case Accumulate():
                for slot in instruction.moved:
                    if slot not in mine:
                        text = (
                            f"{subject.at(trace.device, i)}: adds to {subject.slot(trace.device, slot)} in place, "
                            "whose memory may be another value's too"
                        )
                        yield Problem(CHECK, text)
                mine.update(instruction.totals)
            case Compute():
                # A chunk may return views of what it reads.
                mine.difference_update(instruction.inputs)
                flags = owned.get(instruction.body, ())
                for slot, alone in zip(instruction.outputs, flags, strict=False):
                    (mine.add if alone else mine.discard)(slot)
            case AllReduceBucket() | ReduceScatterBucket():
                mine.update(instruction.outputs)
            case _:
                mine.difference_update(instruction.writes())

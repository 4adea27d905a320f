"""Which values share memory with the model's state.

A parameter is updated in place and a buffer is stored in place, so a value that is a view of one
must be read before, as the parameter or buffer itself. Every other write makes a new tensor.
"""

from collections.abc import Mapping
from typing import TypeAlias

from piper.ids import BodyId, Slot
from piper.ir.body import Body, call_refs
from piper.ir.views import VIEWS as TENSOR_VIEWS
from piper.ops.compute import Compute
from piper.verify.trace import Trace

VIEWS = TENSOR_VIEWS | {"operator"}
"""Operators whose results may share memory with their first argument; ``operator``:
``operator.getitem``.
"""


Sources: TypeAlias = Mapping[BodyId, tuple[tuple[int, ...], ...]]
"""Of each body that may return views of its inputs: per output, these inputs."""


def find_views(bodies: Mapping[BodyId, Body]) -> Sources:
    """Which outputs of *bodies* may be views of what."""
    return {name: found for name, body in bodies.items() if any(found := _views(body))}


def find_aliases(trace: Trace, views: Sources) -> None:
    """Add to ``trace.uses`` the state slots that an instruction reads through views of them."""
    trace.uses.extend(trace.reads)
    if not views:
        return
    shared: dict[Slot, frozenset[Slot]] = {slot: frozenset((slot,)) for slot in trace.state}
    for i, instruction in enumerate(trace.instructions):
        behind = [shared[slot] for slot in trace.reads[i] if slot in shared]
        if behind:
            hidden = frozenset().union(*behind) - set(trace.reads[i])
            trace.uses[i] = (*trace.reads[i], *sorted(hidden))
        if type(instruction) is not Compute or instruction.body not in views:
            continue
        for slot, sources in zip(instruction.outputs, views[instruction.body], strict=False):
            inputs = [instruction.inputs[k] for k in sources if k < len(instruction.inputs)]
            if state := frozenset[Slot]().union(*(shared.get(s, ()) for s in inputs)):
                shared[slot] = state


def _views(body: Body) -> tuple[tuple[int, ...], ...]:
    """Per output, the inputs that it may be a view of."""
    behind: list[tuple[int, ...]] = [(k,) for k in range(len(body.inputs))]
    for call in body.calls:
        refs = call_refs(call)
        is_view = call.target.rsplit(".", 1)[0] in VIEWS and refs
        behind.append(behind[refs[0]] if is_view else ())
    return tuple(behind[ref] for ref in body.outputs)

"""The optimizer, replayed on the gradients that the devices had.

Where a gradient is zero by construction (the bias of an attention's keys, before the softmax), what
is computed is a rounding error, another one in every order of additions. Optimizers that divide by
its magnitude (Adam's) make steps of ordinary size of it. Then no two correct runs have equal
parameters; what can be said is that gradients are equal up to rounding, and that each update is
what the optimizer makes of them.
"""

from collections.abc import Mapping, Sequence

import torch

from piper.runtime.slices import Slice
from piper.runtime.snapshot import StateSnapshot
from piper.runtime.state import ModelState

Gradient = tuple[str, Slice | None, torch.Tensor]
"""A parameter's name, which slice of its gradient, and that."""


class Replay:
    """*state* is what one process starts with; it is updated by gradients that are put together
    from what the devices have.
    """

    def __init__(self, state: ModelState) -> None:
        self._state = state

    def step(self, found: Sequence[Gradient], lr_factor: float) -> StateSnapshot:
        """Update by the gradients *found* on all devices in this step (none: it was skipped);
        parameters and the optimizer's state afterwards.
        """
        if found:
            self._state.begin_step(lr_factor)
            self._state.update(_whole(found, self._state.parameters), None)
        return self._state.snapshot(self._state.parameters, optimizer=True)


def _whole(
    found: Sequence[Gradient], parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Each gradient as a whole; NaN where no device has a part."""
    whole: dict[str, torch.Tensor] = {}
    for name, part, gradient in found:
        if name not in parameters:
            continue
        if name not in whole:
            whole[name] = torch.full(parameters[name].shape, torch.nan, dtype=gradient.dtype)
        mine = whole[name] if part is None else part.of(whole[name])
        if mine.shape == gradient.shape:
            mine.copy_(gradient)
    return whole

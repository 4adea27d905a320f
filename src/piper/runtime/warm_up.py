"""Calling every chunk once before the first step, so that what compiles does so while nobody waits
for a message.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch

from piper.devices.tensors import torch_dtype
from piper.ids import BodyId, Slot
from piper.ops.base import Message, RandomKey
from piper.ops.compute import Compute
from piper.plan.model import DevicePlan
from piper.runtime.code import ChunkCode

Strides: TypeAlias = tuple[int, ...]


def warm_up(
    mine: DevicePlan,
    slots: Sequence[torch.Tensor | None],
    function: Callable[[BodyId], ChunkCode],
    device: torch.device,
) -> None:
    """Call each chunk of *mine* on zeros, once for each layout that its inputs will have in a step.

    Layouts follow from the state in *slots*, from what chunks return, and from messages, which are
    contiguous. A guess that turns out wrong costs another compilation in the first step, nothing
    else.
    """
    strides: dict[Slot, Strides] = {
        Slot(number): tensor.stride() for number, tensor in enumerate(slots) if tensor is not None
    }
    known: dict[tuple[BodyId, tuple[Strides, ...]], tuple[Strides, ...]] = {}
    with torch.no_grad():
        for instruction in mine.instructions:
            if not isinstance(instruction, Compute):
                for slot in instruction.writes():
                    strides.pop(slot, None)
                continue
            messages = [mine.slots[slot].message for slot in instruction.inputs]
            layout = tuple(
                strides.get(slot, _contiguous(message.shape))
                for slot, message in zip(instruction.inputs, messages, strict=True)
            )
            if (instruction.body, layout) not in known:
                inputs = [
                    _zeros(message, own, device)
                    for message, own in zip(messages, layout, strict=True)
                ]
                key = RandomKey(0, 0, 0, instruction.rng) if instruction.rng else None
                results = function(instruction.body)(inputs, key)
                known[instruction.body, layout] = tuple(result.stride() for result in results)
            made = known[instruction.body, layout]
            strides.update(zip(instruction.outputs, made, strict=True))


def _contiguous(shape: Iterable[int]) -> Strides:
    strides, size = list[int](), 1
    for length in reversed(tuple(shape)):
        strides.append(size)
        size *= max(length, 1)
    return tuple(strides[::-1])


def _zeros(message: Message, strides: Strides, device: torch.device) -> torch.Tensor:
    """Zeros in that layout, which may show one element several times."""
    shape = message.shape
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n)
    memory = torch.zeros(span, dtype=torch_dtype(message.dtype), device=device)
    return memory.as_strided(shape, strides)

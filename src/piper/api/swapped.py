"""Run a piece of code while a model has other parameters and buffers."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch.func import functional_call

Result = TypeVar("Result")


def with_tensors(
    model: nn.Module, tensors: dict[str, torch.Tensor], function: Callable[[], Result]
) -> Result:
    """What *function* returns while *model* has *tensors* (by name) as its parameters and buffers.

    Afterwards the model has its own again, and *tensors* has what was put in their places
    (``self.buffer = new``). A backward with checkpoints, which repeat forwards, must run inside.
    """
    held = {f"model.{name}": tensor for name, tensor in tensors.items()}
    result: Result = functional_call(_Holder(model), held, (function,))
    tensors.update({name.removeprefix("model."): tensor for name, tensor in held.items()})
    return result


class _Holder(nn.Module):
    """Calls a function."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], object]) -> object:
        return function()

"""Eager PyTorch in which every use of a parameter has a gradient of its own."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode


class SeparateUses(TorchFunctionMode):
    """Give each call of a torch function its own rounded copies of parameters.

    *sources* has, per stand-in that the model holds as its parameter, the tensor of a wider type
    that it was rounded from. Autograd adds up the gradients of several uses of one tensor in that
    tensor's type: of the copies each is used once, so the gradients are added where they were
    rounded from, in the wider type. (What reaches a stand-in otherwise, through
    ``autograd.Function.apply``, is added up there.)
    """

    def __init__(self, sources: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._sources = {id(stand_in): (stand_in, wide) for stand_in, wide in sources}

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run *func* on copies of stand-ins."""
        del types
        if func in _PROPERTIES:
            return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._copy, (args, dict(kwargs or {})))
        return func(*args, **kwargs)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        found = self._sources.get(id(tensor))
        return tensor if found is None else found[1].to(found[0].dtype)


_PROPERTIES = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("dtype", "device", "requires_grad", "is_leaf", "shape", "grad", "layout")
)
"""Questions about a tensor, whose answers must be the stand-in's."""

"""Parameters that say that they have the shape of the whole parameter of which a device holds a
part.

A function that makes an optimizer may look at its parameters (``p.ndim >= 2``). What a device
gives it are flat slices, parts of the experts, or nothing at all; what the function must see is
the model's parameters.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import torch
from torch import nn

from piper.errors import ConfigError

T = TypeVar("T")

_OUTLINE, _MADE, _UNSENT = "_piper_outline", "_piper_made", "_piper_unsent"

_OF_SHAPE = frozenset(
    {
        torch.Tensor.shape.__get__,  # type: ignore[attr-defined]  # a getter of C
        torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.ndimension,
        torch.Tensor.numel,
        torch.Tensor.nelement,
        torch.Tensor.stride,
        torch.Tensor.__len__,
        torch.numel,
    }
)
"""What is answered for the whole parameter."""

_SAME_TENSOR = frozenset(
    {
        torch.Tensor.data.__get__,  # type: ignore[attr-defined]
        torch.Tensor.detach,
        torch.detach,
    }
)
"""What gives the tensor itself, of which the same is answered."""


@dataclass(frozen=True, slots=True)
class Unsent:
    """In place of an attribute of a parameter that is no plain data, so that no device has it."""

    kind: str


class _StandIn(nn.Parameter):
    def __getattr__(self, key: str) -> NoReturn:
        unsent = vars(self).get(_UNSENT, {}).get(key)
        if unsent is None:
            raise AttributeError(f"'Parameter' object has no attribute {key!r}")
        raise ConfigError(
            f"optimizer= reads attribute {key!r} of a parameter, which is a {unsent.kind}; devices have only those that are numbers, texts, "
            "truth values, and tuples, lists and dictionaries of them: set such an attribute, or use param_groups="
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., T],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> T:
        given = kwargs or {}
        own = args[0] if args else None
        if func in _OF_SHAPE and isinstance(own, _StandIn):
            return func(vars(own)[_OUTLINE], *args[1:], **given)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (what torch documents for this)
            result = func(*args, **given)
        if func in _SAME_TENSOR and isinstance(own, _StandIn) and isinstance(result, torch.Tensor):
            made = vars(own)[_MADE]
            made.append(result)
            _stand_in(result, vars(own)[_OUTLINE], made)
        return result


@contextmanager
def standing_in(
    parameters: Mapping[str, nn.Parameter],
    shapes: Mapping[str, tuple[int, ...]],
    attributes: Mapping[str, Mapping[str, object]],
) -> Iterator[None]:
    """Meanwhile each of *parameters* answers for its shape with that of *shapes*, and has the
    *attributes* of its name. They stay the same objects, and what is computed from them is computed
    from what they hold.
    """
    saved = {name: dict(vars(parameter)) for name, parameter in parameters.items()}
    made: list[torch.Tensor] = []
    try:
        for name, parameter in parameters.items():
            given = attributes.get(name, {})
            sent = {key: value for key, value in given.items() if not isinstance(value, Unsent)}
            vars(parameter).update(deepcopy(sent))
            vars(parameter)[_UNSENT] = {k: v for k, v in given.items() if k not in sent}
            _stand_in(parameter, torch.empty(shapes[name], device="meta"), made)
        yield
    finally:
        for tensor in made:
            tensor.__class__ = torch.Tensor
            vars(tensor).clear()
        for name, parameter in parameters.items():
            parameter.__class__ = nn.Parameter
            vars(parameter).clear()
            vars(parameter).update(saved[name])


def _stand_in(tensor: torch.Tensor, outline: torch.Tensor, made: list[torch.Tensor]) -> None:
    vars(tensor).update({_OUTLINE: outline, _MADE: made})
    tensor.__class__ = _StandIn

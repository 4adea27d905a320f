"""Hooks of the model: which survive a capture, and refusal of those that would vanish.

A hook that returns a gradient becomes operations of the graph. A hook that returns nothing only
observes: it would run once, during the capture, and never again.
"""
# ruff: noqa: SLF001 (private state of modules and tensors has no public accessor)

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from piper.capture.surroundings import InThisThread
from piper.errors import CaptureError

Hook: TypeAlias = Callable[..., object]


def refuse_parameter_hooks(model: nn.Module) -> None:
    """Raise :class:`CaptureError` naming a parameter that carries a hook."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise CaptureError(
                f"parameter {name!r} has a gradient hook, which distributed training would bypass. "
                f"Remove it; transform the gradient in the optimizer, or hook the module or the "
                f"activation instead"
            )


@contextmanager
def watched_hooks(modules: Sequence[nn.Module]) -> Iterator[None]:
    """While a model is captured, refuse backward hooks that return nothing, and re-entrant
    checkpoints.

    Inside a re-entrant checkpoint nothing would get a gradient.
    The hook dictionaries of *modules* are replaced; the caller restores them.
    """
    for module in modules:
        what = f"a backward hook of module {type(module).__name__}"
        for attribute in ("_backward_hooks", "_backward_pre_hooks"):
            hooks: dict[int, Hook] = vars(module)[attribute]
            for key, hook in hooks.items():
                hooks[key] = _must_return(hook, what)
    original, apply, here = torch.Tensor.register_hook, CheckpointFunction.apply, InThisThread()

    def register_hook(self: torch.Tensor, hook: Hook) -> RemovableHandle:
        watched = _must_return(hook, "a tensor hook") if here else hook
        handle: RemovableHandle = original(self, watched)  # type: ignore[no-untyped-call]
        return handle

    def refuse_reentry(*args: object) -> object:
        return _refuse_reentry() if here else apply(*args)  # type: ignore[no-untyped-call]

    torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
    CheckpointFunction.apply = refuse_reentry  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.register_hook = original  # type: ignore[method-assign]
        del CheckpointFunction.apply  # the inherited one shows again


def _refuse_reentry() -> object:
    raise CaptureError(
        "re-entrant checkpointing cannot be captured. Call torch.utils.checkpoint.checkpoint(..., "
        "use_reentrant=False), or leave checkpointing out and use piper.Recompute"
    )


def _must_return(hook: Hook, what: str) -> Hook:
    @wraps(hook)
    def watched(*args: object) -> object:
        result = hook(*args)
        if result is None:
            name = getattr(hook, "__qualname__", repr(hook))
            raise CaptureError(
                f"{what} ({name}) returns nothing: it would run during the capture only and never "
                f"during training. Remove it, or return the gradient"
            )
        return result

    return watched

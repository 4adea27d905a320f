"""Refusal of models that something else distributes, compiles or scripts already."""

from torch import nn

from piper.errors import CaptureError


def refuse_wrapped(model: nn.Module) -> None:
    """Raise :class:`CaptureError`, with what to pass instead, if *model* or a module of it is a
    wrapper that would do piper's work, or hides the code that is to be traced.
    """
    for name, module in model.named_modules():
        kinds = {cls.__qualname__ for cls in type(module).__mro__ if _is_torch(cls)}
        for kind, (what, remedy) in _WRAPPERS.items():
            if kind in kinds:
                here = f"module {name!r} of the model" if name else "the model"
                raise CaptureError(
                    f"{here} is a {type(module).__name__}, {what}: {remedy.format(model=name or 'model')}"
                )


def _is_torch(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "torch"


_DISTRIBUTED = "which replicates or shards by itself"
_INSIDE = "pass what it wraps, {model}.module; Replicate says what is replicated and sharded"
_WRAPPERS = {
    "DataParallel": (_DISTRIBUTED, _INSIDE),
    "DistributedDataParallel": (_DISTRIBUTED, _INSIDE),
    "FullyShardedDataParallel": (_DISTRIBUTED, _INSIDE),
    "FSDPModule": (
        _DISTRIBUTED,
        "pass the model as it is before fully_shard; Replicate(shard_params=True) does the same",
    ),
    "OptimizedModule": (
        "made by torch.compile",
        "pass what it wraps, {model}._orig_mod; piper.compile(compile=True) compiles each chunk",
    ),
    "ScriptModule": (
        "whose Python code is gone",
        "pass the nn.Module that was scripted or traced",
    ),
}
"""Classes of torch by name, since some are in parts that need not be installed: what such a module
is, and what to do.
"""

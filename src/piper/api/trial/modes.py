"""Modules in evaluation mode that are being trained."""

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from piper.boundary import warn


def warn_of_evaluation_mode(model: nn.Module) -> None:
    """Warn, once, if dropout or batch statistics of a part of *model* that is trained are off,
    because the part is in evaluation mode (as ``from_pretrained`` returns models).

    A frozen part may be in evaluation mode, and batch norms alone inside a part that is in training
    mode: both are done on purpose.
    """
    found = [
        f"{name or 'the model'} ({type(module).__name__})" for name, module in _switched_off(model)
    ]
    if not found:
        return
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    warn(
        f"{'the model is' if not model.training else 'parts of the model are'} in evaluation mode, so dropout and batch statistics are off in training: "
        f"{', '.join(found[:4])}{more}. Call model.train() before piper.compile, or freeze that part (requires_grad_(False)) if it is meant"
    )


def _switched_off(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    for name, module in model.named_modules():
        if module.training:
            continue
        if _drops(module) and _is_trained(module, parents):
            yield name, module
        parent = parents.get(module, module)
        if _has_statistics(module) and not parent.training and _is_trained(parent, parents):
            yield name, module


def _drops(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    own = vars(module).items()
    return any("drop" in k and isinstance(v, float) and 0 < v < 1 for k, v in own)


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.track_running_stats


def _is_trained(module: nn.Module, parents: dict[nn.Module, nn.Module]) -> bool:
    """Whether the smallest part with parameters around *module* has one that is trained."""
    around: nn.Module | None = module
    while around is not None:
        if any(True for _ in around.parameters()):
            return any(p.requires_grad for p in around.parameters())
        around = parents.get(around)
    return False

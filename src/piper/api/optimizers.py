"""The optimizer as a user gives it, and what only the user's own model can tell about it."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from piper.devices.tensors import dtype_name
from piper.dtypes import DType
from piper.errors import ConfigError, expect
from piper.ir.body import TensorSpec
from piper.ir.dag import Parameter
from piper.runtime.device_optimizer import DeviceOptimizer, build_over, outline
from piper.runtime.global_random import same_random_numbers
from piper.runtime.optimizer import Optimizers, OptimizerSpec
from piper.runtime.stand_in import Unsent


def optimizer_spec(
    model: nn.Module,
    optimizer: Optimizers | None,
    param_groups: Iterable[Mapping[str, object]] | None,
) -> OptimizerSpec | None:
    """What workers need to make the optimizer of *model*. Raises :class:`ConfigError` for an
    *optimizer* that is neither a function nor a mapping to some.
    """
    expect(model, nn.Module, "model", "give an instance, not its class or its forward")
    if optimizer is None:
        return None
    groups = None if param_groups is None else tuple(param_groups)
    attributes = {
        name: found
        for name, parameter in model.named_parameters()
        if (found := {key: _sent(value) for key, value in vars(parameter).items()})
    }
    return OptimizerSpec(build=optimizer, param_groups=groups, attributes=attributes)


def require_same_groups(spec: OptimizerSpec | None, model: nn.Module) -> None:
    """Raise :class:`ConfigError` for an optimizer that makes other groups of *model*'s own
    parameters than of others that look the same, as those that devices hold do: then it knows them
    by identity.
    """
    described = described_parameters(model)
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if spec is None or not own or any(p.is_meta for p in own.values()):
        return
    with same_random_numbers():
        others, found = outline(spec, described), build_over(spec, described, own)
    if _groups(others) == _groups(found):
        return
    wanted = {name: options for names, options in _groups(found) for name in names}
    given = {name: options for names, options in _groups(others) for name in names}
    changed = next((name for name in wanted if wanted[name] != given.get(name)), next(iter(wanted)))
    raise ConfigError(
        f"optimizer= makes other groups of the model's own parameters than of others of the same shapes, types and attributes: {changed!r} gets "
        f"{_difference(wanted[changed], given.get(changed, {}))}. Devices hold parameters of their own, so a function may look at what a parameter is, not at "
        'which object it is (id(p), "in" a set, names found in the model), and must do the same in each call: give options by names with '
        "param_groups=, or optimizer={pattern: function}"
    )


def described_parameters(model: nn.Module) -> dict[str, Parameter]:
    """*model*'s parameters under their first names, as they are: not yet in a type that a precision
    gives them. Nothing if some have no shape yet.
    """
    named = dict(model.named_parameters())
    if any(is_lazy(p) for p in named.values()):
        return {}
    return {
        name: Parameter(
            name, TensorSpec(tuple(p.shape), DType(dtype_name(p.dtype))), p.requires_grad
        )
        for name, p in named.items()
    }


def _sent(value: object) -> object:
    return value if _is_plain(value) else Unsent(type(value).__name__)


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.Size))


def _groups(found: DeviceOptimizer) -> list[tuple[tuple[str, ...], dict[str, object]]]:
    options = [{k: _comparable(v) for k, v in group.items()} for group in found.options()]
    return list(zip(found.group_names, options, strict=True))


def _comparable(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, (tuple, list)):
        return [_comparable(item) for item in value]
    return value


def _difference(wanted: Mapping[str, object], given: Mapping[str, object]) -> str:
    for key in wanted:
        if wanted[key] != given.get(key):
            return f"{key}={wanted[key]!r:.60} among its own, {key}={given.get(key)!r:.60} among others"
    return "another group, or another place in it"

"""The optimizer of one device, over the parameters or slices that it holds.

What a user's function does with parameters (groups by their shape, options by their place in the
list) is to be what it does with the model's. So on every device it is given one tensor for each
trained parameter of the model, in the model's order, that has the model's shape; those that the
device does not hold are taken out of the result.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer

from piper.devices.tensors import torch_dtype
from piper.errors import ConfigError
from piper.ir.dag import ElementTypes, Parameter, master_dtype
from piper.runtime.optimizer import (
    OptimizerFactory,
    OptimizerSpec,
    ParamsArgument,
    assigned,
    check_optimizer_class,
    check_options,
    group_parameters,
    per_element,
)
from piper.runtime.slices import Slice
from piper.runtime.stand_in import standing_in


@dataclass(frozen=True, slots=True)
class Part:
    """One optimizer of torch's. ``names`` are the parameters of each of its groups, held by this
    device or not; ``groups`` all of its groups (the optimizer itself has those with parameters that
    are held).
    """

    optimizer: Optimizer
    names: tuple[tuple[str, ...], ...]
    groups: tuple[dict[str, object], ...]
    held: frozenset[str]


class DeviceOptimizer:
    """One or more optimizers that together update the parameters of a device.

    All devices have the same groups, those of all optimizers one after the other. Learning rates
    are the options ``lr`` times a factor, at first 1.
    """

    def __init__(self, parts: Sequence[Part], held: Mapping[str, nn.Parameter]) -> None:
        self.parts, self._held = tuple(parts), dict(held)
        self._factor = 1.0
        self._base_rates = self._rates()

    @property
    def kind(self) -> str:
        """The class of the optimizer, or of each, with its module."""
        kinds = (type(part.optimizer) for part in self.parts)
        return " + ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)

    @property
    def groups(self) -> tuple[dict[str, object], ...]:
        """All groups."""
        return tuple(group for part in self.parts for group in part.groups)

    @property
    def group_names(self) -> list[tuple[str, ...]]:
        """The parameters of each group, held by this device or not."""
        return [names for part in self.parts for names in part.names]

    def step(self, names: Iterable[str]) -> None:
        """Let those optimizers step that update some of the parameters *names*."""
        updated = frozenset(names)
        for part in self.parts:
            if part.held & updated:
                part.optimizer.step()

    def set_factor(self, factor: float) -> None:
        """Make every learning rate *factor* times what the groups' options say."""
        if factor == self._factor:
            return
        self._factor = factor
        for group, rate in zip(self.groups, self._base_rates, strict=True):
            if rate is not None:
                group["lr"] = rate * factor

    def state(self, name: str) -> dict[str, object] | None:
        """What is kept for a parameter that this device holds, if anything."""
        parameter = self._held[name]
        for part in self.parts:
            if name in part.held and parameter in part.optimizer.state:
                return cast("dict[str, object]", part.optimizer.state[parameter])
        return None

    def states(self) -> list[object]:
        """What is kept for all parameters: the objects themselves."""
        return [state for part in self.parts for state in part.optimizer.state.values()]

    def options(self) -> tuple[dict[str, object], ...]:
        """Copies of the options of each group, on the CPU; learning rates before the factor."""
        found = tuple(
            {key: copied(value) for key, value in group.items() if key != "params"}
            for group in self.groups
        )
        for group, rate in zip(found, self._base_rates, strict=True):
            if rate is not None:
                group["lr"] = copied(rate)
        return found

    def restore(
        self,
        state: Mapping[str, Mapping[str, object]],
        options: Sequence[Mapping[str, object]],
    ) -> None:
        """Replace the state of all parameters and the options of all groups."""
        for part in self.parts:
            part.optimizer.state.clear()
            for name in part.held & state.keys():
                part.optimizer.state[self._held[name]] = dict(state[name])
        for group, saved in zip(self.groups, options, strict=True):
            group.update({key: copied(value) for key, value in saved.items()})
        self._factor, self._base_rates = 1.0, self._rates()

    def _rates(self) -> list[float | torch.Tensor | None]:
        return [cast("float | torch.Tensor | None", group.get("lr")) for group in self.groups]


def build_optimizer(
    spec: OptimizerSpec,
    model: Mapping[str, Parameter],
    held: Mapping[str, nn.Parameter],
    slices: Mapping[str, Slice] | None = None,
    types: ElementTypes | None = None,
) -> DeviceOptimizer:
    """The optimizer over *held*, which are (parts of) some of the trained parameters that *model*
    describes; *slices* says which parts, *types* in which types parameters are updated.

    Nothing of it is shared with the function that made it or with another device: options and
    state are copies. Raises :class:`ConfigError` for a function that fails, for an optimizer that
    cannot serve, or has other tensors than it was given, and what :func:`group_parameters` raises.
    """
    trained = [p for p in model.values() if p.requires_grad]
    shapes = {p.name: _shape(p) for p in trained}
    device = next((t.device for t in held.values()), torch.device("cpu"))
    everything = {
        p.name: held[p.name] if p.name in held else _absent(p, types, device) for p in trained
    }
    with standing_in(everything, shapes, spec.attributes):
        made = [
            (_make(factory, names, spec, model, everything), names)
            for factory, names in assigned(spec, model)
        ]
    parts = []
    for optimizer, names in made:
        grouped = _grouped(optimizer, {name: everything[name] for name in names})
        _own_options(optimizer)
        for name in names:
            _own_state(optimizer, everything[name], shapes[name], (slices or {}).get(name))
        parts.append(_without_absent(optimizer, grouped, held, everything))
    return DeviceOptimizer(parts, held)


def build_over(
    spec: OptimizerSpec, model: Mapping[str, Parameter], own: Mapping[str, nn.Parameter]
) -> DeviceOptimizer:
    """The optimizer over all trained parameters of *model*, as it is made in one process; it may
    share options and state with the function that makes it, and is only to be looked at.
    """
    parts = []
    for factory, names in assigned(spec, model):
        optimizer = _make(factory, names, spec, model, own)
        grouped = _grouped(optimizer, {name: own[name] for name in names})
        parts.append(Part(optimizer, grouped, tuple(optimizer.param_groups), frozenset(names)))
    return DeviceOptimizer(parts, own)


def outline(spec: OptimizerSpec, model: Mapping[str, Parameter]) -> DeviceOptimizer:
    """The optimizer of a device that holds nothing: its groups, their parameters and options."""
    return build_optimizer(spec, model, {})


def copied(value: object) -> object:
    """A copy of an option or an entry of state: of a tensor on the CPU, of lists, tuples and
    mappings with what they hold.
    """
    return _own(value, torch.device("cpu"))


def _make(
    factory: OptimizerFactory,
    names: Sequence[str],
    spec: OptimizerSpec,
    model: Mapping[str, Parameter],
    tensors: Mapping[str, nn.Parameter],
) -> Optimizer:
    mine = frozenset(names)
    argument: ParamsArgument = list[torch.Tensor](tensors[name] for name in names)
    groups = [
        ([name for name in group if name in mine], options)
        for group, options in group_parameters(model, spec.param_groups)
    ]
    if spec.param_groups is not None:
        argument = [
            {**options, "params": [tensors[n] for n in group]} for group, options in groups if group
        ]
    try:
        optimizer = factory(argument)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"optimizer= failed over the {len(names)} trained parameters of the model that it was given ({', '.join(names[:3])}"
            f"{', …' if len(names) > 3 else ''}): {type(error).__name__}: {error}"
        ) from error
    check_optimizer_class(optimizer)
    check_options(optimizer, [options if group else {} for group, options in groups])
    return optimizer


def _grouped(
    optimizer: Optimizer, given: Mapping[str, nn.Parameter]
) -> tuple[tuple[str, ...], ...]:
    """The names of the parameters of each group. Raises :class:`ConfigError` unless they are those
    that were *given*, each once.
    """
    kind = type(optimizer).__name__
    name_of = {id(tensor): name for name, tensor in given.items()}
    found = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    if foreign := [tensor for tensor in found if id(tensor) not in name_of]:
        raise ConfigError(
            f"optimizer= returned {kind} over {len(foreign)} tensors that it was not given, such as one of shape {list(foreign[0].shape)}. "
            "Each device holds its own parameters, or parts of them: build a new optimizer over the argument, such as lambda params: "
            f"{kind}(params, …); groups by names are param_groups=, different optimizers by names optimizer={{pattern: function}}"
        )
    counts = Counter(name_of[id(tensor)] for tensor in found)
    if missing := [name for name in given if name not in counts]:
        raise ConfigError(
            f"optimizer= returned {kind} without {len(missing)} of the {len(given)} parameters that it was given, such as {missing[0]!r}, "
            "which would not be trained: pass all of the argument on, or call requires_grad_(False) on what shall stay as it is; different "
            "optimizers by names are optimizer={pattern: function}"
        )
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ConfigError(
            f"optimizer= returned {kind} that has parameter {twice[0]!r} twice ({len(twice)} such parameters), and would update it twice: "
            "pass each tensor of the argument on once"
        )
    return tuple(
        tuple(name_of[id(tensor)] for tensor in group["params"]) for group in optimizer.param_groups
    )


def _own_options(optimizer: Optimizer) -> None:
    """Let the optimizer share no option with anyone, so that nobody sees it change."""
    for group in optimizer.param_groups:
        group.update({key: _own(value) for key, value in group.items() if key != "params"})
    optimizer.defaults = {key: _own(value) for key, value in optimizer.defaults.items()}


def _own_state(
    optimizer: Optimizer, parameter: nn.Parameter, shape: tuple[int, ...], part: Slice | None
) -> None:
    """The same for what the optimizer keeps for *parameter*; of what was made, or loaded, for the
    whole one of *shape*, the *part* that the device holds.
    """
    if parameter not in optimizer.state:
        return
    entries = optimizer.state[parameter]
    for key, value in entries.items():
        whole = isinstance(value, torch.Tensor) and per_element(key, value, shape)
        if whole and part is not None and tuple(value.shape) != tuple(parameter.shape):
            entries[key] = _own(part.of(value))
        else:
            entries[key] = _own(value)


def _without_absent(
    optimizer: Optimizer,
    names: tuple[tuple[str, ...], ...],
    held: Mapping[str, nn.Parameter],
    everything: Mapping[str, nn.Parameter],
) -> Part:
    groups = tuple(optimizer.param_groups)
    for group, members in zip(groups, names, strict=True):
        group["params"] = [held[name] for name in members if name in held]
        for name in members:
            if name not in held:
                optimizer.state.pop(everything[name], None)
    optimizer.param_groups = [group for group in groups if group["params"]]
    mine = frozenset(name for members in names for name in members if name in held)
    return Part(optimizer, names, groups, mine)


def _absent(parameter: Parameter, types: ElementTypes | None, device: torch.device) -> nn.Parameter:
    dtype = torch_dtype(master_dtype(parameter, types))
    return nn.Parameter(torch.empty(0, dtype=dtype, device=device))


def _shape(parameter: Parameter) -> tuple[int, ...]:
    return tuple(int(str(size)) for size in parameter.spec.shape)


def _own(value: object, device: torch.device | None = None) -> object:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device or value.device, copy=True)
    if type(value) is dict:
        return {key: _own(item, device) for key, item in value.items()}
    if type(value) is list:
        return [_own(item, device) for item in value]
    if type(value) is tuple:
        return tuple(_own(item, device) for item in value)
    return value

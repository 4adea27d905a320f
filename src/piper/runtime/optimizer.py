"""How a user says which optimizer updates which parameters, with which options."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch
from torch.optim import Optimizer

from piper.errors import ConfigError, nearest
from piper.ir.dag import Parameter
from piper.runtime.slices import Slice

ParamsArgument: TypeAlias = list[torch.Tensor] | list[dict[str, object]]
"""What torch's optimizers take first: parameters, or groups of them with options."""

OptimizerFactory: TypeAlias = Callable[[ParamsArgument], Optimizer]

Optimizers: TypeAlias = OptimizerFactory | Mapping[str | tuple[str, ...], OptimizerFactory]
"""A function for all parameters; or functions by pattern of names, or several patterns, of which
the first that matches a parameter decides.
"""


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """How each worker makes its optimizer.

    ``param_groups`` are mappings ``{"names": [pattern, ...], **options}``: shell-style patterns
    over parameter names (any alias of a tied parameter counts). Parameters that no pattern matches
    form the last group, without options of their own. ``observe`` is shown the final gradients, by
    parameter name, before each update. ``attributes`` are what users have set on the model's
    parameters, by name: what ``build`` is given has the same.

    Raises :class:`ConfigError` for a ``build`` that is neither a function nor a mapping to some.
    """

    build: Optimizers
    param_groups: tuple[Mapping[str, object], ...] | None = None
    observe: Callable[[Mapping[str, torch.Tensor], Mapping[str, Slice]], None] | None = None
    attributes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        builds = tuple(self.build.values()) if isinstance(self.build, Mapping) else (self.build,)
        for build in builds:
            if not callable(build):
                raise ConfigError(
                    "optimizer= is a function that makes an optimizer over the tensors that it is given, such as lambda params: "
                    "torch.optim.AdamW(params, lr=3e-4), or a mapping from patterns of parameter names to such functions, found "
                    f"{type(build).__name__}: {build!r:.80}"
                )
        if isinstance(self.build, Mapping):
            _check_keys(self.build)


def _check_keys(build: Mapping[str | tuple[str, ...], OptimizerFactory]) -> None:
    for key in build:
        if not isinstance(key, str) and not (
            isinstance(key, tuple) and key and all(isinstance(pattern, str) for pattern in key)
        ):
            raise ConfigError(
                f"optimizer= maps a pattern of parameter names, or a tuple of patterns, to a function, found the key {key!r:.80}"
            )
    if not build:
        raise ConfigError("optimizer= is an empty mapping; None is for a trainer without optimizer")


STEP = "step"
"""The optimizer's counter."""

_SCALARS = frozenset({STEP, "eta", "mu", "mu_product"})
"""What torch's optimizers keep once per parameter; their shape does not tell for a parameter of no
dimensions.
"""


def per_element(key: str, value: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Whether an entry of the optimizer's state has an element for each one of the parameter, or
    slice, of *shape*, so that it is cut where that is.
    """
    return tuple(value.shape) == tuple(shape) and key not in _SCALARS


def assigned(
    spec: OptimizerSpec, model: Mapping[str, Parameter]
) -> list[tuple[OptimizerFactory, list[str]]]:
    """Each function of *spec* that makes an optimizer, with the names of its parameters, in the
    order of *model*: every trained parameter belongs to the first function with a pattern that
    matches it.

    Raises :class:`ConfigError` for a parameter that none matches, and for a pattern that matches
    nothing, or nothing that an earlier one leaves.
    """
    trained = [p for p in model.values() if p.requires_grad]
    if not isinstance(spec.build, Mapping):
        return [(spec.build, [p.name for p in trained])]
    owner: dict[str, int] = {}
    for number, key in enumerate(spec.build):
        for pattern in (key,) if isinstance(key, str) else key:
            found = [p.name for p in trained if _matches(p, pattern)]
            if not found:
                raise ConfigError(_no_match("optimizer", pattern, model))
            left = [name for name in found if owner.get(name, number) == number]
            if not left:
                raise ConfigError(
                    f"optimizer: all parameters that pattern {pattern!r} matches, such as {found[0]!r}, belong to patterns before it; the first "
                    "pattern that matches decides, so put the more general one last"
                )
            owner.update(dict.fromkeys(left, number))
    if lost := [p.name for p in trained if p.name not in owner]:
        raise ConfigError(
            f"optimizer: no pattern matches parameter {lost[0]!r} ({len(lost)} such parameters); end the mapping with '*' for all others, or "
            "call requires_grad_(False) on what shall not be trained"
        )
    return [
        (build, [p.name for p in trained if owner[p.name] == number])
        for number, build in enumerate(spec.build.values())
    ]


def group_parameters(
    model: Mapping[str, Parameter], param_groups: Sequence[Mapping[str, object]] | None
) -> list[tuple[list[str], dict[str, object]]]:
    """Names and options of each group, in order; the last has the parameters that no pattern
    matches (if any).

    Raises :class:`ConfigError` for a malformed group, a pattern that matches nothing, and a
    parameter in two groups.
    """
    trained = [p for p in model.values() if p.requires_grad]
    owner: dict[str, int] = {}
    groups: list[tuple[list[str], dict[str, object]]] = []
    for number, entry in enumerate(param_groups or ()):
        patterns = _patterns(number, entry)
        options = {key: value for key, value in entry.items() if key not in ("names", "params")}
        names: list[str] = []
        for pattern in patterns:
            found = [p for p in trained if _matches(p, pattern)]
            if not found:
                raise ConfigError(_no_match(f"param_groups[{number}]", pattern, model))
            for parameter in found:
                if owner.setdefault(parameter.name, number) != number:
                    raise ConfigError(
                        f"param_groups[{number}]: parameter {parameter.name!r} is already in "
                        f"param_groups[{owner[parameter.name]}]; make the patterns disjoint"
                    )
                if parameter.name not in names:
                    names.append(parameter.name)
        groups.append((names, options))
    rest = [p.name for p in trained if p.name not in owner]
    return [*groups, (rest, {})] if rest else groups


def _patterns(number: int, entry: Mapping[str, object]) -> list[str]:
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f'param_groups[{number}] must be {{"names": [pattern, ...], **options}}, found {entry!r:.80}'
        )
    patterns = entry.get("names")
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(p, str) for p in patterns):
        raise ConfigError(
            f'param_groups[{number}] must be {{"names": [pattern, ...], **options}} with patterns of parameter names, found names={patterns!r}'
        )
    return list(patterns)


def _matches(parameter: Parameter, pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in (parameter.name, *parameter.aliases))


def _no_match(where: str, pattern: str, model: Mapping[str, Parameter]) -> str:
    frozen = [p.name for p in model.values() if not p.requires_grad and _matches(p, pattern)]
    if frozen:
        return (
            f"{where}: pattern {pattern!r} matches only parameters that do not require a "
            f"gradient ({', '.join(frozen[:3])}); leave them out"
        )
    return (
        f"{where}: pattern {pattern!r} matches no parameter{nearest(pattern, model)}; "
        f"patterns are shell-style, for instance '*.bias'"
    )


def check_options(optimizer: Optimizer, options_of_groups: Sequence[Mapping[str, object]]) -> None:
    """Refuse options of groups that torch's own optimizers would take and never look at."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return
    known = optimizer.defaults
    for number, options in enumerate(options_of_groups):
        if unknown := [name for name in options if name not in known]:
            raise ConfigError(
                f"param_groups[{number}]: {type(optimizer).__name__} has no option {unknown[0]!r}{nearest(unknown[0], known)}; "
                f"its options: {', '.join(known)}"
            )


def check_optimizer_class(optimizer: object) -> None:
    """Raise :class:`ConfigError` for what is no optimizer, or one that evaluates the loss
    itself.
    """
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer= must return a torch.optim.Optimizer, found {type(optimizer).__name__}"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} evaluates the loss itself (its step() needs a closure), which a "
            f"planned step cannot do; use an optimizer whose step() takes no closure"
        )

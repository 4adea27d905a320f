"""How each device makes its optimizer, over the parameters or slices that it holds."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias, cast

import torch
from torch.optim import Optimizer

from piper.errors import ConfigError, nearest
from piper.ir.dag import Parameter
from piper.runtime.slices import Slice

ParamsArgument: TypeAlias = list[torch.Tensor] | list[dict[str, object]]
"""What torch's optimizers take first: parameters, or groups of them with options."""

OptimizerFactory: TypeAlias = Callable[[ParamsArgument], Optimizer]


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """How each worker makes its optimizer.

    ``param_groups`` are mappings ``{"names": [pattern, ...], **options}``: shell-style patterns
    over parameter names (any alias of a tied parameter counts). Parameters that no pattern matches
    form the last group, without options of their own. ``lr_schedule`` maps the step to a factor on
    every group's learning rate. ``observe`` is shown the final gradients, by parameter name, before
    each update.

    Raises :class:`ConfigError` for a ``build`` or an ``lr_schedule`` that cannot be called.
    """

    build: OptimizerFactory
    param_groups: tuple[Mapping[str, object], ...] | None = None
    lr_schedule: Callable[[int], float] | None = None
    observe: Callable[[Mapping[str, torch.Tensor], Mapping[str, Slice]], None] | None = None

    def __post_init__(self) -> None:
        if not callable(self.build):
            found = type(self.build).__name__
            raise ConfigError(
                "optimizer= is a function that makes an optimizer over the tensors that it is given, such as lambda params: "
                f"torch.optim.AdamW(params, lr=3e-4), found {found}: {self.build!r:.80}"
            )
        if self.lr_schedule is not None and not callable(self.lr_schedule):
            raise ConfigError(
                "lr_schedule= is a function from the number of a step to a factor on the learning rates, such as lambda step: "
                f"min(1, (step + 1) / 100), found {type(self.lr_schedule).__name__}"
            )


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


def build_optimizer(
    spec: OptimizerSpec,
    model: Mapping[str, Parameter],
    trained: Mapping[str, torch.nn.Parameter],
) -> Optimizer:
    """The optimizer over *trained*, which are (slices of) some of the parameters that *model*
    describes, in their groups.

    Raises :class:`ConfigError` for an optimizer that cannot serve, and what
    :func:`group_parameters` raises.
    """
    groups = group_parameters(model, spec.param_groups)
    argument: ParamsArgument = cast("list[torch.Tensor]", list(trained.values()))
    if spec.param_groups is not None:
        argument = [
            {**options, "params": [trained[n] for n in names if n in trained]}
            for names, options in groups
        ]
    try:
        optimizer = spec.build(argument)
    except Exception as error:
        count = sum(tensor.numel() for tensor in trained.values())
        raise ConfigError(
            f"optimizer= failed over {len(trained)} tensors of {count} elements in all (a device gives it what it holds; it is tried on small "
            f"ones first): {type(error).__name__}: {error}"
        ) from error
    _check_optimizer(optimizer)
    _check_options(optimizer, groups)
    return optimizer


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
                raise ConfigError(_no_match(number, pattern, model))
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


def _no_match(number: int, pattern: str, model: Mapping[str, Parameter]) -> str:
    frozen = [p.name for p in model.values() if not p.requires_grad and _matches(p, pattern)]
    if frozen:
        return (
            f"param_groups[{number}]: pattern {pattern!r} matches only parameters that do not require a "
            f"gradient ({', '.join(frozen[:3])}); leave them out"
        )
    return (
        f"param_groups[{number}]: pattern {pattern!r} matches no parameter{nearest(pattern, model)}; "
        f"patterns are shell-style, for instance '*.bias'"
    )


def _check_options(
    optimizer: Optimizer, groups: Sequence[tuple[list[str], dict[str, object]]]
) -> None:
    """Refuse options of groups that torch's own optimizers would take and never look at."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return
    known = optimizer.defaults
    for number, (_, options) in enumerate(groups):
        if unknown := [name for name in options if name not in known]:
            raise ConfigError(
                f"param_groups[{number}]: {type(optimizer).__name__} has no option {unknown[0]!r}{nearest(unknown[0], known)}; "
                f"its options: {', '.join(known)}"
            )


def _check_optimizer(optimizer: object) -> None:
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

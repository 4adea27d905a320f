"""Mixed precision: in which element types a model computes, sums gradients, and is updated."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import nn

from piper.boundary import public
from piper.capture.type_names import NAMES, floating_type
from piper.dtypes import DType
from piper.errors import ConfigError, nearest
from piper.ir.dag import ElementTypes

Tree = TypeVar("Tree")


@public
@dataclass(frozen=True, slots=True)
class LossScale:
    """How the loss is scaled so that small gradients survive in float16 (Micikevicius et al.,
    2018): as ``torch.amp.GradScaler`` does.

    Every backward starts from ``scale`` times its usual gradient, and gradients are divided by
    ``scale`` before they are clipped and used. If any of them, anywhere, is not finite, the step
    updates nothing and the scale is multiplied by *backoff*; after *growth_interval* steps in a row
    without that it is multiplied by *growth*. It begins as *init*.

    Raises :class:`ConfigError` for numbers under which that makes no sense.
    """

    init: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        _require("init", self.init, _is_number(self.init) and self.init > 0, "positive")
        _require("growth", self.growth, _is_number(self.growth) and self.growth > 1, "above 1")
        inside = _is_number(self.backoff) and 0 < self.backoff < 1
        _require("backoff", self.backoff, inside, "between 0 and 1")
        whole = isinstance(self.growth_interval, int) and not isinstance(self.growth_interval, bool)
        good = whole and self.growth_interval >= 1
        _require("growth_interval", self.growth_interval, good, "a whole number of at least 1")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _require(field: str, value: object, good: bool, wanted: str) -> None:
    if not good:
        raise ConfigError(
            f"LossScale({field}=…): expected a finite number that is {wanted}, found {value!r}"
        )


@public
@dataclass(frozen=True, slots=True)
class Precision:
    """The element types of training, in the manner of FSDP2's ``MixedPrecisionPolicy``.

    * The model's floating-point parameters are kept in *master*, in which the optimizer updates
      them, and used in *compute*. Frozen ones are kept in *compute* alone.
    * Floating-point tensors among the model's inputs are cast to *compute*; the targets are not.
      Those among the model's outputs are cast to *output* before the loss.
    * What a microbatch adds to a parameter's gradient is cast to *reduce*, each use of the
      parameter by itself, and summed over uses, microbatches and replicas in it. The sum is cast to
      *master* to be clipped and used.
    * Buffers stay as they are; so do complex and integer tensors everywhere. (The running
      statistics of a batch norm must be of the compute type: torch has no kernels for others.)

    What a strategy sums itself, it sums in *reduce*, so that it equals one process to a rounding of
    that. What one kernel sums is rounded to *compute* once, whatever its size: a device that holds
    a part of the experts (:class:`piper.Shard`) multiplies the tokens of all replicas at once,
    where one process does so microbatch by microbatch and adds up in *reduce*. Gradients of experts
    then differ by a rounding of *compute* (in bfloat16 about 3e-3), as they do between any two
    numbers of microbatches; in float64 they are equal.

    ``state_dict`` and checkpoints hold the master weights. *loss_scale* is for float16, whose range
    is too small for many gradients; it is accepted with any type. Containers of outputs must be
    known to ``torch.utils._pytree`` (tuples, lists, dictionaries and the outputs of Hugging Face
    models are). A type may be given by its name (``compute="bfloat16"``, ``"bf16"``).

    Raises :class:`ConfigError` for a type that is not floating-point, a *master* or a *reduce* that
    cannot hold every number of *compute*, and a *loss_scale* with sums in a type shorter than
    float32, in which the unscaled gradients would vanish after all.
    """

    compute: torch.dtype = torch.bfloat16
    reduce: torch.dtype = torch.float32
    master: torch.dtype = torch.float32
    output: torch.dtype = torch.float32
    loss_scale: LossScale | None = None

    def __post_init__(self) -> None:
        for field in ("compute", "reduce", "master", "output"):
            found = floating_type(getattr(self, field), f"Precision({field}=…)")
            object.__setattr__(self, field, found)  # names are accepted, and become types
        for field, why in (
            ("master", "an update would lose what the weights are computed with"),
            ("reduce", "sums would lose what gradients are computed with"),
        ):
            wide = getattr(self, field)
            if not holds(wide, self.compute):
                raise ConfigError(
                    f"Precision: {field} ({wide}) does not hold every number of compute ({self.compute}): {why}; "
                    f"choose a wider {field} or a narrower compute"
                )
        if self.loss_scale is None:
            return
        scale: object = self.loss_scale
        if not isinstance(scale, LossScale):
            raise ConfigError(f"Precision(loss_scale=…): expected a LossScale, found {scale!r}")
        if not holds(self.reduce, torch.float32):
            raise ConfigError(
                f"Precision: with loss_scale gradients are divided by the scale in reduce ({self.reduce}), in which what the scale saved "
                "would vanish; use reduce=torch.float32"
            )

    @property
    def types(self) -> ElementTypes:
        """The types as data."""
        return ElementTypes(
            compute=_named(self.compute),
            reduce=_named(self.reduce),
            master=_named(self.master),
            output=_named(self.output),
        )


PRECISIONS: dict[str, Callable[[], Precision]] = {
    "bf16": Precision,
    "fp16": lambda: Precision(compute=torch.float16, loss_scale=LossScale()),
    "float32": lambda: _all(torch.float32),
    "float64": lambda: _all(torch.float64),
}
"""Policies by name."""

_OF_TYPE = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "float32",
    torch.float64: "float64",
}

PrecisionLike: TypeAlias = Precision | torch.dtype | str | None
"""A policy, the type to compute in or its name, or none: every tensor as the model has it."""


def _all(dtype: torch.dtype) -> Precision:
    return Precision(compute=dtype, reduce=dtype, master=dtype, output=dtype)


def make_precision(precision: PrecisionLike) -> Precision | None:
    """The policy that *precision* is or names.

    Raises :class:`ConfigError` for an unknown name or something else.
    """
    if precision is None or isinstance(precision, Precision):
        return precision
    return PRECISIONS[policy_name(precision)]()


def policy_name(given: torch.dtype | str) -> str:
    """The name in :data:`PRECISIONS` of the policy that computes in a type, whatever that is
    called.

    Raises :class:`ConfigError` for anything else.
    """
    try:
        return _OF_TYPE[floating_type(given, "precision")]
    except ConfigError:
        found: object = given
        hint = ""
        if isinstance(found, str):
            hint = nearest(found, PRECISIONS) or nearest(found, NAMES)
        raise ConfigError(
            f"precision is a piper.Precision, a floating-point type of torch, or the name of one ({', '.join(NAMES)}), or None; "
            f"found {found!r}{hint}"
        ) from None


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every number of *narrow* is one of *wide*."""
    one, other = torch.finfo(wide), torch.finfo(narrow)
    return one.max >= other.max and one.eps <= other.eps


def check_model(model: nn.Module, precision: Precision) -> None:
    """Raise :class:`ConfigError` for a parameter that the master type cannot hold (nothing is
    narrowed silently), and for a batch norm whose statistics, which stay as they are, torch's
    kernels do not take together with weights of the compute type.
    """
    for name, parameter in model.named_parameters():
        if is_cast(parameter) and not holds(precision.master, parameter.dtype):
            raise ConfigError(
                f"parameter {name!r} is {parameter.dtype}, which precision's master type {precision.master} does not hold; convert the "
                f"model first (model.to({precision.master})), or choose master={parameter.dtype}"
            )
    for name, module in model.named_modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):  # noqa: SLF001 (the common base)
            continue
        found = module.running_mean
        if found is not None and module.weight is not None and found.dtype != precision.compute:
            raise ConfigError(
                f"batch norm {name!r} has running statistics of type {found.dtype}, which precision leaves as they are; torch cannot use them "
                f"with weights of type {precision.compute}. Convert its buffers (running_mean, running_var) to {precision.compute}, or use a "
                "norm without statistics"
            )


def is_cast(tensor: torch.Tensor) -> bool:
    """Whether the policy speaks of tensors like *tensor*: not of complex numbers and integers."""
    return tensor.is_floating_point()


def cast(tree: Tree, dtype: torch.dtype) -> Tree:
    """*tree* with its floating-point tensors cast to *dtype*."""
    converted: Tree = pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(dtype) if is_cast(tensor) else tensor, tree
    )
    return converted


def _named(dtype: torch.dtype) -> DType:
    return DType(str(dtype).removeprefix("torch."))

"""What a loss function returned: a mean, or a sum and its weight."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

import torch

from piper.errors import CaptureError

WEIGHT = torch.float64
"""What weights are added up in, whatever type they come in: a sum of truth values is a count, and
counts of int8 or bfloat16 end soon.
"""

_PAIR = (
    "a pair is (sum, weight): the loss summed over what it counts (rows, valid tokens), and how much that is; both are added up over "
    "microbatches and replicas, and the step's loss is their quotient"
)


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a microbatch: scalars. Without a ``weight``, ``value`` is the mean over the rows;
    with one, a sum. The weight is of type :data:`WEIGHT` and carries no gradient.
    """

    value: torch.Tensor
    weight: torch.Tensor | None = None


def read_loss(result: object) -> Loss:
    """What *result*, of a loss function or of a model that computes its own loss, says.

    Accepted are a scalar tensor of a real floating-point type, and a tuple or list of such a sum
    and a weight: a positive number or a real scalar tensor that no trained parameter's gradient
    goes through. Raises :class:`CaptureError` for anything else, with what was probably meant.
    """
    if isinstance(result, torch.Tensor):
        return Loss(_value(result, "loss"))
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise CaptureError(
            f"loss_fn must return a scalar tensor or a pair (sum, weight), found {_described(result)}{_remedy(result)}"
        )
    total, weight = result
    if not isinstance(total, torch.Tensor):
        raise CaptureError(f"the loss sum must be a tensor, found {_described(total)}; {_PAIR}")
    value = _value(total, "loss sum")
    return Loss(value, _weight(weight, value))


def check_weight(weight: float) -> None:
    """Raise :class:`CaptureError` for the weight of a microbatch that counts nothing: a negative or
    infinite one, or none at all.
    """
    if not (weight >= 0 and math.isfinite(weight)):
        raise CaptureError(
            f"the weight of a microbatch's loss must be finite and not negative, found {weight}; {_PAIR}"
        )


def _value(tensor: torch.Tensor, what: str) -> torch.Tensor:
    if tensor.dim() != 0:
        raise CaptureError(
            f"the {what} must be a scalar (no dimensions), found shape {tuple(tensor.shape)}; reduce "
            f"it, for instance with .mean(), or return (sum, weight)"
        )
    if not tensor.is_floating_point():
        raise CaptureError(
            f"the {what} must be a floating-point tensor, found {tensor.dtype}; no gradient goes through integers, and a complex "
            "number is no measure: take .real or .abs() of it"
        )
    return tensor


def _weight(weight: object, loss: torch.Tensor) -> torch.Tensor:
    if isinstance(weight, (Real, torch.SymInt, torch.SymFloat)):
        if isinstance(weight, Real) and not 0 < float(weight) < math.inf:
            raise CaptureError(
                f"the loss weight must be a finite number above 0, found {weight}; {_PAIR}"
            )
        # (torch's stubs do not say that a fill value may be symbolic)
        return loss.new_full((), weight, dtype=WEIGHT)  # type: ignore[arg-type]
    if not isinstance(weight, torch.Tensor):
        raise CaptureError(
            f"the loss weight must be a number or scalar tensor, found {_described(weight)}; {_PAIR}. Return the loss alone if the second "
            "is no weight"
        )
    if weight.dim() != 0:
        raise CaptureError(
            f"the loss weight must be a scalar (no dimensions), found shape {tuple(weight.shape)}; {_PAIR}. Sum it up, or return the loss "
            "alone if the second is no weight"
        )
    if weight.is_complex():
        raise CaptureError(f"the loss weight must be real, found {weight.dtype}; {_PAIR}")
    if weight.requires_grad:
        raise CaptureError(
            f"the loss weight depends on trained parameters (it requires a gradient): {_PAIR}. No gradient goes through a weight. If the "
            "second is a loss, such as an auxiliary one, add it to the first and return the sum of both; if it is a weight, .detach() it"
        )
    return weight.to(WEIGHT)


def _described(found: object) -> str:
    if isinstance(found, type):
        return f"the class {found.__name__}"
    kind = type(found).__name__
    if isinstance(found, torch.Tensor):
        return f"a tensor of shape {tuple(found.shape)}"
    if isinstance(found, Mapping):
        return f"{kind} with {', '.join(repr(str(key)) for key in list(found)[:6])}"
    if isinstance(found, (tuple, list)):
        return f"{kind} of {len(found)}"
    return kind


def _remedy(result: object) -> str:
    if result is None:
        return ": a return statement is missing"
    if isinstance(result, Mapping):
        name = "loss" if "loss" in result else "…"
        return f"; return the tensor to be trained, such as result[{name!r}], alone"
    if isinstance(getattr(result, "loss", None), torch.Tensor):
        return "; return its .loss alone"
    if isinstance(result, (tuple, list)):
        return "; return the tensor to be trained alone, of several losses their (weighted) sum"
    if isinstance(result, (int, float)):
        return "; keep it a tensor, so that gradients go through it (no .item(), no float())"
    return ""

"""How far a result is from the reference."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from piper.brief import brief

FLOOR = 1e-6
"""Norms below this fraction of the largest norm of their kind count as that much: gradients that
are zero by construction are rounding errors, not results.
"""


def _brief_errors(it: "Errors") -> str:
    return f"worst {it.worst:.1e} of {len(it.by_name)}"


@brief(_brief_errors)
@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors by name, ``|a - b| / max(|b|, FLOOR * largest |b|)`` in the 2-norm; a NaN, an
    infinity that the other side does not have, and a tensor that exists on one side only are
    infinitely wrong. Never NaN.
    """

    by_name: Mapping[str, float]

    @property
    def worst(self) -> float:
        """The largest error; 0 when there is nothing to compare."""
        return max(self.by_name.values(), default=0.0)


def compare(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> Errors:
    """Errors of *found* against *expected*, for every name of either."""
    norms = [_norm(t) for t in expected.values()]
    floor = FLOOR * max((n for n in norms if math.isfinite(n)), default=0.0)
    errors: dict[str, float] = {}
    for name in sorted(found.keys() | expected.keys()):
        if name not in found or name not in expected or found[name].shape != expected[name].shape:
            errors[name] = math.inf
        else:
            errors[name] = _error(found[name], expected[name], floor)
    return Errors(errors)


def scalar_error(found: float, expected: float) -> float:
    """Relative error of a scalar; infinite for a NaN."""
    return _error(
        torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), 0.0
    )


def _error(found: torch.Tensor, expected: torch.Tensor, floor: float) -> float:
    if torch.equal(found, expected):
        return 0.0
    wide = torch.complex128 if expected.is_complex() else torch.float64
    distance = _norm(found.to(wide) - expected.to(wide))
    scale = max(_norm(expected), floor)
    if not distance:
        return 0.0
    if not math.isfinite(distance) or not math.isfinite(scale) or not scale:
        return math.inf  # the quotient would be a NaN, which no comparison holds against a result
    return distance / scale


def _norm(tensor: torch.Tensor) -> float:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(tensor.to(wide)))

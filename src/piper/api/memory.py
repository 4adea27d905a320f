"""What a user says about memory, as the planner wants it."""

from collections.abc import Callable, Mapping

import torch

from piper.backends.base import Backend
from piper.backends.inprocess import InProcessBackend
from piper.plan.account import gloo_frame
from piper.planner.budget import Bounds, Limits
from piper.runtime.optimizer import OptimizerSpec
from piper.sizes import Size, to_bytes

_PROBES = (8, 16)
"""Rows of the matrices of 8 columns on which an optimizer is tried."""


def make_limits(
    budget: Size | None,
    receive_bytes: Size | None,
    gather_bytes: Size | None,
    fetch_bytes: Size | None,
    reduce_bytes: Size | None,
) -> Limits:
    """The limits as given. Raises :class:`ConfigError` for a malformed size."""

    def parsed(size: Size | None, what: str) -> int | None:
        return None if size is None else to_bytes(size, what)

    bounds = Bounds(
        parsed(receive_bytes, "receive_bytes"),
        parsed(gather_bytes, "gather_bytes"),
        parsed(fetch_bytes, "fetch_bytes"),
        parsed(reduce_bytes, "reduce_bytes"),
    )
    return Limits(parsed(budget, "memory_budget"), bounds)


def frame_bytes(backend: Backend | str) -> Callable[[int], int]:
    """Bytes that carry a message of so many: threads hand over tensors, processes send frames."""
    threads = backend == "inprocess" or isinstance(backend, InProcessBackend)
    return int if threads else gloo_frame


def optimizer_bytes(spec: OptimizerSpec | None) -> Callable[[int], int]:
    """Bytes of optimizer state for a trained tensor of so many bytes: what the optimizer keeps for
    two small matrices, and in between and beyond in proportion. Of several parameter groups, that
    which keeps the most counts.
    """
    if spec is None:
        return lambda _: 0
    groups: list[Mapping[str, object]] = [{}, *(spec.param_groups or ())]
    options = [{k: v for k, v in group.items() if k != "names"} for group in groups]
    small, large = (max(_state_bytes(spec, o, rows) for o in options) for rows in _PROBES)
    difference = (_PROBES[1] - _PROBES[0]) * 8 * torch.float32.itemsize
    factor = (large - small) / difference
    constant = small - factor * _PROBES[0] * 8 * torch.float32.itemsize
    return lambda nbytes: round(factor * nbytes + constant)


def _state_bytes(spec: OptimizerSpec, options: Mapping[str, object], rows: int) -> int:
    """Bytes of state after a step on one matrix of *rows* rows."""
    parameter = torch.nn.Parameter(torch.ones(rows, 8))
    parameter.grad = torch.ones_like(parameter)
    optimizer = spec.build([{"params": [parameter], **options}])
    optimizer.step()
    state = optimizer.state[parameter].values()
    return sum(v.untyped_storage().nbytes() for v in state if isinstance(v, torch.Tensor))

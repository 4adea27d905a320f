"""What a user says about memory, as the planner wants it."""

from collections.abc import Callable, Mapping
from dataclasses import replace as replace_field

import torch
from msgspec.structs import replace

from piper.backends.base import Backend
from piper.backends.inprocess import InProcessBackend
from piper.dtypes import DType
from piper.errors import ConfigError
from piper.ir.body import TensorSpec
from piper.ir.dag import Parameter
from piper.plan.account import gloo_frame
from piper.planner.budget import Bounds, Limits
from piper.runtime.device_optimizer import DeviceOptimizer, build_optimizer, outline
from piper.runtime.global_random import same_random_numbers
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


def optimizer_bytes(
    spec: OptimizerSpec | None, model: Mapping[str, Parameter] | None = None
) -> Callable[[int], int]:
    """Bytes of optimizer state for a trained tensor of so many bytes: what the optimizer keeps for
    two small matrices, and in between and beyond in proportion. Of several parameter groups of
    *model* (without one: groups by names are tried one by one), that which keeps the most counts.

    Raises :class:`ConfigError` when the optimizer cannot be tried.
    """
    if spec is None:
        return lambda _: 0
    small, large = (_state_bytes(spec, model, rows) for rows in _PROBES)
    difference = (_PROBES[1] - _PROBES[0]) * 8 * torch.float32.itemsize
    factor = (large - small) / difference
    constant = small - factor * _PROBES[0] * 8 * torch.float32.itemsize
    return lambda nbytes: round(factor * nbytes + constant)


def _state_bytes(spec: OptimizerSpec, model: Mapping[str, Parameter] | None, rows: int) -> int:
    """Bytes of state after a step on one matrix of *rows* rows in each group."""
    shape = TensorSpec((rows, 8), DType.FLOAT32)
    if model:
        matrices = {name: replace(p, spec=shape) for name, p in model.items()}
    else:
        numbers = range(1 + len(spec.param_groups or ()))
        matrices = {str(i): Parameter(str(i), shape, requires_grad=True) for i in numbers}
        spec = replace_field(spec, param_groups=_numbered(spec))
    names = [group[0] for group in outline(spec, model or matrices).group_names if group]
    held = {name: torch.nn.Parameter(torch.ones(rows, 8)) for name in names}
    with same_random_numbers():
        try:
            optimizer = build_optimizer(spec, model or matrices, held)
            most = _stepped(optimizer, held)
        except Exception:  # noqa: BLE001 (an optimizer may look at more than it is given here)
            optimizer = build_optimizer(spec, matrices, held)
            most = _stepped(optimizer, held)
    return most


def _numbered(spec: OptimizerSpec) -> tuple[Mapping[str, object], ...] | None:
    """The groups of *spec*, over parameters that are named by the groups' numbers."""
    if spec.param_groups is None:
        return None
    return tuple({**group, "names": [str(i)]} for i, group in enumerate(spec.param_groups))


def _stepped(optimizer: DeviceOptimizer, held: Mapping[str, torch.nn.Parameter]) -> int:
    """The most bytes of state that there are for a parameter after a step."""
    for parameter in held.values():
        parameter.grad = torch.ones_like(parameter)
    try:
        optimizer.step(held)
    except Exception as error:
        raise ConfigError(
            f"optimizer= could not be tried on a matrix, as it must be to know how much memory its state takes (memory_budget=): "
            f"{type(error).__name__}: {error}"
        ) from error
    states = [(optimizer.state(name) or {}).values() for name in held]
    sizes = (
        sum(v.untyped_storage().nbytes() for v in state if isinstance(v, torch.Tensor))
        for state in states
    )
    return max(sizes, default=0)

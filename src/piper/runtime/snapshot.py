"""Copies of the model's state by name, whatever layout they were taken from, and whether one fits a
model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from piper.brief import brief, count
from piper.devices.tensors import dtype_name
from piper.errors import StateError, nearest
from piper.ir.body import TensorSpec
from piper.ir.dag import Buffer, ElementTypes, Parameter
from piper.runtime.slices import Shard


def _brief_optimizer_snapshot(it: "OptimizerSnapshot") -> str:
    return f"state of {count(len(it.state), 'parameter')}, {count(len(it.groups), 'group')}"


@brief(_brief_optimizer_snapshot)
@dataclass(frozen=True, slots=True)
class OptimizerSnapshot:
    """Optimizer state by parameter name, and each group's options (learning rates before the
    schedule's factor).
    """

    state: Mapping[str, Mapping[str, object]]
    groups: tuple[dict[str, object], ...]


def _brief_state_snapshot(it: "StateSnapshot") -> str:
    return f"{count(len(it.parameters), 'parameter')}, {count(len(it.buffers), 'buffer')}, {count(len(it.shards), 'slice')}, {'no' if it.optimizer is None else 'with'} optimizer state"


@brief(_brief_state_snapshot)
@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """Parameters and buffers by their first names, and the optimizer's state. The mappings may read
    a file at each access.

    In a device's part of a snapshot, ``shards`` has the slices that it holds, whose optimizer state
    is that of the slice.
    """

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    optimizer: OptimizerSnapshot | None = None
    shards: dict[str, Shard] = field(default_factory=dict)


def check_tensor(
    kind: str, name: str, tensor: torch.Tensor, spec: TensorSpec, types: ElementTypes | None = None
) -> None:
    """Raise :class:`StateError` unless *tensor* has the shape and type of *spec*; under mixed
    precision any floating-point type does for another.
    """
    found = (tuple(tensor.shape), dtype_name(tensor.dtype))
    if types is not None and spec.dtype.is_real_floating and tensor.is_floating_point():
        found = (found[0], spec.dtype.value)
    if found != (spec.shape, spec.dtype.value):
        raise StateError(
            f"{kind} {name!r}: expected {spec.dtype}{list(spec.shape)}, found {found[1]}{list(found[0])}"
        )


def check_snapshot(
    snapshot: StateSnapshot,
    parameters: Mapping[str, Parameter],
    buffers: Mapping[str, Buffer],
    types: ElementTypes | None = None,
) -> None:
    """Raise :class:`StateError` unless *snapshot* is a complete state of the model (non-persistent
    buffers may be absent). Under mixed precision (*types*) its parameters may be of any
    floating-point type.
    """
    _check_names("parameter", snapshot.parameters, parameters, set(parameters))
    required = {name for name, buffer in buffers.items() if buffer.persistent}
    _check_names("buffer", snapshot.buffers, buffers, required)
    for name, tensor in snapshot.parameters.items():
        check_tensor("parameter", name, tensor, parameters[name].spec, types)
    for name, tensor in snapshot.buffers.items():
        check_tensor("buffer", name, tensor, buffers[name].spec)
    if snapshot.optimizer is not None:
        _check_names("optimizer state of parameter", snapshot.optimizer.state, parameters, set())


def _check_names(kind: str, found: Iterable[str], known: Iterable[str], required: set[str]) -> None:
    names, allowed = set(found), set(known)
    if unexpected := sorted(names - allowed):
        hint = nearest(unexpected[0], allowed)
        raise StateError(f"unexpected {kind} {unexpected[0]!r}{hint} ({len(unexpected)} in all)")
    if missing := sorted(required - names):
        raise StateError(f"missing {kind} {missing[0]!r} ({len(missing)} in all)")

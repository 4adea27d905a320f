"""Snapshots of the model's state: one of what all devices hold, and what one device needs of it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from piper.devices.tensors import torch_dtype
from piper.ir.dag import Dag, ElementTypes, Parameter
from piper.runtime.optimizer import per_element
from piper.runtime.slices import merge_slices
from piper.runtime.snapshot import OptimizerSnapshot, StateSnapshot


def merged_snapshot(parts: Sequence[StateSnapshot], dag: Dag) -> StateSnapshot:
    """The state of which *parts*, one per device, have everything once: slices are joined, and
    under mixed precision all parameters have the master type.
    """
    joined = [*(_without_shards(part) for part in parts), _joined(parts, dag.parameters)]
    return _widened(_union(joined), dag.precision)


def part_of(snapshot: StateSnapshot, names: Sequence[str]) -> StateSnapshot:
    """What a device that holds *names* needs of *snapshot*."""
    wanted = set(names)
    optimizer = snapshot.optimizer
    if optimizer is not None:
        state = {n: s for n, s in optimizer.state.items() if n in wanted}
        optimizer = OptimizerSnapshot(state, optimizer.groups)
    return StateSnapshot(
        {n: t for n, t in snapshot.parameters.items() if n in wanted},
        {n: t for n, t in snapshot.buffers.items() if n in wanted},
        optimizer,
    )


def _joined(parts: Sequence[StateSnapshot], parameters: Mapping[str, Parameter]) -> StateSnapshot:
    """The whole parameters of which *parts* have slices, with their optimizer state."""
    slices: dict[str, dict[tuple[int, int], StateSnapshot]] = {}
    for part in parts:
        for name, shard in part.shards.items():
            slices.setdefault(name, {})[shard.part.experts[0], shard.part.index] = part
    whole: dict[str, torch.Tensor] = {}
    state: dict[str, dict[str, object]] = {}
    for name, by_index in slices.items():
        ordered = [by_index[i] for i in sorted(by_index)]
        shape = [int(str(d)) for d in parameters[name].spec.shape]
        whole[name] = merge_slices([p.shards[name].tensor for p in ordered], shape)
        lengths = [tuple(p.shards[name].tensor.shape) for p in ordered]
        entries = [
            p.optimizer.state[name] for p in ordered if p.optimizer and name in p.optimizer.state
        ]
        if entries:
            state[name] = {
                key: _joined_entry(key, [e[key] for e in entries], lengths, shape)
                for key in entries[0]
            }
    groups = next((p.optimizer.groups for p in parts if p.optimizer is not None), None)
    return StateSnapshot(whole, {}, None if groups is None else OptimizerSnapshot(state, groups))


def _joined_entry(
    key: str,
    values: Sequence[object],
    lengths: Sequence[tuple[int, ...]],
    shape: Sequence[int],
) -> object:
    """One entry of the optimizer's state from those of all slices; what is no tensor of elements is
    the same for all.
    """
    tensors = [
        value
        for value, length in zip(values, lengths, strict=False)
        if isinstance(value, torch.Tensor) and per_element(key, value, length)
    ]
    return merge_slices(tensors, shape) if len(tensors) == len(values) else values[0]


def _without_shards(part: StateSnapshot) -> StateSnapshot:
    optimizer = part.optimizer
    if optimizer is not None:
        state = {n: s for n, s in optimizer.state.items() if n not in part.shards}
        optimizer = OptimizerSnapshot(state, optimizer.groups)
    return StateSnapshot(part.parameters, part.buffers, optimizer)


def _union(parts: Sequence[StateSnapshot]) -> StateSnapshot:
    parameters: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    state: dict[str, Mapping[str, object]] = {}
    groups: tuple[dict[str, object], ...] | None = None
    for part in parts:
        parameters |= part.parameters
        buffers |= part.buffers
        if part.optimizer is not None:
            state |= part.optimizer.state
            groups = part.optimizer.groups if groups is None else groups
    optimizer = None if groups is None else OptimizerSnapshot(state, groups)
    return StateSnapshot(parameters, buffers, optimizer)


def _widened(snapshot: StateSnapshot, types: ElementTypes | None) -> StateSnapshot:
    """*snapshot* with all floating-point parameters in the master type; frozen ones are kept in a
    shorter type.
    """
    if types is None:
        return snapshot
    master = torch_dtype(types.master)
    parameters = {
        n: t.to(master) if t.is_floating_point() else t for n, t in snapshot.parameters.items()
    }
    return replace(snapshot, parameters=parameters)

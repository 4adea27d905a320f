"""Writing a checkpoint: each device its file, the driver the index."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path

import torch

from piper.devices.tensors import dtype_name
from piper.errors import CheckpointError
from piper.runtime.checkpoint.index import (
    FORMAT,
    VERSION,
    Entry,
    FileInfo,
    Group,
    Index,
    OptimizerIndex,
    Piece,
)
from piper.runtime.checkpoint.values import encode
from piper.runtime.optimizer import per_element
from piper.runtime.slices import Slice
from piper.runtime.state import ModelState
from piper.runtime.tensor_file import (
    TensorSpec,
    in_file_order,
    is_storable,
    write_tensors,
)


class Kind(StrEnum):
    """What a tensor of a checkpoint is."""

    PARAMETER = "parameters"
    BUFFER = "buffers"
    STATE = "optimizer"


@dataclass(frozen=True, slots=True)
class Written:
    """A tensor in a device's file, or a piece of one: *spec* is that of what is stored, *shape*
    that of the whole; *entry* names an entry of the optimizer's state.
    """

    kind: Kind
    name: str
    entry: str
    spec: TensorSpec
    shape: tuple[int, ...]
    start: int = 0


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """What one device wrote, and what it has of the optimizer besides tensors, encoded."""

    info: FileInfo
    tensors: tuple[Written, ...]
    values: dict[str, dict[str, object]]
    optimizer_kind: str | None
    groups: tuple[dict[str, object], ...] | None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a device could not do its part, which left its state as it was."""

    message: str


def file_name(rank: int) -> str:
    """The name of a device's file."""
    return f"device-{rank:04d}.safetensors"


def write_file(
    folder: Path, rank: int, state: ModelState, names: Sequence[str]
) -> WrittenFile | Refusal:
    """Write what *state* holds of the parameters and buffers *names*, with the optimizer's state
    for them, into *folder*.

    The state is read twice, once for the file's header: that costs less than to hold a copy of all
    of it.
    """
    try:
        by_key: dict[str, Written] = {}
        values: dict[str, dict[str, object]] = {}
        for name in names:
            tensors, others = _held(state, name)
            by_key.update((written.spec.key, written) for written, _ in tensors)
            if others:
                values[name] = others
        options = state.snapshot((), optimizer=True).optimizer
        groups = None
        if options is not None:
            groups = tuple(
                {k: encode(v, f"option {k!r} of the optimizer") for k, v in group.items()}
                for group in options.groups
            )
        specs = in_file_order(written.spec for written in by_key.values())
        order = [by_key[spec.key] for spec in specs]
        path = folder / file_name(rank)
        nbytes, digest = write_tensors(path, specs, _stream(state, order))
    except CheckpointError as error:
        return Refusal(str(error))
    except OSError as error:
        return Refusal(
            f"{folder / file_name(rank)}: could not be written: {error.strerror}; a checkpoint needs a folder that the driver and all devices "
            "share, with room for the whole state"
        )
    return WrittenFile(
        FileInfo(file_name(rank), nbytes, digest),
        tuple(order),
        values,
        state.optimizer_kind,
        groups,
    )


def merge_files(
    files: Sequence[WrittenFile],
    group_names: Sequence[Sequence[str]],
    *,
    step: int,
    seed: int,
    lr_factor: float,
    loss_scaler: dict[str, float] | None,
    metadata: dict[str, object],
) -> Index:
    """The index of what the devices wrote. *group_names* are the parameters of each group of the
    optimizer; the values of *metadata* are encoded.
    """
    entries: dict[Kind, dict[str, dict[str, Entry]]] = {kind: {} for kind in Kind}
    tensors = [(number, w) for number, file in enumerate(files) for w in file.tensors]
    tensors.sort(key=lambda pair: _identity(pair[1]))
    for (kind, name, entry), same in groupby(tensors, key=lambda pair: _identity(pair[1])):
        entries[kind].setdefault(name, {})[entry] = _joined(list(same))
    values: dict[str, dict[str, object]] = {}
    for file in files:
        for name, found in file.values.items():
            values.setdefault(name, found)
    optimizer = None
    for file in files:
        if optimizer is None and file.optimizer_kind is not None and file.groups is not None:
            groups = tuple(
                Group(tuple(names), options)
                for names, options in zip(group_names, file.groups, strict=True)
            )
            optimizer = OptimizerIndex(file.optimizer_kind, groups, entries[Kind.STATE], values)
    return Index(
        format=FORMAT,
        version=VERSION,
        step=step,
        seed=seed,
        lr_factor=lr_factor,
        loss_scaler=loss_scaler,
        metadata=metadata,
        files=tuple(file.info for file in files),
        parameters={name: e[""] for name, e in entries[Kind.PARAMETER].items()},
        buffers={name: e[""] for name, e in entries[Kind.BUFFER].items()},
        optimizer=optimizer,
    )


def _identity(written: Written) -> tuple[Kind, str, str]:
    return written.kind, written.name, written.entry


def _joined(pieces: list[tuple[int, Written]]) -> Entry:
    """One tensor of its pieces. Of what several slices of a parameter have (a count of steps) the
    first is taken.
    """
    _, first = pieces[0]
    chosen: list[Piece] = []
    position = 0
    for number, written in sorted(pieces, key=lambda pair: (pair[1].start, pair[0])):
        count = math.prod(written.spec.shape)
        if written.start == position and count:
            chosen.append(Piece(number, written.spec.key, position, count))
            position += count
    assert position == math.prod(first.shape), f"{first.name!r}: nobody wrote element {position}"
    return Entry(dtype_name(first.spec.dtype), first.shape, tuple(chosen))


def _stream(state: ModelState, order: Sequence[Written]) -> Iterator[torch.Tensor]:
    """The tensors in *order*, each copied when it is needed; neighbours of one name share a
    copy.
    """
    for name, group in groupby(order, key=lambda written: written.name):
        tensors, _ = _held(state, name)
        found = {written.spec.key: tensor for written, tensor in tensors}
        for written in group:
            yield found[written.spec.key]


def _held(
    state: ModelState, name: str
) -> tuple[list[tuple[Written, torch.Tensor]], dict[str, object]]:
    """What there is under a parameter's or buffer's name: tensors, and what the optimizer keeps
    besides them, encoded.
    """
    snapshot = state.snapshot((name,), optimizer=True)
    if name in snapshot.buffers:
        return [_written(Kind.BUFFER, name, "", snapshot.buffers[name])], {}
    shard = snapshot.shards.get(name)
    own = snapshot.parameters[name] if shard is None else shard.tensor
    shape = state.shape(name)
    start = 0 if shard is None else _start(shard.part, shape)
    tensors = [_written(Kind.PARAMETER, name, "", own, shape, start)]
    others: dict[str, object] = {}
    entries = {} if snapshot.optimizer is None else snapshot.optimizer.state.get(name, {})
    for key, value in entries.items():
        if not isinstance(value, torch.Tensor):
            others[key] = encode(value, f"entry {key!r} of the optimizer's state for {name!r}")
        elif per_element(key, value, tuple(own.shape)):
            tensors.append(_written(Kind.STATE, name, key, value, shape, start))
        else:
            tensors.append(_written(Kind.STATE, name, key, value))
    return tensors, others


def _written(
    kind: Kind,
    name: str,
    entry: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...] | None = None,
    start: int = 0,
) -> tuple[Written, torch.Tensor]:
    """A description of *tensor*, and itself.

    Raises :class:`CheckpointError` for a tensor that the format cannot hold.
    """
    key = f"{kind}/{name}/{entry}" if entry else f"{kind}/{name}"
    own = tuple(tensor.shape)
    if tensor.layout is not torch.strided or not is_storable(tensor.dtype):
        raise CheckpointError(f"{key}: a {tensor.dtype} tensor ({tensor.layout}) cannot be saved")
    spec = TensorSpec(key, tensor.dtype, own)
    return Written(kind, name, entry, spec, own if shape is None else shape, start), tensor


def _start(part: Slice, shape: tuple[int, ...]) -> int:
    """Where a slice begins among the flattened elements of a tensor of *shape*."""
    return int(part.of(torch.empty(shape, device="meta")).storage_offset())

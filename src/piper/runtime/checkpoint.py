"""Checkpoints: the state of a training as a folder of files, which fits every layout.

Each device writes one safetensors file with the parameters, buffers and optimizer state that it owns, whole or a run of their flattened
elements. ``index.json`` says where each element of each tensor is, and holds the rest: the step, the seed, the optimizer's class and
options, checksums. There is no pickle.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Generic, Self, TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from piper.devices.tensors import torch_dtype
from piper.errors import CheckpointError
from piper.runtime.optimizer import per_element
from piper.runtime.slices import Slice
from piper.runtime.snapshot import OptimizerSnapshot, StateSnapshot
from piper.runtime.state import ModelState
from piper.runtime.tensor_file import (
    TensorSpec,
    file_digest,
    in_file_order,
    is_storable,
    write_tensors,
)

FORMAT = "piper checkpoint"
VERSION = 1
INDEX = "index.json"

T = TypeVar("T")


class FileInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One device's file: its name in the folder, and what it must be."""

    name: str
    nbytes: int
    sha256: str


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Elements ``start`` to ``start + count`` of a flattened tensor: all of tensor *key* of file number *file*."""

    file: int
    key: str
    start: int
    count: int


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor: its pieces, in order, are all of its elements."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A parameter group of the optimizer: its parameters, and its options as :func:`encode` writes them."""

    names: tuple[str, ...]
    options: dict[str, object]


class OptimizerIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The optimizer: its class, its groups, and by parameter the entries of its state: tensors, and other values."""

    kind: str
    groups: tuple[Group, ...]
    tensors: dict[str, dict[str, Entry]]
    values: dict[str, dict[str, object]]


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``index.json``. *step* is the number of steps done, *loss_scaler* that one's state, *metadata* what the user gave, encoded."""

    format: str
    version: int
    step: int
    seed: int
    loss_scaler: dict[str, float] | None
    metadata: dict[str, object]
    files: tuple[FileInfo, ...]
    parameters: dict[str, Entry]
    buffers: dict[str, Entry]
    optimizer: OptimizerIndex | None


class _Head(msgspec.Struct, frozen=True):
    """What every version of the index has."""

    format: str
    version: int


# --- reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk, as :meth:`open` finds it. Tensors are read when they are asked for."""

    path: Path
    index: Index

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """The checkpoint in the folder *path*.

        Raises :class:`CheckpointError` when there is none, or its index is damaged or of another version. The files of tensors are not
        looked at.
        """
        folder = Path(path).absolute()
        try:
            content = (folder / INDEX).read_bytes()
        except OSError as error:
            raise CheckpointError(
                f"{folder}: expected the folder of a checkpoint, with an {INDEX}: {error.strerror}"
            ) from error
        try:
            head = msgspec.json.decode(content, type=_Head)
            if (head.format, head.version) == (FORMAT, VERSION):
                index = msgspec.json.decode(content, type=Index)
                _check_pieces(index)
                return cls(folder, index)
        except (msgspec.DecodeError, ValueError) as error:
            raise CheckpointError(
                f"{folder / INDEX}: expected the index of a checkpoint: {error}; use another checkpoint"
            ) from error
        raise CheckpointError(
            f"{folder}: expected {FORMAT!r}, version {VERSION}, found {head.format!r}, version {head.version}; load it with the version "
            "of piper that wrote it"
        )

    @property
    def step(self) -> int:
        """Steps that had been done."""
        return self.index.step

    @property
    def metadata(self) -> dict[str, object]:
        """What was given to ``save`` as ``metadata``."""
        return {key: decode(value) for key, value in self.index.metadata.items()}

    def weights(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """The named parameters and buffers. May be passed to ``compile`` as ``init``.

        Raises :class:`CheckpointError` for a name that there is not, or a file that cannot be read.
        """
        entries = self.index.parameters | self.index.buffers
        if missing := sorted(set(names) - set(entries)):
            raise CheckpointError(
                f"{self.path}: there is no parameter or buffer {missing[0]!r} ({len(missing)} missing in all)"
            )
        with _Files(self) as files:
            return {name: files.tensor(entries[name]).clone() for name in names}

    def snapshot(self, stack: ExitStack) -> StateSnapshot:
        """All of the state; each tensor is read when it is used, and files stay open until *stack* is closed."""
        files = stack.enter_context(_Files(self))
        return _snapshot(self.index, files.tensor)

    def outline(self) -> StateSnapshot:
        """Like :meth:`snapshot`, but of tensors without elements, on the meta device."""
        return _snapshot(self.index, _without_elements)

    def damage(self, files: Iterable[int]) -> str | None:
        """What is wrong with one of the numbered files, if anything is: missing, cut off, or changed since it was written."""
        for number in files:
            info = self.index.files[number]
            path = self.path / info.name
            try:
                if (found := path.stat().st_size) != info.nbytes:
                    return f"{path}: expected {info.nbytes} bytes, found {found}: the file is truncated or not the one that was written"
                if file_digest(path) != info.sha256:
                    return f"{path}: its contents are not what was written (another SHA-256): the file is damaged"
            except OSError as error:
                return f"{path}: expected a file of the checkpoint that every device can read: {error.strerror}"
        return None


def _check_pieces(index: Index) -> None:
    """Raise :class:`ValueError` unless the pieces of every tensor are all of it."""
    optimizer = index.optimizer
    states = () if optimizer is None else tuple(optimizer.tensors.values())
    for entries in (index.parameters, index.buffers, *states):
        for name, entry in entries.items():
            position = 0
            for piece in entry.pieces:
                if piece.start != position or not 0 <= piece.file < len(index.files):
                    raise ValueError(f"{name!r} has no piece that begins at element {position}")
                position += piece.count
            if position != math.prod(entry.shape):
                raise ValueError(f"{name!r} has {position} elements of {math.prod(entry.shape)}")


class _Files:
    """The files of a checkpoint, opened when first read, mapped into memory; a context manager."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._open: dict[int, safe_open] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def tensor(self, entry: Entry) -> torch.Tensor:
        """The whole tensor; it may be a view of the file.

        Raises :class:`CheckpointError` for a file that cannot be read.
        """
        dtype = torch_dtype(entry.dtype)
        pieces = [self._piece(piece, dtype) for piece in entry.pieces]
        if not pieces:
            return torch.empty(entry.shape, dtype=dtype)
        flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return flat.reshape(entry.shape)

    def _piece(self, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
        name = self._checkpoint.index.files[piece.file].name
        try:
            if piece.file not in self._open:
                file = safe_open(self._checkpoint.path / name, framework="pt")
                self._open[piece.file] = self._stack.enter_context(file)
            found: torch.Tensor = self._open[piece.file].get_tensor(piece.key)  # type: ignore[no-untyped-call]  # safetensors' own
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self._checkpoint.path / name}: could not read {piece.key!r}: {error}"
            ) from error
        flat = found.reshape(-1)
        flat = flat if flat.dtype == dtype else flat.view(dtype)
        if flat.numel() != piece.count:
            raise CheckpointError(
                f"{self._checkpoint.path / name}: {piece.key!r}: expected {piece.count} elements, found {flat.numel()}"
            )
        return flat


class _Lazy(Mapping[str, T], Generic[T]):
    """A mapping whose values are made at each access."""

    def __init__(self, names: Iterable[str], make: Callable[[str], T]) -> None:
        self._names, self._make = dict.fromkeys(names), make

    def __getitem__(self, name: str) -> T:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _snapshot(index: Index, read: Callable[[Entry], torch.Tensor]) -> StateSnapshot:
    optimizer = index.optimizer
    return StateSnapshot(
        _Lazy(index.parameters, lambda name: read(index.parameters[name])),
        _Lazy(index.buffers, lambda name: read(index.buffers[name])),
        None if optimizer is None else _optimizer(optimizer, read),
    )


def _optimizer(index: OptimizerIndex, read: Callable[[Entry], torch.Tensor]) -> OptimizerSnapshot:
    def state(name: str) -> Mapping[str, object]:
        tensors, values = index.tensors.get(name, {}), index.values.get(name, {})
        return _Lazy(
            (*tensors, *values),
            lambda key: read(tensors[key]) if key in tensors else decode(values[key]),
        )

    groups = tuple({k: decode(v) for k, v in group.options.items()} for group in index.groups)
    return OptimizerSnapshot(_Lazy((*index.tensors, *index.values), state), groups)


def _without_elements(entry: Entry) -> torch.Tensor:
    return torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="meta")


# --- writing ---------------------------------------------------------------------------------------


class Kind(StrEnum):
    """What a tensor of a checkpoint is."""

    PARAMETER = "parameters"
    BUFFER = "buffers"
    STATE = "optimizer"


@dataclass(frozen=True, slots=True)
class Written:
    """A tensor in a device's file, or a piece of one: *spec* is that of what is stored, *shape* that of the whole; *entry* names an entry of
    the optimizer's state.
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
    """Write what *state* holds of the parameters and buffers *names*, with the optimizer's state for them, into *folder*.

    The state is read twice, once for the file's header: that costs less than to hold a copy of all of it.
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
    loss_scaler: dict[str, float] | None,
    metadata: dict[str, object],
) -> Index:
    """The index of what the devices wrote. *group_names* are the parameters of each group of the optimizer; the values of *metadata* are
    encoded.
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
    """One tensor of its pieces. Of what several slices of a parameter have (a count of steps) the first is taken."""
    _, first = pieces[0]
    chosen: list[Piece] = []
    position = 0
    for number, written in sorted(pieces, key=lambda pair: (pair[1].start, pair[0])):
        count = math.prod(written.spec.shape)
        if written.start == position and count:
            chosen.append(Piece(number, written.spec.key, position, count))
            position += count
    assert position == math.prod(first.shape), f"{first.name!r}: nobody wrote element {position}"
    return Entry(str(first.spec.dtype).removeprefix("torch."), first.shape, tuple(chosen))


def _stream(state: ModelState, order: Sequence[Written]) -> Iterator[torch.Tensor]:
    """The tensors in *order*, each copied when it is needed; neighbours of one name share a copy."""
    for name, group in groupby(order, key=lambda written: written.name):
        tensors, _ = _held(state, name)
        found = {written.spec.key: tensor for written, tensor in tensors}
        for written in group:
            yield found[written.spec.key]


def _held(
    state: ModelState, name: str
) -> tuple[list[tuple[Written, torch.Tensor]], dict[str, object]]:
    """What there is under a parameter's or buffer's name: tensors, and what the optimizer keeps besides them, encoded."""
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


# --- values that are no tensors of their own -----------------------------------------------------------


def encode(value: object, what: str) -> object:
    """*value* as JSON has it: numbers, texts, ``None``, lists, tuples, mappings with texts as keys, and small tensors, all of which
    :func:`decode` gives back as they were.

    Raises :class:`CheckpointError` for anything else; *what* says what it is.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if type(value) is list:
        return [encode(item, what) for item in value]
    if type(value) is tuple:
        return {"tuple": [encode(item, what) for item in value]}
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return {"mapping": {key: encode(item, what) for key, item in value.items()}}
    if isinstance(value, torch.Tensor) and not value.is_complex():
        numbers = value.detach().cpu().reshape(-1).tolist()
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": dtype, "shape": list(value.shape), "values": encode(numbers, what)}
    raise CheckpointError(
        f"{what} is a {type(value).__qualname__}, which a checkpoint cannot hold: it holds numbers, texts, None, lists, tuples, "
        "mappings with texts as keys, and tensors"
    )


def decode(value: object) -> object:
    """The inverse of :func:`encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    match value:
        case {"float": str(text)}:
            return float(text)
        case {"tuple": list(items)}:
            return tuple(decode(item) for item in items)
        case {"mapping": dict(items)}:
            return {key: decode(item) for key, item in items.items()}
        case {"tensor": str(dtype), "shape": list(shape), "values": list(values)}:
            numbers = [decode(number) for number in values]
            return torch.tensor(numbers, dtype=torch_dtype(dtype)).reshape(shape)
        case _:
            return value

"""Reading a checkpoint: tensors when they are asked for, from files that are mapped into memory."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from piper.boundary import public
from piper.brief import brief, count
from piper.devices.tensors import torch_dtype
from piper.errors import CheckpointError, PiperWarning
from piper.reading import decode_json, open_regular, read_file, reason
from piper.runtime.checkpoint.index import (
    FORMAT,
    INDEX,
    VERSION,
    WITHOUT_DIGEST,
    Entry,
    Head,
    Index,
    OptimizerIndex,
    Piece,
    check_index,
    is_sealed,
)
from piper.runtime.checkpoint.values import check, decode
from piper.runtime.snapshot import OptimizerSnapshot, StateSnapshot
from piper.runtime.tensor_file import (
    file_digest,
)

T = TypeVar("T")


def _brief_checkpoint(it: "Checkpoint") -> str:
    return f"{str(it.path)!r}, {count(it.step, 'step')} done"


@brief(_brief_checkpoint)
@public
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk, as :meth:`open` finds it. Tensors are read when they are asked for."""

    path: Path
    index: Index

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """The checkpoint in the folder *path*.

        Raises :class:`CheckpointError` when there is none, or its index is damaged or of another
        version. The files of tensors are not looked at.
        """
        folder = Path(path).absolute()
        file = folder / INDEX
        failure = f"{folder}: expected the folder of a checkpoint, with an {INDEX}"
        content = read_file(file, failure, CheckpointError, follow_links=False)
        head = decode_json(
            content,
            Head,
            f"{file}: expected the index of a checkpoint",
            CheckpointError,
            whole=False,
        )
        if head.format != FORMAT or head.version not in (WITHOUT_DIGEST, VERSION):
            raise CheckpointError(
                f"{folder}: expected {FORMAT!r}, version {VERSION}, found {head.format!r:.40}, version {head.version!r:.40}; load it with the "
                "version of piper that wrote it"
            )
        index = decode_json(
            content, Index, f"{file}: expected the index of a checkpoint", CheckpointError
        )
        if (index.version == WITHOUT_DIGEST) != (not index.digest):
            raise CheckpointError(
                f"{file}: an index has a digest from version {VERSION} on, this one says version {index.version}; use another checkpoint"
            )
        if index.digest and not is_sealed(content, index.digest):
            raise CheckpointError(
                f"{file}: its contents are not what was written (another SHA-256): the file is damaged; use another checkpoint"
            )
        try:
            check_index(index)
            _check_values(index)
        except ValueError as error:
            raise CheckpointError(
                f"{file}: expected the index of a checkpoint: {error}; use another checkpoint"
            ) from error
        if not index.digest:
            warnings.warn(
                f"{file} was written before it had a digest, so that damage to it may go unnoticed; load it, and save it again",
                PiperWarning,
                stacklevel=2,
            )
        return cls(folder, index)

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

        Raises :class:`CheckpointError` for a name that there is not, or a file that cannot be read or
        is damaged (the checksum of each file that has one of them is compared).
        """
        entries = self.index.parameters | self.index.buffers
        if missing := sorted(set(names) - set(entries)):
            raise CheckpointError(
                f"{self.path}: there is no parameter or buffer {missing[0]!r} ({len(missing)} missing in all)"
            )
        numbers = {piece.file for name in names for piece in entries[name].pieces}
        if (damage := self.damage(sorted(numbers))) is not None:
            raise CheckpointError(damage)
        with _Files(self) as files:
            return {name: files.tensor(entries[name]).clone() for name in names}

    def snapshot(self, stack: ExitStack) -> StateSnapshot:
        """All of the state; each tensor is read when it is used, and files stay open until *stack*
        is closed.
        """
        files = stack.enter_context(_Files(self))
        return _snapshot(self.index, files.tensor)

    def outline(self) -> StateSnapshot:
        """Like :meth:`snapshot`, but of tensors without elements, on the meta device."""
        return _snapshot(self.index, _without_elements)

    def damage(self, files: Iterable[int]) -> str | None:
        """What is wrong with one of the numbered files, if anything is: missing, cut off, or
        changed since it was written.
        """
        for number in files:
            info = self.index.files[number]
            path = self.path / info.name
            try:
                found, digest = file_digest(path, info.nbytes)
                if found != info.nbytes:
                    return f"{path}: expected {info.nbytes} bytes, found {found}: the file is truncated or not the one that was written"
                if digest != info.sha256:
                    return f"{path}: its contents are not what was written (another SHA-256): the file is damaged"
            except OSError as error:
                return f"{path}: expected a file of the checkpoint that every device can read: {reason(error)}"
        return None


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
                path = self._checkpoint.path / name
                os.close(open_regular(path, follow_links=False))
                file = safe_open(path, framework="pt")
                self._open[piece.file] = self._stack.enter_context(file)
            found: torch.Tensor = self._open[piece.file].get_tensor(piece.key)  # type: ignore[no-untyped-call]  # safetensors' own
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self._checkpoint.path / name}: could not read {piece.key!r}: {error}"
            ) from error
        flat = found.reshape(-1)
        # Complex numbers are stored as pairs of real ones.
        if dtype.is_complex and flat.dtype == dtype.to_real() and flat.numel() % 2 == 0:
            flat = flat.view(dtype)
        if flat.dtype != dtype:
            raise CheckpointError(
                f"{self._checkpoint.path / name}: {piece.key!r}: expected elements of type {dtype}, found {flat.dtype}"
            )
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


def _check_values(index: Index) -> None:
    """Raise :class:`ValueError` for an encoded value that is none."""
    values: list[object] = list(index.metadata.values())
    if index.optimizer is not None:
        values += [value for group in index.optimizer.groups for value in group.options.values()]
        values += [v for entries in index.optimizer.values.values() for v in entries.values()]
    for value in values:
        check(value)


def _without_elements(entry: Entry) -> torch.Tensor:
    return torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="meta")

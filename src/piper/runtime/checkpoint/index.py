"""``index.json`` of a checkpoint: where each element of each tensor is, and all that is no
tensor.

It has a digest of itself, and one of every file, so that no damage goes unnoticed. That guards
against accidents, not against a person, who can write another digest too.
"""

import hashlib
import math
import re
from collections.abc import Mapping

import msgspec

from piper.dtypes import DType
from piper.limits import MAX_DIMS, MAX_NUMBER

FORMAT = "piper checkpoint"

VERSION = 2

WITHOUT_DIGEST = 1
"""The version before, whose index has no digest."""

INDEX = "index.json"


class FileInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One device's file: its name in the folder, and what it must be."""

    name: str
    nbytes: int
    sha256: str


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Elements ``start`` to ``start + count`` of a flattened tensor: all of tensor *key* of file
    number *file*.
    """

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
    """A parameter group of the optimizer: its parameters, and its options as
    :func:`~piper.runtime.checkpoint.values.encode` writes them.
    """

    names: tuple[str, ...]
    options: dict[str, object]


class OptimizerIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The optimizer: its class, its groups, and by parameter the entries of its state: tensors, and
    other values.
    """

    kind: str
    groups: tuple[Group, ...]
    tensors: dict[str, dict[str, Entry]]
    values: dict[str, dict[str, object]]


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``index.json``. *step* is the number of steps done, *loss_scaler* that one's state,
    *metadata* what the user gave, encoded, *lr_factor* what multiplies the learning rates. *digest*
    is that of the file, in which it stands as zeros (:func:`seal`); empty before version 2.
    """

    format: str
    version: int
    digest: str = ""
    step: int
    seed: int
    loss_scaler: dict[str, float] | None
    metadata: dict[str, object]
    files: tuple[FileInfo, ...]
    parameters: dict[str, Entry]
    buffers: dict[str, Entry]
    optimizer: OptimizerIndex | None
    lr_factor: float = 1.0


class Head(msgspec.Struct, frozen=True):
    """What every version of the index has."""

    format: str
    version: int


_NO_DIGEST = "0" * 64
_FILE_NAME = re.compile(r"device-[0-9]{4,8}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def seal(index: Index) -> bytes:
    """The file that *index* is, with its digest."""
    open_ = msgspec.structs.replace(index, digest=_NO_DIGEST)
    data = msgspec.json.format(msgspec.json.encode(open_), indent=1)
    digest = hashlib.sha256(data).hexdigest()
    return data.replace(_NO_DIGEST.encode(), digest.encode(), 1)


def is_sealed(data: bytes, digest: str) -> bool:
    """Whether *data*, a file that says that its digest is *digest*, has that digest."""
    if _SHA256.fullmatch(digest) is None:
        return False
    opened = data.replace(digest.encode(), _NO_DIGEST.encode(), 1)
    return hashlib.sha256(opened).hexdigest() == digest


def check_index(index: Index) -> None:
    """Raise :class:`ValueError`, naming the place, unless everything in *index* is possible and
    what it says of files and tensors fits together.
    """
    for name in ("step", "seed"):
        if not -MAX_NUMBER - 1 <= getattr(index, name) <= MAX_NUMBER:
            raise ValueError(f"{name}: expected a number of 64 bits")
    if index.step < 0:
        raise ValueError(f"step: expected 0 or more, found {index.step}")
    if not (math.isfinite(index.lr_factor) and index.lr_factor >= 0):
        raise ValueError(
            f"lr_factor: expected a finite number of at least 0, found {index.lr_factor}"
        )
    _check_files(index)
    room = [info.nbytes for info in index.files]
    used: set[tuple[int, str]] = set()
    _check_entries("parameters", index.parameters, room, used)
    _check_entries("buffers", index.buffers, room, used)
    if index.optimizer is not None:
        _check_optimizer(index.optimizer, index.parameters)
        for name, entries in index.optimizer.tensors.items():
            _check_entries(f"optimizer.tensors of {name!r:.80}", entries, room, used)


def _check_files(index: Index) -> None:
    names: set[str] = set()
    for i, info in enumerate(index.files):
        # A plain name: what is read lies in the checkpoint's folder.
        if _FILE_NAME.fullmatch(info.name) is None or info.name in names:
            raise ValueError(
                f"files[{i}]: expected a name such as 'device-0000.safetensors' that no other file has, found {info.name!r:.80}"
            )
        if not 0 <= info.nbytes <= MAX_NUMBER or _SHA256.fullmatch(info.sha256) is None:
            raise ValueError(f"files[{i}]: expected a number of bytes and a SHA-256")
        names.add(info.name)


def _check_entries(
    where: str, entries: Mapping[str, Entry], room: list[int], used: set[tuple[int, str]]
) -> None:
    """*room* is the number of bytes that each file has left, *used* the tensors that were named."""
    for name, entry in entries.items():
        here = f"{where}: {name!r:.80}"
        if entry.dtype not in DType.__members__.values():
            raise ValueError(f"{here}: unknown element type {entry.dtype!r:.40}")
        if len(entry.shape) > MAX_DIMS or any(not 0 <= n <= MAX_NUMBER for n in entry.shape):
            raise ValueError(f"{here}: expected a shape, found {str(entry.shape)[:80]}")
        itemsize, position = DType(entry.dtype).itemsize, 0
        for piece in entry.pieces:
            if piece.start != position or piece.count < 1 or not 0 <= piece.file < len(room):
                raise ValueError(f"{here} has no piece that begins at element {position}")
            if (piece.file, piece.key) in used:
                raise ValueError(f"{here}: {piece.key!r:.80} of file {piece.file} is another's too")
            used.add((piece.file, piece.key))
            position += piece.count
            room[piece.file] -= piece.count * itemsize
            if room[piece.file] < 0:
                raise ValueError(f"{here}: file {piece.file} has not so many elements")
        if position != math.prod(entry.shape):
            raise ValueError(
                f"{here} has {position} elements of {str(math.prod(entry.shape))[:40]}"
            )


def _check_optimizer(optimizer: OptimizerIndex, parameters: Mapping[str, Entry]) -> None:
    """Of alike parameters of one group the optimizer keeps alike entries."""
    known: set[str] = set()
    for number, group in enumerate(optimizer.groups):
        alike: dict[int, tuple[str, frozenset[str]]] = {}
        for name in group.names:
            if name in known:
                raise ValueError(
                    f"optimizer.groups[{number}]: {name!r:.80} is in another group too"
                )
            known.add(name)
            mine = frozenset((*optimizer.tensors.get(name, {}), *optimizer.values.get(name, {})))
            if not mine or name not in parameters:
                continue  # it was not trained yet; that a parameter is missing is said elsewhere
            other, theirs = alike.setdefault(len(parameters[name].shape), (name, mine))
            if different := sorted(mine ^ theirs):
                raise ValueError(
                    f"optimizer state: {different[0]!r:.40} is there for one of {name!r:.80} and {other!r:.80} only"
                )

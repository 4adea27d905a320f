"""``index.json`` of a checkpoint: where each element of each tensor is, and all that is no
tensor.
"""

import math

import msgspec

FORMAT = "piper checkpoint"

VERSION = 1

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


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``index.json``. *step* is the number of steps done, *loss_scaler* that one's state,
    *metadata* what the user gave, encoded.
    """

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


class Head(msgspec.Struct, frozen=True):
    """What every version of the index has."""

    format: str
    version: int


def check_pieces(index: Index) -> None:
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

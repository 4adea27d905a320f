"""Files of tensors in the safetensors format, written as a stream: only one tensor is in memory at
a time.

The format: eight bytes that hold the length of the header (little-endian), the header (JSON: type,
shape and range of bytes of each tensor), the tensors' bytes one after the other.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from piper.reading import open_regular

_ALIGNMENT = 8

_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names of element types."""

_PARTS: Mapping[torch.dtype, torch.dtype] = {
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
"""Complex numbers are stored as pairs: older readers of the format know no complex type."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What the header says of a tensor."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def is_storable(dtype: torch.dtype) -> bool:
    """Whether tensors of this type can be written."""
    return dtype in _NAMES or dtype in _PARTS


def in_file_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """The order in which tensors are written: larger elements first, so that all are aligned."""
    return sorted(specs, key=lambda spec: -spec.dtype.itemsize)


def write_tensors(
    path: Path, specs: Sequence[TensorSpec], tensors: Iterable[torch.Tensor]
) -> tuple[int, str]:
    """Write *tensors*, which *specs* describe, in order, to a new file and to the disk; the file's
    bytes and SHA-256.

    Raises :class:`OSError`, also when the file exists.
    """
    digest, nbytes = hashlib.sha256(), 0
    with path.open("xb") as file:

        def write(data: bytes | memoryview) -> None:
            nonlocal nbytes
            file.write(data)
            digest.update(data)
            nbytes += len(data)

        write(_header(specs))
        for spec, tensor in zip(specs, tensors, strict=True):
            assert (tensor.dtype, tuple(tensor.shape)) == (spec.dtype, spec.shape), spec.key
            write(_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())
    return nbytes, digest.hexdigest()


def file_digest(path: Path, nbytes: int) -> tuple[int, str]:
    """Bytes and SHA-256 of a regular file, which should have *nbytes*; no SHA-256 (empty) if it has
    another number.

    Raises :class:`OSError` for what is no regular file, also for a symbolic link.
    """
    with os.fdopen(open_regular(path, follow_links=False), "rb") as file:
        found = os.fstat(file.fileno()).st_size
        return found, hashlib.file_digest(file, "sha256").hexdigest() if found == nbytes else ""


def _header(specs: Sequence[TensorSpec]) -> bytes:
    entries: dict[str, object] = {}
    start = 0
    for spec in specs:
        part = _PARTS.get(spec.dtype)
        entries[spec.key] = {
            "dtype": _NAMES[part or spec.dtype],
            "shape": [*spec.shape, 2] if part else list(spec.shape),
            "data_offsets": [start, start + spec.nbytes],
        }
        start += spec.nbytes
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    return flat.view(torch.uint8).numpy().data

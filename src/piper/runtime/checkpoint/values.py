"""Values of a checkpoint that are no tensors of their own, as JSON has them."""

import math
from collections.abc import Mapping

import torch

from piper.devices.tensors import dtype_name, torch_dtype
from piper.dtypes import DType
from piper.errors import CheckpointError
from piper.limits import MAX_DEPTH, MAX_DIMS, MAX_NUMBER


def encode(value: object, what: str) -> object:
    """*value* as JSON has it: numbers, texts, ``None``, lists, tuples, mappings with texts as keys,
    and small tensors, all of which :func:`decode` gives back as they were.

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
        dtype = dtype_name(value.dtype)
        return {"tensor": dtype, "shape": list(value.shape), "values": encode(numbers, what)}
    raise CheckpointError(
        f"{what} is a {type(value).__qualname__}, which a checkpoint cannot hold: it holds numbers, texts, None, lists, tuples, "
        "mappings with texts as keys, and tensors"
    )


def check(value: object) -> None:
    """Raise :class:`ValueError` unless :func:`decode` can make something of *value*."""
    waiting = [(value, 0)]
    while waiting:
        each, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"expected values nested at most {MAX_DEPTH} deep")
        match each:
            case list(items) | {"tuple": list(items)}:
                waiting += [(item, depth + 1) for item in items]
            case {"mapping": dict(named)}:
                waiting += [(item, depth + 1) for item in named.values()]
            case {"float": str(text)} if text in _FLOATS:
                pass
            case {"tensor": str(dtype), "shape": list(shape), "values": list(numbers)}:
                _check_tensor(dtype, shape, numbers)
            case dict():
                raise ValueError(f"expected an encoded value, found {str(each)[:80]}")
            case int() if not isinstance(each, bool) and abs(each) > MAX_WHOLE:
                raise ValueError("expected numbers of less digits")


_FLOATS = frozenset({"inf", "-inf", "nan"})

MAX_WHOLE = 1 << 4096
"""Python's own numbers may be larger than a tensor's."""


def _check_tensor(dtype: str, shape: list[object], numbers: list[object]) -> None:
    if dtype not in DType.__members__.values() or dtype.startswith("complex"):
        raise ValueError(f"unknown element type {dtype!r:.40} of a small tensor")
    sizes = [n for n in shape if isinstance(n, int) and 0 <= n <= MAX_NUMBER]
    if len(sizes) != len(shape) or len(shape) > MAX_DIMS or math.prod(sizes) != len(numbers):
        raise ValueError(f"a small tensor has {len(numbers)} values, shape {str(shape)[:80]}")
    for number in numbers:
        check(number)
    try:
        torch.tensor([decode(number) for number in numbers], dtype=torch_dtype(dtype))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"values of a small tensor: {error}") from error


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

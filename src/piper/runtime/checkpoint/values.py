"""Values of a checkpoint that are no tensors of their own, as JSON has them."""

import math
from collections.abc import Mapping

import torch

from piper.devices.tensors import dtype_name, torch_dtype
from piper.errors import CheckpointError


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

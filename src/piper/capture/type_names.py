"""The names by which users know the floating-point types of torch."""

import torch

from piper.errors import ConfigError, nearest

FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Types that can be computed in."""

NAMES = {
    "float64": torch.float64,
    "fp64": torch.float64,
    "double": torch.float64,
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
    "single": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}
"""By name, in small letters and without ``torch.``."""


def floating_type(given: object, what: str) -> torch.dtype:
    """The type that *given* is or names: ``torch.bfloat16``, ``"torch.bfloat16"``, ``"bfloat16"``,
    ``"bf16"``, ``"BF16"``.

    Raises :class:`ConfigError` for anything else; *what* says where it was given.
    """
    if isinstance(given, torch.dtype) and given in FLOATING:
        return given
    hint = ""
    if isinstance(given, str):
        name = given.strip().lower().removeprefix("torch.")
        if name in NAMES:
            return NAMES[name]
        hint = nearest(name, NAMES)
    raise ConfigError(
        f"{what}: expected a floating-point type of torch ({', '.join(map(str, FLOATING))}) or the name of one, found {given!r}{hint}"
    )

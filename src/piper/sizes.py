"""Numbers of bytes as people write and read them."""

import re
from typing import TypeAlias

from piper.errors import ConfigError
from piper.limits import MAX_NUMBER

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**i for i, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**i for i, prefix in enumerate("kmgt", start=1)},
}

Size: TypeAlias = int | str
"""Bytes, or a text such as ``"512MiB"``."""


def to_bytes(size: Size, what: str) -> int:
    """The number of bytes that *size* says: a number, or one with a unit (B, KiB, MiB, GiB, TiB, or
    kB, MB, GB, TB in powers of 1000).

    Raises :class:`ConfigError`, naming *what*, for anything else or a negative number.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(size).lower())
    if isinstance(size, bool) or found is None or found[2] not in _UNITS:
        raise ConfigError(
            f'{what}: expected bytes, as a number or with a unit such as "512MiB" or "80GB", found {size!r}'
        )
    number = float(found[1]) * _UNITS[found[2]]
    if number > MAX_NUMBER:
        raise ConfigError(f"{what}: expected at most 2^63 bytes, found {size!r:.40}")
    return int(number)


def size_text(nbytes: int) -> str:
    """*nbytes* for people, in powers of 1024: ``"1.5 MiB"``."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"

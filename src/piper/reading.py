"""Reading files that anybody may have written: regular files only, of bounded size, and JSON that
says everything once.
"""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from piper.errors import PiperError
from piper.limits import MAX_DEPTH, MAX_FILE

T = TypeVar("T")


def read_file(
    path: Path,
    failure: str,
    error: type[PiperError],
    *,
    limit: int = MAX_FILE,
    follow_links: bool = True,
    remedy: str = "",
) -> bytes:
    """The contents of a regular file.

    Raises *error*, with the words *failure*, the reason and the *remedy*, for a file that cannot be
    read, a folder, a device, a pipe, a file of more than *limit* bytes and, unless *follow_links*,
    a symbolic link.
    """
    try:
        with os.fdopen(open_regular(path, follow_links=follow_links), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = b"" if size > limit else file.read(limit)
    except (OSError, ValueError) as problem:
        raise error(f"{failure}: {reason(problem)}{remedy}") from problem
    if size > limit:
        raise error(f"{failure}: it has {size} bytes, expected at most {limit}{remedy}")
    return data


def open_regular(path: Path, *, follow_links: bool = True) -> int:
    """A descriptor of a regular file, open for reading.

    Raises :class:`OSError` for anything else, and :class:`ValueError` for a name that there cannot
    be.
    """
    # Opening a pipe waits for a writer, and opening some devices does something.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "expected a regular file, found another kind")
    return descriptor


def reason(problem: OSError | ValueError) -> str:
    """Why a file could not be opened, in the system's words."""
    return problem.strerror or str(problem) if isinstance(problem, OSError) else str(problem)


def decode_json(
    data: bytes, kind: type[T], where: str, error: type[PiperError], *, whole: bool = True
) -> T:
    """*data*, which is JSON, as *kind*. Not *whole*: it may say more, which is not looked at.

    Raises *error*, with the place, for anything else; for what is nested too deeply; and for an
    object that has a name twice.
    """
    try:
        found = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as problem:
        raise error(f"{where}: {problem}") from problem
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise error(f"{where}: not JSON: {problem}") from problem
    except RecursionError as problem:
        raise error(f"{where}: expected values nested at most {MAX_DEPTH} deep") from problem
    # What is as we would write it has no name twice; to look for one otherwise takes longer.
    if whole and not _is_ours(found, data):
        _refuse_twice(data, lambda text: error(f"{where}: {text}"))
    return found


def _is_ours(found: object, data: bytes) -> bool:
    try:
        return msgspec.json.encode(found) == data
    except (RecursionError, ValueError, TypeError, OverflowError):
        return False


def _refuse_twice(data: bytes, make: Callable[[str], PiperError]) -> None:
    def once(pairs: list[tuple[str, object]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise make(f"an object has the name {name!r:.80} twice")
            seen.add(name)

    try:
        # Numbers are not looked at: Python refuses those of thousands of digits.
        json.loads(data, object_pairs_hook=once, parse_int=len, parse_float=len)
    except RecursionError as problem:
        raise make(f"expected values nested at most {MAX_DEPTH} deep") from problem
    except ValueError as problem:
        raise make(f"not JSON: {problem}") from problem

"""Writing pictures."""

from pathlib import Path

from piper.errors import PictureError


def write_text(path: Path, text: str) -> None:
    """Write a file; its folder is made if missing. Raises :class:`PictureError` if that is
    impossible.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> PictureError:
    """What to raise when the system refuses to write *path*."""
    return PictureError(
        f"cannot write {path}: {error.strerror or error}; name a file in a folder that you may write to"
    )

"""Byte-level text: the corpus, its held-out part, and batches drawn from it.

The vocabulary is the 256 bytes, so tokenising is reading. The default corpus is the source of the
Python standard library, which every machine that can run piper already has.
"""

import functools
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from piper.errors import ConfigError

VOCAB_SIZE = 256

# Folders of the standard library that are not its code: other people's packages, tests, and tables
# of characters and help texts written as Python.
_SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "idle_test",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    }
)
_MAX_BLOCK = 64 * 1024


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text as bytes, with the half-open spans ``(start, stop)`` of its two parts.

    The two parts share no byte. ``files`` names where the bytes came from, in order.
    """

    data: NDArray[np.uint8]
    files: tuple[Path, ...]
    train: tuple[tuple[int, int], ...]
    held_out: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBatches:
    """``batches(step) -> (inputs, targets)``, both ``[batch_size, seq_len]`` int64, targets one
    ahead.

    A batch depends on *seed* and *step* alone. Pickling carries only the fields below: the corpus
    is read once per process, when first needed. *files* are paths or glob patterns, relative to the
    current folder; none means the standard library. *max_bytes* caps the corpus; *held_out* is the
    part of it kept for evaluation.
    """

    batch_size: int
    seq_len: int
    seed: int = 0
    files: tuple[str, ...] = ()
    max_bytes: int = 8_000_000
    held_out: float = 0.1

    def __post_init__(self) -> None:
        sizes = {
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "max_bytes": self.max_bytes,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ConfigError(f"{name}: expected an integer >= 1, found {size}")
        if self.seed < 0:
            raise ConfigError(f"seed: expected an integer >= 0, found {self.seed}")

    @property
    def corpus(self) -> Corpus:
        """The text, read once per process.

        Raises:
            ConfigError: a file is missing, unreadable or empty, or there is too little text.
        """
        return load_corpus(self.files, self.max_bytes, self.held_out)

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """The batch of *step* >= 0: windows drawn uniformly from the training part."""
        corpus = self.corpus
        starts = _window_starts(corpus.train, self.seq_len, "training", corpus.files)
        rng = np.random.default_rng([self.seed, step])
        return self._windows(starts[rng.integers(len(starts), size=self.batch_size)])

    def held_out_batches(self, limit: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of non-overlapping held-out windows, the same ones every time.

        Every batch is full. *limit* caps their number; the batches are then spread evenly over the
        held-out text.

        Raises:
            ConfigError: the held-out part is too short for one batch.
        """
        corpus = self.corpus
        starts = _window_starts(
            corpus.held_out, self.seq_len, "held-out", corpus.files, stride=True
        )
        count = len(starts) // self.batch_size
        if count == 0:
            raise ConfigError(
                f"{_origin(corpus.files)}: expected held-out text for a batch of {self.batch_size} "
                f"sequences of {self.seq_len} bytes, found enough for {len(starts)}; give more text "
                "or lower batch_size, seq_len or raise held_out"
            )
        if limit is not None:
            count = min(count, limit)
        chosen = np.linspace(0, len(starts) - 1, count * self.batch_size).astype(np.int64)
        for batch in range(count):
            picked = chosen[batch * self.batch_size : (batch + 1) * self.batch_size]
            yield self._windows(starts[picked])

    def _windows(self, starts: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        rows = self.corpus.data[starts[:, None] + np.arange(self.seq_len + 1)]
        tokens = torch.from_numpy(rows.astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@functools.lru_cache(maxsize=4)
def load_corpus(
    files: tuple[str, ...] = (), max_bytes: int = 8_000_000, held_out: float = 0.1
) -> Corpus:
    """Read the corpus and set its held-out part aside.

    The files follow each other in sorted order, up to *max_bytes*. The text is cut into equal
    blocks of at most 64 KiB, and every ``round(1 / held_out)``-th block is held out.

    Raises:
        ConfigError: naming the path that is missing, unreadable or empty.
    """
    if not 0.0 < held_out <= 0.5:
        raise ConfigError(f"held_out: expected 0 < held_out <= 0.5, found {held_out}")
    paths = _expand(files) if files else standard_library()
    data, used = _read(paths, max_bytes)
    every = round(1 / held_out)
    block = max(1, min(_MAX_BLOCK, len(data) // (2 * every)))
    train, kept = _split(len(data), block, every)
    return Corpus(data=data, files=used, train=train, held_out=kept)


def standard_library() -> tuple[Path, ...]:
    """The ``*.py`` files of the running Python's standard library, sorted, without its tests.

    Raises:
        ConfigError: this Python comes without them.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [
        path.relative_to(root)
        for path in root.rglob("*.py")
        if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts)
    ]
    if not found:
        raise ConfigError(
            f"{root}: expected the standard library's *.py files, found none; "
            "set [data] files to text of your own"
        )
    return tuple(root / path for path in sorted(found, key=Path.as_posix))


def _expand(patterns: tuple[str, ...]) -> tuple[Path, ...]:
    found: set[Path] = set()
    for pattern in patterns:
        names = glob(pattern, recursive=True)  # noqa: PTH207 (Path.glob refuses absolute patterns)
        matches = [Path(name) for name in names] or [Path(pattern)]
        files = [path for path in matches if path.is_file()]
        if not files:
            what = "a folder" if Path(pattern).is_dir() else "nothing"
            raise ConfigError(
                f"{pattern}: expected a text file or a pattern that matches some, found {what}; "
                "correct [data] files"
            )
        found.update(files)
    return tuple(sorted(found, key=Path.as_posix))


def _read(paths: tuple[Path, ...], max_bytes: int) -> tuple[NDArray[np.uint8], tuple[Path, ...]]:
    parts: list[bytes] = []
    total = 0
    for path in paths:
        try:
            with path.open("rb") as file:
                part = file.read(max_bytes - total)
        except OSError as error:
            raise ConfigError(
                f"{path}: expected a readable text file: {error.strerror}; correct [data] files "
                "or the file's permissions"
            ) from error
        parts.append(part)
        total += len(part)
        if total >= max_bytes:
            break
    used = paths[: len(parts)]
    if total == 0:
        raise ConfigError(
            f"{_origin(used)}: expected text, found an empty file; correct [data] files"
        )
    return np.frombuffer(b"".join(parts), dtype=np.uint8), used


def _split(
    size: int, block: int, every: int
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """Spans ``(start, stop)`` of the training and the held-out part of *size* bytes."""
    train: list[tuple[int, int]] = []
    held_out: list[tuple[int, int]] = []
    period = block * every
    for start in range(0, size, period):
        boundary = min(start + period - block, size)
        stop = min(start + period, size)
        train.append((start, boundary))
        if stop > boundary:
            held_out.append((boundary, stop))
    return tuple(train), tuple(held_out)


@functools.lru_cache(maxsize=8)
def _window_starts(
    spans: tuple[tuple[int, int], ...],
    seq_len: int,
    part: str,
    files: tuple[Path, ...],
    stride: bool = False,
) -> NDArray[np.int64]:
    """Where a window of ``seq_len + 1`` bytes may start so that it stays within one span.

    With *stride*, only every *seq_len* bytes, so that no target occurs twice.
    """
    step = seq_len if stride else 1
    starts = [np.arange(start, stop - seq_len, step) for start, stop in spans]
    found = np.concatenate(starts).astype(np.int64)
    if len(found) == 0:
        longest = max(stop - start for start, stop in spans)
        raise ConfigError(
            f"{_origin(files)}: expected {part} text of at least {seq_len + 1} bytes in one piece for "
            f"seq_len={seq_len}, found {longest}; give more text or lower seq_len"
        )
    return found


def _origin(files: tuple[Path, ...]) -> str:
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{files[0]}{more}"

"""The checkpoints of a run: where they are, which are kept, and whether a run may go on from
one.
"""

import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import msgspec

from piper.api.checkpoint import PARTIAL
from piper.api.trainer import Trainer
from piper.errors import ConfigError
from piper.runtime.checkpoint.index import INDEX
from piper.runtime.checkpoint.reader import Checkpoint
from piper.training.config import RunConfig

FOLDER = "checkpoints"
"""In a run's folder."""

_PREFIX = "step-"
_RUN = "run"
"""The entry of a checkpoint's metadata that describes the run."""


@dataclass(frozen=True, slots=True)
class RunCheckpoints:
    """The last *keep* checkpoints of the run described by *description*, in *folder*:
    ``step-00000100`` and so on.
    """

    folder: Path
    keep: int
    description: Mapping[str, object]

    def save(self, trainer: Trainer) -> Path | None:
        """Write a checkpoint, then remove the oldest; its path, or ``None`` if that of this step is
        there already.

        Raises what :meth:`~piper.api.trainer.Trainer.save` raises.
        """
        path = self.folder / f"{_PREFIX}{trainer.steps_done:08d}"
        if path.exists():
            return None
        trainer.save(path, metadata={_RUN: dict(self.description)})
        for _, old in sorted(saved_steps(self.folder).items())[: -self.keep]:
            _remove(old)
        return path

    def remove_unfinished(self) -> None:
        """Remove what a killed run left half written."""
        for path in self.folder.glob(f"{PARTIAL}*"):
            shutil.rmtree(path, ignore_errors=True)


def saved_steps(folder: Path) -> dict[int, Path]:
    """The checkpoints in *folder*, by the number of steps done."""
    found: dict[int, Path] = {}
    for path in folder.glob(f"{_PREFIX}*"):
        number = path.name.removeprefix(_PREFIX)
        if number.isdecimal() and (path / INDEX).is_file():
            found[int(number)] = path
    return found


def find_checkpoint(path: Path) -> Path:
    """*path* itself if it is a checkpoint, else the last one of the run's folder, or folder of
    checkpoints, that it is.

    Raises :class:`ConfigError` when there is none.
    """
    path = path.absolute()
    if (path / INDEX).is_file():
        return path
    for folder in (path / FOLDER, path):
        if steps := saved_steps(folder):
            return steps[max(steps)]
    raise ConfigError(
        f"{path}: expected a checkpoint, or the folder of a run that has one in {FOLDER}/, found none; a run writes them with "
        "train.checkpoint_every"
    )


def describe(config: RunConfig) -> dict[str, object]:
    """What the numbers of a run depend on, by field of its configuration: not where and how it
    runs, nor how long.
    """
    model = msgspec.to_builtins(config.model)
    model.pop("num_stages")
    train = {
        **msgspec.to_builtins(config.train),
        "precision": config.train.precision_as_data(),
    }
    sections: dict[str, dict[str, object]] = {
        "model": model,
        "data": {
            "max_bytes": config.data.max_bytes,
            "held_out": config.data.held_out,
            "text": f"crc32 {zlib.crc32(config.batches().corpus.data.data):08x}",
        },
        "optimizer": msgspec.to_builtins(config.optimizer),
        "train": {name: train[name] for name in _DECISIVE},
    }
    return {
        f"{section}.{name}": value
        for section, fields in sections.items()
        for name, value in fields.items()
    }


_DECISIVE = ("batch_size", "seq_len", "warmup_steps", "max_grad_norm", "precision", "seed")
"""Fields of ``[train]`` on which the numbers depend."""


def check_resumes(
    checkpoint: Checkpoint, description: Mapping[str, object], config: RunConfig
) -> None:
    """Raise :class:`ConfigError` unless *config*, which *description* describes, goes on with the
    run of *checkpoint*, and beyond it.
    """
    saved = checkpoint.metadata.get(_RUN)
    if not isinstance(saved, dict):
        raise ConfigError(
            f"{checkpoint.path}: expected a checkpoint of `piper train`, found one that Trainer.save wrote; load it with Trainer.load"
        )
    for name in sorted({*saved, *description}):
        if saved.get(name) != description.get(name):
            raise ConfigError(
                f"{name}: expected {saved.get(name)!r}, as in the run of {checkpoint.path}, found {description.get(name)!r}: the run would not be "
                "continued, but changed. The strategy, the backend and the number of steps may change; for anything else, use Trainer.load"
            )
    if checkpoint.step >= config.train.steps:
        raise ConfigError(
            f"train.steps: expected more than the {checkpoint.step} steps of {checkpoint.path}, found {config.train.steps}: nothing is left to do"
        )


def check_folder(folder: Path, resumed: Checkpoint | None) -> None:
    """Raise :class:`ConfigError` if the run would mix its checkpoints in *folder* with those of
    another.
    """
    others = saved_steps(folder)
    if not others:
        return
    last = others[max(others)]
    if resumed is None or resumed.path.parent.resolve() != folder.resolve():
        raise ConfigError(
            f"{folder}: there are checkpoints of an earlier run, the last of them {last.name}; go on from it (piper train --resume {last}), choose "
            "another out_dir, or remove them"
        )
    if max(others) > resumed.step:
        raise ConfigError(
            f"{folder}: there are later checkpoints than {resumed.path.name}, the last of them {last.name}; resume from that, choose another "
            "out_dir, or remove them"
        )


def _remove(path: Path) -> None:
    """Remove a checkpoint in such a way that a half removed one is not taken for a whole."""
    doomed = path.parent / f"{PARTIAL}{path.name}-{uuid4().hex[:8]}"
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)

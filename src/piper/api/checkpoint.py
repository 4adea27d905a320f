"""Write checkpoints, and check that one fits before it is loaded."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import torch

from piper.backends.base import Backend
from piper.devices.tensors import torch_dtype
from piper.errors import CheckpointError, StateError
from piper.ir.dag import Dag
from piper.runtime.checkpoint.index import INDEX, seal
from piper.runtime.checkpoint.reader import Checkpoint
from piper.runtime.checkpoint.values import encode
from piper.runtime.checkpoint.writer import merge_files
from piper.runtime.snapshot import check_snapshot

PARTIAL = ".partial-"
"""What the names of folders begin with in which a checkpoint is being written."""


def save_checkpoint(
    path: Path,
    backend: Backend,
    group_names: Sequence[Sequence[str]],
    *,
    step: int,
    seed: int,
    lr_factor: float,
    loss_scaler: dict[str, float] | None,
    metadata: Mapping[str, object],
) -> None:
    """Write the backend's state as a checkpoint *path*: into a folder beside it, which gets its
    name when all is on the disk.

    Raises :class:`CheckpointError`; then there is no folder *path*, and the backend is as before.
    """
    encoded = {key: encode(value, f"metadata[{key!r}]") for key, value in metadata.items()}
    with _new_folder(path) as folder:
        written = backend.write_files(folder)
        for device, file in enumerate(written):
            _require_file(device, folder / file.info.name, file.info.nbytes)
        index = merge_files(
            written,
            group_names,
            step=step,
            seed=seed,
            lr_factor=lr_factor,
            loss_scaler=loss_scaler,
            metadata=encoded,
        )
        with (folder / INDEX).open("xb") as out:
            out.write(seal(index))
            out.flush()
            os.fsync(out.fileno())


def check_fits(checkpoint: Checkpoint, dag: Dag, groups: Sequence[tuple[str, ...]]) -> None:
    """Raise :class:`CheckpointError` unless *checkpoint* has all of the state that a trainer of
    *dag* has whose optimizer has these *groups*, and nothing else. A trainer without optimizer
    takes any.
    """
    try:
        _check_tensors(checkpoint, dag)
        _check_optimizer(checkpoint, groups)
    except StateError as error:
        raise CheckpointError(f"{checkpoint.path}: it does not fit this model: {error}") from error


def _check_tensors(checkpoint: Checkpoint, dag: Dag) -> None:
    outline = checkpoint.outline()
    parameters: dict[str, torch.Tensor] = {}
    for name, tensor in outline.parameters.items():
        parameters[name] = tensor
        if (declared := dag.parameters.get(name)) is None:
            continue
        updated_in = torch_dtype(dag.master_dtype(name))
        if tensor.dtype == updated_in:
            # Under mixed precision that is not the type in which it is read.
            parameters[name] = tensor.to(torch_dtype(declared.spec.dtype))
        elif declared.requires_grad:
            raise StateError(
                f"parameter {name!r} was trained in {tensor.dtype}, and is trained in {updated_in} here; use the same master type "
                "(precision=), or take only the weights with load_state_dict"
            )
        elif torch.promote_types(tensor.dtype, updated_in) == updated_in:
            parameters[name] = tensor.to(updated_in)
    check_snapshot(
        replace(outline, parameters=parameters), dag.parameters, dag.buffers, dag.precision
    )


def _check_optimizer(checkpoint: Checkpoint, names: Sequence[tuple[str, ...]]) -> None:
    saved = checkpoint.index.optimizer
    if not names:
        return
    if saved is None:
        raise StateError(
            "it has no state of an optimizer, which this trainer needs to go on; take only the weights "
            "(init=piper.Checkpoint.open(path).weights)"
        )
    if len(saved.groups) != len(names):
        raise StateError(
            f"its optimizer has {len(saved.groups)} parameter groups, this trainer's {len(names)}; compile with the same param_groups"
        )
    for number, (group, mine) in enumerate(zip(saved.groups, names, strict=True)):
        if different := sorted(set(group.names) ^ set(mine)):
            where = "only in the saved" if different[0] in group.names else "only in this trainer's"
            raise StateError(
                f"parameter {different[0]!r} is {where} parameter group {number} of the optimizer ({len(different)} such parameters); "
                "train the same parameters with the same param_groups"
            )


def _require_file(device: int, path: Path, nbytes: int) -> None:
    """The driver must see what a device wrote, on whatever machine."""
    try:
        found = path.stat().st_size
    except OSError:
        found = None
    if found != nbytes:
        size = "none" if found is None else f"{found} bytes"
        raise CheckpointError(
            f"device {device} wrote {nbytes} bytes to {path}, the driver finds {size}: save to a folder that all machines share"
        )


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, that becomes *path* at the end if nothing was raised, and else is
    removed.
    """
    _refuse_existing(path)
    folder = path.parent / f"{PARTIAL}{path.name}-{uuid4().hex[:8]}"
    try:
        folder.mkdir(parents=True)
        yield folder
        _sync_folder(folder)
        _refuse_existing(path)
        folder.rename(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path}: the checkpoint could not be written: {error.strerror}; choose another path"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refuse_existing(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise CheckpointError(
            f"{path}: expected a path that does not exist yet; checkpoints are never overwritten: choose another, or remove it first"
        )


def _sync_folder(path: Path) -> None:
    """Put the names in a folder on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""The global batch on a worker: its leaves by name, its signature, and one microbatch's rows of a
leaf.

A batch is a pair ``(inputs, targets)``. A tree is any nesting of tuples, lists and mappings;
everything else is a leaf. Leaves are named as in the training DAG: ``inputs``, ``inputs[0]``,
``inputs.mask``, ``targets``.
"""

import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from piper.devices.tensors import dtype_name
from piper.errors import BatchError
from piper.ir.dag import BatchLeaf

Batch: TypeAlias = tuple[object, object]
"""``(inputs, targets)`` of one step, all microbatches and replicas together."""

Data: TypeAlias = Callable[[int], Batch]
"""``data(step) -> (inputs, targets)``; picklable where workers are processes."""

SAMPLES = 4096
"""About how many elements of a tensor its digest looks at."""


@dataclass(frozen=True, slots=True)
class LeafSignature:
    """One leaf. ``kind`` is a tensor's element type (torch's name), with its global ``shape``; else
    the type of the ``constant`` (1, 1.0 and True are equal in Python, but not to a model).
    """

    name: str
    kind: str
    shape: tuple[int, ...] | None = None
    constant: object = None

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.name} = {self.constant!r}"
        return f"{self.name}: {self.kind}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Signature:
    """What a plan was made for: every leaf of the batch, ordered by name."""

    leaves: tuple[LeafSignature, ...]

    def __str__(self) -> str:
        return ", ".join(str(leaf) for leaf in self.leaves)

    def difference(self, found: "Signature") -> str:
        """For people: which leaves of *found* are not what this signature expects."""
        mine = {leaf.name: leaf for leaf in self.leaves}
        theirs = {leaf.name: leaf for leaf in found.leaves}
        lines = [f"missing {mine[name]}" for name in mine if name not in theirs]
        lines += [f"unexpected {theirs[name]}" for name in theirs if name not in mine]
        lines += [
            f"expected {mine[name]}, found {theirs[name]}"
            for name in mine
            if name in theirs and mine[name] != theirs[name]
        ]
        return "; ".join(lines)


def flatten(batch: Batch) -> dict[str, object]:
    """The leaves of *batch* by name.

    Raises :class:`BatchError` when it is not a pair.
    """
    inputs, targets = as_pair(batch)
    return dict((*_leaves("inputs", inputs), *_leaves("targets", targets)))


def as_pair(pair: object) -> Batch:
    """What a user gave as a batch. Raises :class:`BatchError` when it is not a pair."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        size = f" of {len(pair)}" if isinstance(pair, (tuple, list)) else ""
        raise BatchError(
            f"a batch must be a pair (inputs, targets), found {type(pair).__name__}{size}"
        )
    return pair[0], pair[1]


def _leaves(name: str, tree: object) -> Iterator[tuple[str, object]]:
    if isinstance(tree, Mapping):
        for key, child in tree.items():
            yield from _leaves(f"{name}.{key}", child)
    elif isinstance(tree, (tuple, list)):
        for index, child in enumerate(tree):
            yield from _leaves(f"{name}[{index}]", child)
    else:
        yield name, tree


def signature(batch: Batch) -> Signature:
    """The signature of a global batch.

    Raises :class:`BatchError` when it is not a pair, or a leaf is neither a tensor nor hashable.
    """
    return signature_of(flatten(batch))


def signature_of(leaves: Mapping[str, object]) -> Signature:
    """The signature of flattened *leaves*."""
    return Signature(tuple(_leaf_signature(name, leaves[name]) for name in sorted(leaves)))


def digest(leaves: Mapping[str, object]) -> int:
    """32 bits that differ, with near certainty, between batches of different content: a checksum of
    samples of every tensor.
    """
    found = 0
    for name in sorted(leaves):
        leaf = leaves[name]
        if isinstance(leaf, torch.Tensor):
            flat = leaf.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // SAMPLES)].contiguous().cpu()
            found = zlib.crc32(sample.view(torch.uint8).numpy().tobytes(), found)
    return found


def _leaf_signature(name: str, leaf: object) -> LeafSignature:
    if isinstance(leaf, torch.Tensor):
        return LeafSignature(name, dtype_name(leaf.dtype), tuple(leaf.shape))
    kind = type(leaf).__name__
    if not isinstance(leaf, Hashable):
        raise BatchError(
            f"batch leaf {name!r} is a {kind}, which is neither a tensor nor a constant that can be compared; make it a "
            f"torch tensor (torch.as_tensor)"
        )
    return LeafSignature(name, kind, constant=leaf)


def microbatch_rows(
    leaf: BatchLeaf, tensor: torch.Tensor, microbatch: int, count: int
) -> torch.Tensor:
    """Rows of global microbatch number *microbatch* of *count*; the whole tensor if it is not
    split.

    A view of *tensor*, contiguous where it is split on dimension 0.
    """
    if leaf.batch_dim is None:
        return tensor
    rows, rest = divmod(tensor.shape[leaf.batch_dim], count)
    if rest:
        raise BatchError(
            f"batch tensor {leaf.name!r} has {tensor.shape[leaf.batch_dim]} rows, which {count} "
            f"microbatches (all replicas together) do not divide; give a multiple of {count}"
        )
    return tensor.narrow(leaf.batch_dim, microbatch * rows, rows)


@dataclass(frozen=True, slots=True)
class FixedBatches:
    """Data that was given explicitly: the batch of step ``first_step + i`` is ``batches[i]``."""

    first_step: int
    batches: Sequence[Batch]

    def __call__(self, step: int) -> Batch:
        """The batch of *step*."""
        return self.batches[step - self.first_step]

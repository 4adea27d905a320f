"""The example batch: inputs and targets flattened into named leaves.

A tree is any nesting of tuples, named tuples, lists and mappings; everything else is a leaf. The
same flattening, in the same order, serves the capture and every later step.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from piper.errors import CaptureError, nearest

Tree: TypeAlias = object
Rebuild: TypeAlias = Callable[[Iterator[object]], object]

TARGETS = "targets"
"""First part of the name of every leaf of the targets."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of the batch. ``split`` says whether dimension 0 is the batch dimension.

    ``name`` is its path (``inputs``, ``inputs[0]``, ``inputs.mask``, ``targets.labels``); ``alias``
    the same path from the parameter of the model's ``forward`` that receives it (``x``, ``mask``).
    """

    name: str
    alias: str
    value: object
    split: bool

    @property
    def is_tensor(self) -> bool:
        """Whether the leaf is data; other leaves are constants of the capture."""
        return isinstance(self.value, torch.Tensor)


@dataclass(frozen=True, slots=True)
class Batch:
    """A flattened batch and the way back.

    ``size`` is the common length of dimension 0 of the split tensors, ``None`` when nothing is
    split.
    """

    leaves: tuple[Leaf, ...]
    size: int | None
    rebuild_inputs: Rebuild
    rebuild_targets: Rebuild

    def rebuild(
        self, values: Sequence[object]
    ) -> tuple[tuple[object, ...], dict[str, object], object]:
        """``(args, kwargs, targets)`` with the leaves replaced by *values*, in order."""
        stream = iter(values)
        args, kwargs = as_arguments(self.rebuild_inputs(stream))
        return args, kwargs, self.rebuild_targets(stream)

    @property
    def constants(self) -> tuple[tuple[str, object], ...]:
        """Names and values of the leaves that are not tensors."""
        return tuple((leaf.name, leaf.value) for leaf in self.leaves if not leaf.is_tensor)


def flatten_batch(
    forward: Callable[..., object],
    example_batch: tuple[object, object],
    batch_dims: Mapping[str, int | None] | None = None,
) -> Batch:
    """Flatten ``(inputs, targets)``.

    *inputs* is a tensor, a tuple (passed as ``*args``) or a mapping (passed as ``**kwargs``),
    *targets* any tree. *batch_dims* maps a leaf's path, the name of the parameter of *forward* that
    receives it, a key of the inputs or targets, or a prefix of one of these, to ``None`` for a
    tensor that is not split, or to 0, the default.

    Raises :class:`piper.errors.CaptureError` when the batch has another form, a name in
    *batch_dims* is unknown, or the split tensors disagree about the batch size.
    """
    inputs, targets = _pair(example_batch)
    args, kwargs = as_arguments(inputs)
    names = _positional_names(forward, len(args))
    roots = [f"inputs[{i}]" for i in range(len(args))] if args is inputs else ["inputs"] * len(args)
    found: list[Leaf] = []
    for root, alias, value in zip(roots, names, args, strict=True):
        found.extend(_leaves(root, alias, value))
    for key, value in kwargs.items():
        found.extend(_leaves(f"inputs.{key}", key, value))
    found.extend(_leaves(TARGETS, TARGETS, targets))
    leaves = _apply_batch_dims(found, batch_dims or {})
    return Batch(leaves, _batch_size(leaves), _rebuilder(inputs), _rebuilder(targets))


def as_arguments(inputs: object) -> tuple[tuple[object, ...], dict[str, object]]:
    """*inputs* as ``(args, kwargs)``: a mapping gives ``kwargs``, a tuple ``args``, else one
    argument.
    """
    if isinstance(inputs, Mapping):
        return (), {str(key): value for key, value in inputs.items()}
    if isinstance(inputs, tuple) and not _is_named_tuple(inputs):
        return inputs, {}
    return (inputs,), {}


def _pair(example_batch: tuple[object, object]) -> tuple[object, object]:
    if not isinstance(example_batch, (tuple, list)) or len(example_batch) != 2:
        raise CaptureError(
            f"example_batch must be a pair (inputs, targets), found "
            f"{type(example_batch).__name__}"
            + (f" of {len(example_batch)}" if isinstance(example_batch, (tuple, list)) else "")
        )
    return example_batch[0], example_batch[1]


def _positional_names(forward: Callable[..., object], count: int) -> list[str]:
    names: list[str] = []
    for parameter in inspect.signature(forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names.extend(f"{parameter.name}.{i}" for i in range(count - len(names)))
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    if len(names) < count:
        raise CaptureError(
            f"the model's forward takes {len(names)} positional inputs ({', '.join(names)}), but the "
            f"example batch gives {count}"
        )
    return names[:count]


def _is_named_tuple(tree: Tree) -> bool:
    return isinstance(tree, tuple) and hasattr(tree, "_fields")


def _children(tree: Tree) -> list[tuple[str, object]] | None:
    """Suffix of the path, and child, of each part of *tree*; ``None`` for a leaf."""
    if isinstance(tree, Mapping):
        return [(f".{key}", value) for key, value in tree.items()]
    if isinstance(tree, (tuple, list)):
        return [(f"[{i}]", value) for i, value in enumerate(tree)]
    return None


def _leaves(name: str, alias: str, tree: Tree) -> Iterator[Leaf]:
    children = _children(tree)
    if children is None:
        yield Leaf(name, alias, tree, split=isinstance(tree, torch.Tensor))
        return
    for suffix, child in children:
        yield from _leaves(name + suffix, alias + suffix, child)


def _rebuilder(tree: Tree) -> Rebuild:
    children = _children(tree)
    if children is None:
        return next
    parts = [_rebuilder(child) for _, child in children]
    if isinstance(tree, Mapping):
        keys = list(tree)
        return lambda stream: {key: part(stream) for key, part in zip(keys, parts, strict=True)}
    if _is_named_tuple(tree):
        cls: Callable[..., object] = type(tree)
        return lambda stream: cls(*[part(stream) for part in parts])
    sequence: Callable[[list[object]], object] = list if isinstance(tree, list) else tuple
    return lambda stream: sequence([part(stream) for part in parts])


def _apply_batch_dims(
    found: Sequence[Leaf], batch_dims: Mapping[str, int | None]
) -> tuple[Leaf, ...]:
    if not isinstance(batch_dims, Mapping):
        raise CaptureError(
            f'batch_dims maps names to 0 or None, such as {{"mask": None}}, found {batch_dims!r}'
        )
    whole: set[str] = set()
    for key, dim in batch_dims.items():
        if isinstance(dim, bool) or dim not in (None, 0):
            raise CaptureError(
                f"batch_dims[{key!r}] is {dim!r}: a tensor is split on dimension 0 (write 0) or not "
                f"at all (write None); transpose the tensor or the model's use of it"
            )
        matched = {leaf.name for leaf in found if _matches(key, leaf)}
        if not matched:
            known = sorted({name for leaf in found for name in (leaf.name, leaf.alias)})
            raise CaptureError(
                f"batch_dims names {key!r}, which the batch does not have{nearest(key, known)}; its "
                f"leaves: {', '.join(known)}"
            )
        whole = whole | matched if dim is None else whole - matched
    return tuple(replace(leaf, split=leaf.split and leaf.name not in whole) for leaf in found)


def _matches(key: str, leaf: Leaf) -> bool:
    """Whether *key* names the leaf or a tree that holds it (``targets.`` may be left out)."""
    names = (leaf.name, leaf.alias, leaf.name.removeprefix(f"{TARGETS}."))
    return any(name == key or name.startswith((f"{key}.", f"{key}[")) for name in names)


def _batch_size(leaves: Sequence[Leaf]) -> int | None:
    sizes: dict[int, str] = {}
    for leaf in leaves:
        if not leaf.split:
            continue
        assert isinstance(leaf.value, torch.Tensor)
        if leaf.value.dim() == 0:
            raise CaptureError(
                f"batch tensor {leaf.name!r} has no dimensions and cannot be split; write "
                f"batch_dims={{{leaf.name!r}: None}} to give it whole to every microbatch"
            )
        if leaf.value.shape[0] == 0:
            raise CaptureError(f"batch tensor {leaf.name!r} has no rows; give at least one")
        sizes.setdefault(leaf.value.shape[0], leaf.name)
    if len(sizes) > 1:
        listed = ", ".join(f"{name!r} has {size}" for size, name in sizes.items())
        raise CaptureError(
            f"the batch tensors disagree about the batch size (dimension 0): {listed}; a tensor that "
            f"is not split needs batch_dims={{name: None}}"
        )
    return next(iter(sizes), None)

"""The model's state under the names that the user's model gives it, of which a tied tensor has
several.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from piper.errors import StateError, nearest
from piper.ir.dag import Buffer, Dag, Parameter
from piper.runtime.snapshot import StateSnapshot


def to_user_names(
    tensors: Mapping[str, torch.Tensor], entries: Mapping[str, Parameter] | Mapping[str, Buffer]
) -> dict[str, torch.Tensor]:
    """*tensors* under every name that the model registers them by; tied names share one tensor."""
    named: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        named |= dict.fromkeys((name, *entries[name].aliases), tensor)
    return named


def from_user_names(
    tensors: Mapping[str, torch.Tensor], entries: Mapping[str, Parameter] | Mapping[str, Buffer]
) -> dict[str, torch.Tensor]:
    """The inverse of :func:`to_user_names`: by first name; any alias will do. Names of nothing stay
    as they are.

    Raises :class:`StateError` when aliases of one tensor were given different values.
    """
    first = {alias: e.name for e in entries.values() for alias in (e.name, *e.aliases)}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        canonical = first.get(name, name)
        other = found.setdefault(canonical, tensor)
        if other is not tensor and not torch.equal(other, tensor):
            raise StateError(
                f"{name!r} and {canonical!r} are one tied tensor of the model, but have different values here"
            )
    return found


def user_state(dag: Dag, snapshot: StateSnapshot) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, as ``state_dict`` of the user's model names them."""
    persistent = {n: t for n, t in snapshot.buffers.items() if dag.buffers[n].persistent}
    return to_user_names(snapshot.parameters, dag.parameters) | to_user_names(
        persistent, dag.buffers
    )


def snapshot_from(
    dag: Dag, state: Mapping[str, torch.Tensor], current: StateSnapshot
) -> StateSnapshot:
    """*current*, without the optimizer's state, with the entries of *state* in place of its own.

    Raises :class:`StateError` for missing or unexpected entries, and for different tensors under
    names of one tied tensor.
    """
    expected = user_state(dag, current)
    if not isinstance(state, Mapping):
        raise StateError(
            f"expected a mapping from names to tensors, as state_dict() returns, found {type(state).__name__}"
        )
    for name, value in state.items():
        if name not in expected:
            raise StateError(
                f"state_dict has unexpected entry {name!r}{nearest(str(name), expected)}; the model has {len(expected)} entries, "
                f"{', '.join(list(expected)[:4])}, …"
            )
        if not isinstance(value, torch.Tensor):
            raise StateError(
                f"state_dict entry {name!r}: expected a tensor, found {type(value).__name__}"
            )
    missing = [name for name in expected if name not in state]
    if missing:
        raise StateError(f"state_dict lacks {len(missing)} entries: {', '.join(missing[:8])}")
    parameters = from_user_names(state, dag.parameters)
    buffers = from_user_names(state, dag.buffers)
    return replace(
        current,
        parameters={name: parameters[name] for name in current.parameters},
        buffers={name: buffers.get(name, value) for name, value in current.buffers.items()},
        optimizer=None,
    )

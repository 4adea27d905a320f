"""Batches of many kinds: each is captured and planned by itself, which takes long."""

from collections.abc import Hashable, Sequence

from piper.boundary import warn
from piper.runtime.batch import LeafSignature, Signature

FEW = 4
"""Kinds of batches of which nothing is said."""

KEPT = 32
"""Programs that are kept, here and on the workers: those that were used last."""

_SHOWN = 3


class Kinds:
    """The signatures of batches so far, and one warning when they are more than :data:`FEW` and
    something that could be the same in all of them differs.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, list[Signature]] = {}
        self._warned = False

    def see(self, mode: str, found: Signature) -> None:
        """A program for batches of signature *found* is about to be made."""
        if self._warned:
            return
        seen = self._seen.setdefault(mode, [])
        if found not in seen:
            seen.append(found)
        if len(seen) > FEW:
            self._warned = True
            self._seen.clear()
            warn(_message(seen))


def _message(seen: Sequence[Signature]) -> str:
    by_name: dict[str, list[LeafSignature]] = {}
    for signature in seen:
        for leaf in signature.leaves:
            known = by_name.setdefault(leaf.name, [])
            if leaf not in known:
                known.append(leaf)
    changing = {name: leaves for name, leaves in by_name.items() if len(leaves) > 1}
    # Leaves that are new in each batch explain more than those that have a few values.
    most = max((len(leaves) for leaves in changing.values()), default=0)
    worst = [name for name, leaves in changing.items() if len(leaves) == most]
    lines = [_change(name, changing[name]) for name in worst[:_SHOWN]]
    if len(worst) > _SHOWN:
        lines.append(f"{len(worst) - _SHOWN} more")
    if not lines:
        lines = ["some leaves are there in some batches only"]
    return (
        f"this is kind {len(seen)} of batches; each kind is captured and planned by itself, which takes far longer than a step: "
        + "; ".join(lines)
        + f". At most {KEPT} plans are kept"
    )


def _change(name: str, leaves: Sequence[LeafSignature]) -> str:
    shown = [
        f"{list(leaf.shape)}" if leaf.shape is not None else f"{leaf.constant!r:.40}"
        for leaf in leaves[-_SHOWN:]
    ]
    values = ", ".join(shown)
    if all(leaf.shape is not None for leaf in leaves):
        if len({leaf.shape for leaf in leaves}) == 1:
            kinds = ", ".join(dict.fromkeys(leaf.kind for leaf in leaves))
            return f"{name!r} has several types ({kinds}): convert it to one"
        return f"{name!r} has several shapes (…, {values}): pad it to one length, or to a few"
    if all(leaf.kind in ("int", "float") for leaf in leaves):
        return f"{name!r} is a number, which is part of the plan, and changes (…, {values}): give torch.tensor(value), whose value is not, with batch_dims={{{name!r}: None}}"
    return (
        f"{name!r} is no tensor, so it is part of the plan, and changes (…, {values}): give a tensor, "
        "or leave out of the batch what the model does not compute with"
    )

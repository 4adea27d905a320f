"""Which device holds what of the model's state, and which plans that suits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from piper.errors import StateError
from piper.ir.dag import Role
from piper.plan.model import DevicePlan, Plan

_PARAMETERS = (Role.PARAMETER, Role.SHARD)
_NAMED = (*_PARAMETERS, Role.BUFFER)

_Form: TypeAlias = tuple[tuple[int, int] | None, tuple[int, int] | None]
"""Which of how many parts of the experts, which of how many slices."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the devices hold: *plan* is the one that their state was made for.

    ``names[device]`` are the parameters and buffers that a device holds, ``owned[device]`` those
    that a snapshot takes from it: each parameter or buffer, or each slice of one, once.
    """

    plan: Plan
    names: tuple[tuple[str, ...], ...]
    owned: tuple[tuple[str, ...], ...]


def holdings_of(plan: Plan, constants: frozenset[str]) -> Holdings:
    """What devices hold whose state is made for *plan*: what it uses there, less its *constants*.

    Device 0 also holds what the plan uses nowhere.
    """
    devices = by_device(plan)
    held = [[n for n in state_names(mine) if n not in constants] for mine in devices]
    used = {name for names in held for name in names}
    model = (*plan.dag.parameters, *plan.dag.buffers)
    held[0] += [n for n in model if n not in used and n not in constants]
    forms = [_partial_forms(mine) for mine in devices]
    owner: dict[tuple[str, _Form | None], int] = {}
    # A buffer that the step writes is current where it is written.
    for rank, mine in enumerate(devices):
        for instruction in mine.instructions:
            for name in instruction.stores():
                owner.setdefault((name, None), rank)
    for rank, names in enumerate(held):
        for name in names:
            owner.setdefault((name, forms[rank].get(name)), rank)
    owned = tuple(
        tuple(n for n in held[r] if owner[n, forms[r].get(n)] == r) for r in range(len(devices))
    )
    return Holdings(plan, tuple(tuple(names) for names in held), owned)


def _partial_forms(mine: DevicePlan) -> dict[str, _Form]:
    """The form of each parameter of which a device holds a slice or a part of the experts."""
    found: dict[str, _Form] = {}
    for info in mine.slots:
        if info.shard is not None or (info.experts is not None and info.name not in found):
            found[info.name] = (info.experts, info.shard)
    return found


def by_device(plan: Plan) -> list[DevicePlan]:
    """The programs of *plan*, in the order of their devices."""
    return sorted(plan.devices, key=lambda mine: mine.device)


def state_names(mine: DevicePlan) -> list[str]:
    """Parameters and buffers that a device's plan uses, in slot order."""
    names = [i.name for i in mine.slots if i.role in _NAMED]
    return list(dict.fromkeys(names))


def require_weights(weights: Mapping[str, torch.Tensor], holdings: Holdings) -> None:
    """Raise :class:`StateError` if *weights* lacks something that a device is to hold."""
    missing = sorted({n for names in holdings.names for n in names if n not in weights})
    if missing:
        raise StateError(f"no initial value for {missing[0]!r} ({len(missing)} missing in all)")


def refuse_missing_copies(plan: Plan, holdings: Holdings, constants: frozenset[str]) -> None:
    """Refuse a plan that uses a parameter or buffer on a device that does not hold it, or holds it
    in another form (whole, a slice, a part of the experts).
    """
    for mine, first in zip(by_device(plan), by_device(holdings.plan), strict=False):
        held = constants.union(holdings.names[mine.device])
        if missing := [name for name in state_names(mine) if name not in held]:
            raise StateError(
                f"the plan for this batch uses {missing[0]!r} on device {mine.device}, which holds no parameter or buffer of that name: the "
                f"first plan does not use it there. Begin with a batch that uses it, or place its regions on one device"
            )
        forms = {(i.name, i.shard, i.experts) for i in first.slots if i.role in _PARAMETERS}
        forms |= {(name, None, None) for name in held - {name for name, *_ in forms}}
        dag = holdings.plan.dag
        forms |= {
            (name, (0, 1), experts)
            for name, shard, experts in forms
            if shard is None and name in dag.parameters and dag.has_master(name)
        }
        for info in mine.slots:
            if info.role in _PARAMETERS and (info.name, info.shard, info.experts) not in forms:
                whole = info.shard is None and info.experts is None
                form = "whole" if whole else "a slice of it"
                raise StateError(
                    f"the plan for this batch uses parameter {info.name!r}, {form}, on device {mine.device}, which does not hold it in this form: "
                    f"the first plan does not train it, or shards it in another way. Begin with a batch that trains it"
                )


def refuse_stale_copies(plan: Plan, holdings: Holdings) -> None:
    """Refuse a plan that writes a parameter or buffer on some of the devices
    that hold it, but not on all.
    """
    written: dict[str, set[int]] = {}
    for mine in plan.devices:
        for instruction in mine.instructions:
            updated = (name for name, _ in instruction.updates())
            for name in (*updated, *instruction.stores()):
                written.setdefault(name, set()).add(mine.device)
    for name, devices in written.items():
        holders = {device for device, names in enumerate(holdings.names) if name in names}
        if stale := sorted(holders - devices):
            raise StateError(
                f"{name!r} is held by devices {sorted(holders)}, but the plan for this batch writes it on {sorted(devices)} only: the "
                f"copy on {stale} would be out of date. Use it in the same regions at every step, or place these on one device"
            )

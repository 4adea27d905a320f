"""Which device holds what of the model's state, and which plans that suits."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from piper.errors import StateError
from piper.ir.dag import Role
from piper.plan.model import DevicePlan, Plan
from piper.runtime.slices import Form

_NAMED = (Role.PARAMETER, Role.SHARD, Role.BUFFER)


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the devices hold; *plan* is the one that their state was made for first.

    ``forms[device]`` are the parameters and buffers that a device holds, and how;
    ``owned[device]`` those that a snapshot takes from it: each parameter or buffer, or each slice
    of one, once. ``writers`` are the devices on which a buffer that steps write is current.
    """

    plan: Plan
    forms: tuple[Mapping[str, Form], ...]
    writers: Mapping[str, int]

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """What each device holds."""
        return tuple(tuple(held) for held in self.forms)

    @property
    def owned(self) -> tuple[tuple[str, ...], ...]:
        """What a snapshot takes from each device."""
        owner: dict[tuple[str, object], int] = {(n, None): r for n, r in self.writers.items()}
        for rank, held in enumerate(self.forms):
            for name, form in held.items():
                owner.setdefault((name, form.part), rank)
        return tuple(
            tuple(name for name, form in held.items() if owner[name, form.part] == rank)
            for rank, held in enumerate(self.forms)
        )


def holdings_of(plan: Plan, constants: frozenset[str]) -> Holdings:
    """What devices hold whose state is made for *plan*: what it uses there, less its *constants*.

    Device 0 also holds what the plan uses nowhere.
    """
    forms = [_forms(mine, plan, constants) for mine in by_device(plan)]
    used = {name for held in forms for name in held}
    for name in (*plan.dag.parameters, *plan.dag.buffers):
        if name not in used and name not in constants:
            forms[0][name] = Form(whole=True, shard=_master(name, plan))
    return Holdings(plan, tuple(forms), _writers(plan))


def moved(holdings: Holdings, plan: Plan, constants: frozenset[str]) -> Holdings:
    """What devices hold such that *plan* can run: *holdings* itself if it can, else with all that
    it could not use where it is, or would leave out of date somewhere, held as the plan uses it.
    """
    wanted = [_forms(mine, plan, constants) for mine in by_device(plan)]
    written = set(written_on(plan))
    moving = {
        name
        for held in wanted
        for name in held
        if not all(
            _suits(mine.get(name), new.get(name), exact=name in written)
            for mine, new in zip(holdings.forms, wanted, strict=True)
        )
    }
    if not moving:
        return holdings
    forms = tuple(
        {
            **{name: form for name, form in mine.items() if name not in moving},
            **{name: form for name, form in new.items() if name in moving},
        }
        for mine, new in zip(holdings.forms, wanted, strict=True)
    )
    writers = {n: r for n, r in holdings.writers.items() if n not in moving}
    writers |= {n: r for n, r in _writers(plan).items() if n in moving}
    return Holdings(holdings.plan, forms, writers)


def _suits(held: Form | None, wanted: Form | None, *, exact: bool) -> bool:
    """Whether a plan that uses a name as *wanted* on a device can do so where it is *held*. A plan
    that writes it must write all that is held: *exact*.
    """
    if exact or held is None or wanted is None:
        return held == wanted or (wanted is None and not exact)
    return (
        (held.whole or not wanted.whole)
        and wanted.shard in (None, held.shard)
        and wanted.experts == held.experts
    )


def _forms(mine: DevicePlan, plan: Plan, constants: frozenset[str]) -> dict[str, Form]:
    """How a device holds what its plan uses, in slot order."""
    found: dict[str, Form] = {}
    for info in mine.slots:
        if info.role not in _NAMED or info.name in constants:
            continue
        before = found.get(info.name, Form(whole=False, shard=_master(info.name, plan)))
        found[info.name] = Form(
            before.whole or info.role is not Role.SHARD,
            before.shard if info.shard is None else info.shard,
            before.experts if info.experts is None else info.experts,
        )
    return found


def _master(name: str, plan: Plan) -> tuple[int, int] | None:
    """The only slice of a parameter that is updated on a copy in another type: the copy."""
    dag = plan.dag
    return (0, 1) if name in dag.parameters and dag.has_master(name) else None


def _writers(plan: Plan) -> dict[str, int]:
    """A device on which each buffer that *plan* writes is current."""
    found: dict[str, int] = {}
    for rank, mine in enumerate(by_device(plan)):
        for instruction in mine.instructions:
            for name in instruction.stores():
                found.setdefault(name, rank)
    return found


def written_on(plan: Plan) -> dict[str, set[int]]:
    """The devices on which *plan* writes each parameter and buffer that it writes."""
    found: dict[str, set[int]] = {}
    for mine in plan.devices:
        for instruction in mine.instructions:
            updated = (name for name, _ in instruction.updates())
            for name in (*updated, *instruction.stores()):
                found.setdefault(name, set()).add(mine.device)
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


def refuse_stale_copies(plan: Plan, holdings: Holdings) -> None:
    """Refuse a plan that writes a parameter or buffer on some of the devices
    that hold it, but not on all.
    """
    for name, devices in written_on(plan).items():
        holders = {device for device, names in enumerate(holdings.names) if name in names}
        if stale := sorted(holders - devices):
            raise StateError(
                f"{name!r} is held by devices {sorted(holders)}, but the plan for this batch writes it on {sorted(devices)} only: the "
                f"copy on {stale} would be out of date. Use it in the same regions at every step, or place these on one device"
            )

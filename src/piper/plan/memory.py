"""The memory that a device uses during a step, whether foretold from the plan or measured.

What counts: the *storages* (allocations; tensors that share one count once) that are alive between
two instructions, by what they are for. Not what a chunk, a collective or the optimizer allocates
and gives back within one instruction, and not the batch, which is the data loader's, nor views of
it.

Communication is counted until the device waits for it, the latest that it can take, with one
exception: a message that is being sent is a copy, and counts until the next one is issued on the
same stream, since devices give up what has been delivered when they send again, and often nothing
ever waits for it.

What was put aside in the host's memory is apart: it is listed, in the category of that name, but
not part of what is alive on the device. It counts until the device waits for the copy back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from piper.ids import DeviceId
from piper.ir.dag import STATE, Role


class Category(StrEnum):
    """What memory is for. What serves several purposes counts for the first of them, in this
    order.
    """

    COMMUNICATION = "communication"  # in flight: messages, posted receives, flat buckets
    PARAMETERS = "parameters"
    SHARDS = "shards"  # slices of parameters, master copies
    OPTIMIZER = "optimizer"
    BUFFERS = "buffers"
    GATHERED = "gathered"  # whole parameters, made of slices for some uses
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"  # all else that chunks read and make, and inputs that are not views of the batch
    HOST = "host"  # copies in the host's memory; no part of the device's bytes
    OTHER = "other"  # measured only: alive, though neither plan nor state holds it


CATEGORY_OF_ROLE: Mapping[Role, Category] = {
    Role.PARAMETER: Category.PARAMETERS,
    Role.SHARD: Category.SHARDS,
    Role.BUFFER: Category.BUFFERS,
    Role.SEED: Category.BUFFERS,
    Role.SCALE: Category.BUFFERS,
    Role.GATHERED: Category.GATHERED,
    Role.CONTRIBUTION: Category.GRADIENTS,
    Role.TOTAL: Category.GRADIENTS,
    Role.KEPT: Category.GRADIENTS,
    Role.NORM: Category.GRADIENTS,
    Role.HOST: Category.HOST,
}
"""Where a slot's memory counts; roles that are not listed are activations, or state like
buffers.
"""


def category_of(role: Role) -> Category:
    """Where the memory of a slot with *role* counts."""
    usual = Category.BUFFERS if is_state(role) else Category.ACTIVATIONS
    return CATEGORY_OF_ROLE.get(role, usual)


def is_state(role: Role) -> bool:
    """Whether a slot with *role* is filled before the step and never emptied."""
    return role in STATE


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on one device.

    ``peak`` is the most that is alive after any instruction, ``position`` the first instruction
    (its index in the device's plan) after which that is so, ``by_category`` what it consists of,
    and what is in the host's memory then. ``highest`` is each category's own peak, wherever that
    is. ``curve`` has the bytes after every instruction, ``curves`` the same by category.
    """

    device: DeviceId
    peak: int
    position: int
    by_category: Mapping[Category, int]
    highest: Mapping[Category, int]
    curve: tuple[int, ...]
    curves: Mapping[Category, tuple[int, ...]] = field(default_factory=dict)


class Recorder:
    """Makes a :class:`DeviceMemory`, one instruction after the other."""

    def __init__(self, device: DeviceId) -> None:
        self._device = device
        self._peak = self._position = 0
        self._at_peak: dict[Category, int] = {}
        self._highest: dict[Category, int] = dict.fromkeys(Category, 0)
        self._curve: list[int] = []
        self._curves: dict[Category, list[int]] = {category: [] for category in Category}

    def add(self, position: int, found: Mapping[Category, int]) -> None:
        """*found* is alive after instruction *position*; instructions that are skipped changed
        nothing.
        """
        total = sum(found.values()) - found.get(Category.HOST, 0)
        missing = position - len(self._curve)
        if missing > 0:
            self._curve += [self._curve[-1] if self._curve else total] * missing
        if total > self._peak:
            self._peak, self._position, self._at_peak = total, position, dict(found)
        for category, nbytes in found.items():
            self._highest[category] = max(self._highest[category], nbytes)
            mine = self._curves[category]
            if missing > 0:
                mine += [mine[-1] if mine else nbytes] * missing
            mine.append(nbytes)
        self._curve.append(total)

    def finish(self) -> DeviceMemory:
        """What was recorded."""
        return DeviceMemory(
            device=self._device,
            peak=self._peak,
            position=self._position,
            by_category={c: self._at_peak.get(c, 0) for c in Category},
            highest=dict(self._highest),
            curve=tuple(self._curve),
            curves={category: tuple(mine) for category, mine in self._curves.items() if any(mine)},
        )

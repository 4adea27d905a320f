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
from itertools import chain, repeat

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
    """Makes a :class:`DeviceMemory`, one instruction after the other. Notes changes only: most
    instructions change one category or two.
    """

    def __init__(self, device: DeviceId) -> None:
        self._device = device
        self._peak = self._position = 0
        self._at_peak: dict[Category, int] = {}
        self._highest: dict[Category, int] = dict.fromkeys(Category, 0)
        self._length = 0
        self._total = _Curve()
        self._curves = {category: _Curve() for category in Category}

    def add(self, position: int, found: Mapping[Category, int]) -> None:
        """*found* is alive after instruction *position*; instructions that are skipped changed
        nothing.
        """
        total = sum(found.values()) - found.get(Category.HOST, 0)
        if total > self._peak:
            self._peak, self._position, self._at_peak = total, position, dict(found)
        self._total.add(position, total)
        curves, highest = self._curves, self._highest
        for category, nbytes in found.items():
            if nbytes != curves[category].last:
                curves[category].add(position, nbytes)
                highest[category] = max(highest[category], nbytes)
        self._length = position + 1

    def finish(self) -> DeviceMemory:
        """What was recorded."""
        return DeviceMemory(
            device=self._device,
            peak=self._peak,
            position=self._position,
            by_category={c: self._at_peak.get(c, 0) for c in Category},
            highest=dict(self._highest),
            curve=self._total.finish(self._length),
            curves={
                category: mine.finish(self._length)
                for category, mine in self._curves.items()
                if self._highest[category]
            },
        )


class _Curve:
    """A number after each of some instructions, kept where it changes; before it is first known it
    is what it is then.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._starts: list[int] = []

    @property
    def last(self) -> int | None:
        """The number by now."""
        return self._numbers[-1] if self._numbers else None

    def add(self, position: int, number: int) -> None:
        """It is *number* from instruction *position* on."""
        if number != self.last:
            self._numbers.append(number)
            self._starts.append(position if self._starts else 0)

    def finish(self, length: int) -> tuple[int, ...]:
        """The number after each of *length* instructions."""
        ends = [*self._starts[1:], length] if self._starts else []
        runs = zip(self._numbers, self._starts, ends, strict=True)
        return tuple(
            chain.from_iterable(repeat(number, end - start) for number, start, end in runs)
        )

"""Who contributes to which gradient: contributions as digits of one large number per parameter."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from piper.ids import DeviceId, ValueId
from piper.ir.dag import Dag, DeviceGroup
from piper.plan.roles import Roles
from piper.verify.fidelity import delivered_to
from piper.verify.keeping import kept_by, kept_counts
from piper.verify.symbolic import WHOLE, Total
from piper.verify.trace import describe_value

WEIGHT = ""
"""What the sum of loss weights is a sum for; no parameter has this name."""

_DIGITS = re.compile(rb"[^\0]")


@dataclass(frozen=True, slots=True, eq=False)
class _Numbered:
    """Devices, and the number of each; one object for all values of the same devices."""

    devices: tuple[DeviceId, ...]
    numbers: Mapping[DeviceId, int]


@dataclass(frozen=True, slots=True)
class _Contribution:
    """What one value contributes to the gradient of *name*: a digit per device that makes it, from
    number ``base`` on.
    """

    name: str
    base: int
    makers: _Numbered


_OrbitKey: TypeAlias = tuple[_Numbered, DeviceId, tuple[DeviceId, ...]]


class Origins:
    """The identities of all contributions: a digit per contributing value and device.

    ``full`` says, by parameter and part of its experts (``WHOLE`` where they are not sharded), what
    all of them are together.
    """

    def __init__(self, dag: Dag) -> None:
        self.dag = dag
        self.digits: dict[ValueId, _Contribution] = {}
        self.full: dict[tuple[str, int], int] = {}
        self._sizes: dict[str, int] = {}
        self._places: dict[int, Mapping[DeviceId, int]] = {}
        self._image_parts: dict[tuple[str, DeviceId, tuple[DeviceId, ...]], tuple[int, ...]] = {}
        self._values: dict[str, list[ValueId]] = {}
        self._starts: dict[str, list[int]] = {}
        self._orbits: dict[_OrbitKey, int] = {}
        numbered: dict[tuple[DeviceId, ...], _Numbered] = {}
        sums: list[tuple[str, Iterable[ValueId]]] = [(WEIGHT, dag.weights)]
        sums += dag.contributions.items()
        for name, values in sums:
            count = 0
            self._values[name], self._starts[name] = list(values), []
            for value in values:
                devices = delivered_to(dag.nodes[dag.producers[value]])
                if devices not in numbered:
                    numbered[devices] = _Numbered(devices, {d: i for i, d in enumerate(devices)})
                self.digits[value] = _Contribution(name, count, numbered[devices])
                self._starts[name].append(count)
                count += len(devices)
            self._sizes[name] = count
            self.full[name, WHOLE] = int.from_bytes(b"\x01" * count, "little")
            self.full.update(self._full_parts(name))

    def _full_parts(self, name: str) -> Iterator[tuple[tuple[str, int], int]]:
        """What all contributions to each part of the experts are together."""
        groups = self.dag.expert_groups.get(name, ())
        held = self._places_in(groups)
        masks: dict[tuple[_Numbered, int], bytes] = {}
        for part in range(len(groups[0]) if groups else 0):
            digits = bytearray()
            for value in self._values[name]:
                numbered = self.digits[value].makers
                if (mask := masks.get((numbered, part))) is None:
                    mask = bytes(held.get(device) == part for device in numbered.devices)
                    masks[numbered, part] = mask
                digits += mask
            yield (name, part), int.from_bytes(digits, "little")

    def part(self, name: str, device: int) -> int:
        """The part of a parameter's experts that *device* holds."""
        groups = self.dag.expert_groups.get(name)
        return WHOLE if groups is None else self._places_in(groups).get(DeviceId(device), WHOLE)

    def slice_on(self, device: int, name: str) -> int:
        """Which slice of a parameter *device* holds; ``WHOLE`` for one that is not sharded."""
        groups = self.dag.shards.get(name)
        return WHOLE if groups is None else self._places_in(groups).get(DeviceId(device), WHOLE)

    def total(self, value: ValueId, device: DeviceId) -> Total:
        """The sum of one contribution."""
        made = self.digits[value]
        digit = made.base + made.makers.numbers[device]
        part = self.part(made.name, device)
        return Total(made.name, 1, hash((made.name, digit)), part=part, start=digit)

    def difference(self, total: Total) -> str:
        """Which contributions *total* lacks or has more than once."""
        size, found = self._sizes[total.name], total.counts
        counts = found.to_bytes(max(size, (found.bit_length() + 7) // 8), "little")
        wrong = [
            (digit, count)
            for digit, count in enumerate(counts[:size])
            if count != 1
            and (count or self.part(total.name, self._owner(total.name, digit)[1]) == total.part)
        ]
        lines: list[str] = []
        for digit, count in wrong[:8]:
            value, device = self._owner(total.name, digit)
            many = "missing" if count == 0 else f"{count} times"
            lines.append(f"    {many}: {describe_value(self.dag, value)} from device {device}")
        return "\n".join(lines + ([f"    … {len(wrong) - 8} more"] if len(wrong) > 8 else []))

    def _owner(self, name: str, digit: int) -> tuple[ValueId, DeviceId]:
        """The value and the device that a digit stands for."""
        starts = self._starts[name]
        index = bisect_right(starts, digit) - 1
        value = self._values[name][index]
        return value, self.digits[value].makers.devices[digit - starts[index]]

    def _places_in(self, groups: tuple[DeviceGroup, ...]) -> Mapping[DeviceId, int]:
        """The place of each device in its group; what a group of one has (a master copy) is
        whole.
        """
        if (known := self._places.get(id(groups))) is None:
            shared = (group for group in groups if len(group) > 1)
            known = {device: place for group in shared for place, device in enumerate(group)}
            self._places[id(groups)] = known
        return known

    # --- of a folded plan ---------------------------------------------------------------------------

    def together(self, total: Total, devices: tuple[DeviceId, ...], roles: Roles) -> Total | None:
        """The sum of what *total*, a sum on the device that stands for *devices*, is on these;
        ``None`` if it is not for the same part of the experts and the same slice on all of them.
        """
        owners = list(self._owners(total))
        parts = self._parts_of_images(total.name, owners[0][1], devices, roles) if owners else ()
        shards = {total.shard}
        if total.shard != WHOLE:
            shards = {self.slice_on(device, total.name) for device in devices}
        if len(parts) != 1 or len(shards) != 1:
            return None
        numbers: dict[ValueId, int] = {}
        for value, device, count in owners:
            orbit = self._orbit(self.digits[value].makers, device, devices, roles)
            numbers[value] = numbers.get(value, 0) + count * orbit
        start = self.digits[owners[0][0]].base
        return replace(
            total,
            digits=self._number(numbers, start),
            start=start,
            history=hash((total.history, len(devices))),
            part=parts[0],
            shard=shards.pop(),
            kept=sum(
                count * kept_by(roles.moved(owner, to=device))
                for owner, count in kept_counts(total.kept).items()
                for device in devices
            ),
        )

    def _owners(self, total: Total) -> Iterator[tuple[ValueId, DeviceId, int]]:
        """What *total* counts: values, devices, how often; in the order of their digits."""
        digits = total.digits.to_bytes((total.digits.bit_length() + 7) // 8, "little")
        for found in _DIGITS.finditer(digits):
            place = found.start()
            yield *self._owner(total.name, total.start + place), digits[place]

    def _parts_of_images(
        self, name: str, owner: DeviceId, devices: tuple[DeviceId, ...], roles: Roles
    ) -> Sequence[int]:
        """The parts of the experts that what *owner* contributes is for, on each of *devices*; each
        once.
        """
        if name not in self.dag.expert_groups:
            return (WHOLE,)
        key = (name, owner, devices)
        if (known := self._image_parts.get(key)) is None:
            images = (roles.moved(owner, to=device) for device in devices)
            known = self._image_parts[key] = tuple({self.part(name, image) for image in images})
        return known

    def _orbit(
        self, makers: _Numbered, owner: DeviceId, devices: tuple[DeviceId, ...], roles: Roles
    ) -> int:
        """The digits, of a value that *makers* make, of what *owner*'s contribution is on each of
        *devices*.
        """
        key = (makers, owner, devices)
        if (known := self._orbits.get(key)) is None:
            places = (makers.numbers[roles.moved(owner, to=device)] for device in devices)
            known = self._orbits[key] = sum(1 << (8 * place) for place in places)
        return known

    def _number(self, numbers: dict[ValueId, int], start: int) -> int:
        """The number whose digits for each value, ascending from number *start* on, are those
        given.
        """
        last = self.digits[list(numbers)[-1]]
        digits = bytearray(last.base + len(last.makers.devices) - start)
        excess = 0
        for value, number in numbers.items():
            made = self.digits[value]
            at, size = made.base - start, len(made.makers.devices)
            if number.bit_length() > 8 * size:  # something is counted too often
                excess += number << (8 * at)
            else:
                digits[at : at + size] = number.to_bytes(size, "little")
        return int.from_bytes(digits, "little") + excess

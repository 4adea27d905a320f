"""Which devices get a program."""

from typing import TypeAlias

from piper.ids import DeviceId
from piper.ir.dag import DeviceGroup

Members: TypeAlias = tuple[tuple[int, DeviceId], ...]
"""Positions in a group, and devices."""


class Represented:
    """The devices that get a program, among the members of groups; remembered by group, of which
    there are few.
    """

    def __init__(self, devices: frozenset[DeviceId] | None) -> None:
        self._devices = devices
        self._members: dict[DeviceGroup, Members] = {}
        self._groups: dict[int, tuple[tuple[DeviceGroup, Members], ...]] = {}
        self._kept: list[object] = []  # so that their ids stay theirs

    def members(self, group: DeviceGroup) -> Members:
        """The members of *group* that get a program, with their positions in it."""
        if (known := self._members.get(group)) is None:
            known = self._members[group] = tuple(
                (i, d) for i, d in enumerate(group) if self._devices is None or d in self._devices
            )
        return known

    def groups(self, groups: tuple[DeviceGroup, ...]) -> tuple[tuple[DeviceGroup, Members], ...]:
        """Those of *groups* with such members, with these."""
        if (known := self._groups.get(id(groups))) is None:
            self._kept.append(groups)
            known = tuple((g, mine) for g in groups if (mine := self.members(g)))
            self._groups[id(groups)] = known
        return known

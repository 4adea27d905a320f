"""What the members of a rendezvous give, as symbolic sums. Of a folded plan, most members have no
program: what they give is the image of what the device gives that stands for them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from piper.ids import DeviceId
from piper.ops.base import Rendezvous
from piper.plan.roles import Roles
from piper.verify.origins import Origins
from piper.verify.symbolic import Total, together

Sums: TypeAlias = Sequence[Total | None]
"""What one device gives or gets, by input or output; ``None``: no sum."""

Columns: TypeAlias = Mapping[DeviceId, Sums]
"""What each device that has a program gets."""


@dataclass(frozen=True, slots=True)
class Party:
    """A device that takes part, and the members that it stands for, itself included."""

    device: DeviceId
    members: tuple[DeviceId, ...]


@dataclass(frozen=True, slots=True)
class Given:
    """What the members of *meeting* give: *totals*, by device that has a program."""

    origins: Origins
    roles: Roles | None
    meeting: Rendezvous
    parties: Sequence[Party]
    totals: Mapping[DeviceId, Sums]

    @property
    def places(self) -> Mapping[DeviceId, int]:
        """The members that have a program, and where they stand among all."""
        members = self.meeting.members
        return {party.device: members.index(party.device) for party in self.parties}

    def of_first_member(self) -> Sums:
        """What the first member gives."""
        member = self.meeting.members[0]
        party = next(party for party in self.parties if member in party.members)
        return [self._on((member,), party, total) for total in self.totals[party.device]]

    def sums(self) -> Sums | None:
        """Sum i is that of the members' i-th inputs; ``None`` if these do not fit together."""
        if len({len(mine) for mine in self.totals.values()}) != 1:
            return None
        results: list[Total | None] = []
        for column in zip(*(self.totals[party.device] for party in self.parties), strict=True):
            if not any(column):
                results.append(None)
                continue
            terms = [
                self._on(party.members, party, total)
                for party, total in zip(self.parties, column, strict=True)
            ]
            present = [term for term in terms if term is not None]
            if len(present) < len(terms) or len({term.kind for term in present}) != 1:
                return None
            results.append(together(present, hash(tuple(term.history for term in present))))
        return results

    def _on(self, members: tuple[DeviceId, ...], party: Party, total: Total | None) -> Total | None:
        """What *total*, which *party* has, is on *members* together; ``None`` for no sum, and if it
        is not for the same on all of them.
        """
        if total is None or self.roles is None or members == (party.device,):
            return total
        return self.origins.together(total, members, self.roles)

"""A step that keeps its gradients, and the one that updates from what was kept, come to the sum.

Each plan is verified alone, so what they have in common is a contract on what lies between them:
each device that makes contributions to a parameter's gradient keeps something of it, whole, or
where devices sum slices (ZeRO-2 and 3) its slice.

* Of a step that keeps: what all these devices keep of a gradient is together the sum of all contributions, each once, divided as the
  step's own loss asks for. Which device keeps which of them is left open.
* Of a step that adds: every gradient that is used has in it what each of these devices kept, once.

So the gradient that is used is the sum of those of all steps. That the updating plan has all the
devices on which something was kept, is the driver's to see to: only it knows which plans ran.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from piper.ids import DeviceId
from piper.ir.dag import Chunk, Dag, GradientUse, Level
from piper.verify.fidelity import delivered_to
from piper.verify.symbolic import WHOLE, Total

Key: TypeAlias = tuple[str, int, int]
"""A parameter, the part of its experts, the slice of it."""


class Keeping:
    """What each device keeps of which gradient; nothing, if the step only updates."""

    def __init__(self, dag: Dag) -> None:
        self._devices: dict[Key, list[DeviceId]] = {}
        self._slices: dict[tuple[str, int], int] = {}
        self._shares: dict[Key, list[int]] = {}
        self._wanted: dict[Key, int] = {}
        if dag.gradient_use is GradientUse.UPDATE:
            return
        for name, values in dag.contributions.items():
            makers = [dag.nodes[dag.producers[value]] for value in values]
            if any(_sums_slices(dag, maker) for maker in makers):
                groups = [g for g in dag.shards.get(name, ()) if len(g) > 1]
                self._slices.update({(name, d): i for group in groups for i, d in enumerate(group)})
            for device in dict.fromkeys(d for maker in makers for d in delivered_to(maker)):
                part, _ = dag.expert_part(name, device) or (WHOLE, 1)
                self._devices.setdefault((name, part, self.slice(name, device)), []).append(device)

    def slice(self, name: str, device: int) -> int:
        """The slice of a gradient that *device* keeps."""
        return self._slices.get((name, device), WHOLE)

    def wanted(self, total: Total) -> int:
        """What is kept where of the gradient that *total* is, or is a slice of, as
        :attr:`Total.kept` has it.
        """
        key = (total.name, total.part, total.shard)
        if key not in self._wanted:
            shards = dict.fromkeys((WHOLE, total.shard))
            devices = (d for k in shards for d in self._devices.get((*total.target, k), ()))
            self._wanted[key] = sum(kept_by(device) for device in devices)
        return self._wanted[key]

    def difference(self, total: Total) -> list[str]:
        """What *total* lacks, or has more than once, of what devices kept; lines for people."""
        wanted, found = kept_counts(self.wanted(total)), kept_counts(total.kept)
        return [
            f"    {f'{found[d]} times' if d in found else 'missing'}: what device {d} kept"
            for d in sorted({**wanted, **found})
            if wanted.get(d, 0) != found.get(d, 0)
        ]

    def keep(self, total: Total) -> None:
        """Some device adds *total* to what it keeps."""
        self._shares.setdefault((total.name, total.part, total.shard), []).append(total.counts)

    def not_kept(self, full: Mapping[tuple[str, int], int]) -> Iterator[Total]:
        """What devices kept together of those gradients of which that is not *full*, which says
        what all contributions are together.
        """
        for name, part, shard in self._devices:
            shares = self._shares.get((name, part, shard), ())
            together = sum(shares)
            # Equal to the union: no share overlaps with another.
            if together != full[name, part] or together != _union(shares):
                yield Total(name, together, 0, shard, part=part)


def kept_by(device: int) -> int:
    """The digit of :attr:`Total.kept` that stands for what *device* kept."""
    return 1 << (8 * device)


def kept_counts(kept: int) -> dict[DeviceId, int]:
    """How often what each device kept is in a sum."""
    counts = kept.to_bytes((kept.bit_length() + 7) // 8, "little")
    return {DeviceId(device): count for device, count in enumerate(counts) if count}


def _sums_slices(dag: Dag, maker: object) -> bool:
    """Whether gradients of the chunk *maker* are cut into slices before they are summed."""
    assert isinstance(maker, Chunk)
    if maker.replication is None:
        return False
    return dag.replications[maker.replication].level >= Level.GRADIENTS


def _union(shares: Sequence[int]) -> int:
    found = 0
    for share in shares:
        found |= share
    return found

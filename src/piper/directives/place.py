"""Place: which devices run which nodes."""

from msgspec.structs import replace

from piper.directives.base import Directive, directive, matching_chunks
from piper.errors import PlacementError
from piper.ids import DeviceId, NodeId, Stream
from piper.ir.dag import Chunk, Dag, DeviceGroup
from piper.ir.edit import Edit, ordered_by_user, replace_nodes
from piper.ir.select import FilterValue, Selector
from piper.limits import MAX_DEVICES


@directive
class Place(Directive, frozen=True):
    """Put the matched nodes on a device group; ``stream`` carries their messages to other groups.

    A group of n > 1 devices runs n replicas and must be claimed by ``Replicate``. Linked groups
    must have equal sizes; expert regions on a group of another size are placed by their ``Shard``.

    Before ``Place({"PP": 1}, devices=[1])`` after ``Place({"PP": 0}, devices=[0])``::

        F PP=0 @0  ──h──▶  F PP=1 @-

    After::

        F PP=0 @0  ──h──▶  transfer 0>1  ──h'──▶  F PP=1 @1

    Raises :class:`PlacementError` for a node that is placed already, or an illegal group.
    """

    filter: dict[str, FilterValue]
    devices: list[int]
    stream: str | None = None

    def apply(self, dag: Dag, number: int, selector: Selector) -> Edit:  # noqa: ARG002
        group = device_group(self.devices)
        stream = Stream(self.stream) if self.stream else None
        ordered = ordered_by_user(dag)
        changed: dict[NodeId, Chunk] = {}
        for chunk in matching_chunks(dag, selector, self.filter):
            if chunk.devices is not None:
                raise PlacementError(
                    f"node {chunk.label!r} is placed twice: on devices {list(chunk.devices)} before, on "
                    f"{self.devices} by this directive; make the filters disjoint"
                )
            if chunk.id in ordered:
                raise PlacementError(
                    f"node {chunk.label!r} is already ordered: an Order speaks of chunks on the same device, so "
                    "it must come after the Place of its chunks"
                )
            changed[chunk.id] = replace(chunk, devices=group, p2p_stream=stream)
        return replace_nodes(dag, changed)


def device_lists(devices: list[int | list[int]]) -> tuple[DeviceGroup, ...]:
    """The groups of a list of lists of devices; a plain list of devices is one group. No device
    is in two of them.
    """
    flat = [d for d in devices if isinstance(d, int)]
    nested = tuple(device_group(list(d)) for d in devices if not isinstance(d, int))
    if flat and nested:
        raise PlacementError(f"devices is a list of devices or a list of lists, found {devices}")
    groups = nested or (device_group(flat),)
    device_group([d for group in groups for d in group])
    return groups


def device_group(devices: list[int]) -> DeviceGroup:
    """A validated device group."""
    if not devices:
        raise PlacementError("a device group needs at least one device, found an empty list")
    if max(devices) >= MAX_DEVICES:
        raise PlacementError(
            f"devices are counted from 0, below {MAX_DEVICES}; found {max(devices)!r:.40}"
        )
    if len(set(devices)) != len(devices) or min(devices) < 0:
        raise PlacementError(
            f"a device group lists distinct devices counted from 0, found {list(devices)}"
        )
    return tuple(DeviceId(d) for d in devices)

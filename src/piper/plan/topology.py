"""Which links connect the devices, and what a message or a collective asks of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from piper.boundary import public
from piper.errors import ConfigError
from piper.ids import DeviceId
from piper.limits import MAX_DEVICES

Port: TypeAlias = tuple[str, int, int]
"""One direction of one connection: ``("out" | "in", device, 0)`` within a node, ``("nic out" | "nic
in", node, number)`` between nodes.
"""


@public
@dataclass(frozen=True, slots=True)
class Link:
    """Seconds until the first byte arrives, and bytes per second in each direction."""

    latency: float
    bandwidth: float


class Contention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is left of the speed of two things that need one processor, each a fraction from 0
    (exclusive) to 1 (nothing is lost): of a device's local ``work`` while communication of its own
    is under way, of ``traffic`` while one of its members computes.
    """

    work: float
    traffic: float


@public
@dataclass(frozen=True, slots=True)
class Topology:
    """``nodes`` machines with ``devices_per_node`` devices each; device d is on node d //
    devices_per_node.

    Every device has a connection of its own to the others of its node (``intra``). Every node has
    ``nics`` connections to the other nodes (``inter`` each), which its devices share: device number
    i of a node uses number i · nics // devices_per_node. All are full duplex. What goes through one
    port at once shares its bandwidth in equal parts.

    ``collectives`` are measured ones, by kind and number of members: on an idle node one of n bytes
    takes the latency and n over the bandwidth. They take the place of what :func:`traffic` computes
    otherwise.
    """

    nodes: int
    devices_per_node: int
    intra: Link
    inter: Link
    nics: int = 1
    collectives: Mapping[str, Mapping[int, Link]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if min(self.nodes, self.devices_per_node, self.nics) < 1:
            raise ConfigError(
                f"a topology has at least 1 node, 1 device per node and 1 connection per node, found nodes={self.nodes}, "
                f"devices_per_node={self.devices_per_node}, nics={self.nics}"
            )
        if max(self.nodes * self.devices_per_node, self.nics) > MAX_DEVICES:
            raise ConfigError(
                f"a topology has at most {MAX_DEVICES} devices and connections, found nodes={self.nodes!r:.40}, "
                f"devices_per_node={self.devices_per_node!r:.40}, nics={self.nics!r:.40}"
            )
        links = [("intra", self.intra), ("inter", self.inter)]
        for kind, measured in self.collectives.items():
            if any(members < 2 for members in measured):
                raise ConfigError(f"collectives[{kind!r:.40}]: a collective has 2 members or more")
            links += [(f"collectives[{kind!r:.40}][{n}]", link) for n, link in measured.items()]
        for name, link in links:
            if not (0 <= link.latency < math.inf and link.bandwidth > 0):
                raise ConfigError(
                    f"{name}: expected a latency of 0 s or more, and a positive bandwidth, found {link.latency:g} and {link.bandwidth:g}"
                )

    def check(self, num_devices: int) -> None:
        """Raise :class:`ConfigError` if there are fewer than *num_devices* devices."""
        if (found := self.nodes * self.devices_per_node) < num_devices:
            raise ConfigError(
                f"the plan needs {num_devices} devices, but the topology has {found} ({self.nodes} nodes of {self.devices_per_node}); "
                f"give it at least {-(-num_devices // self.devices_per_node)} nodes"
            )

    def bandwidth(self, port: Port) -> float:
        """Bytes per second of a port."""
        return (self.inter if port[0].startswith("nic") else self.intra).bandwidth

    def node(self, device: DeviceId) -> int:
        """The machine that *device* is on."""
        return device // self.devices_per_node

    def path(self, sender: DeviceId, receiver: DeviceId) -> tuple[Link, tuple[Port, ...]]:
        """The link that a message uses, and the ports that it goes through."""
        here, there = self.node(sender), self.node(receiver)
        if here == there:
            return self.intra, (("out", sender, 0), ("in", receiver, 0))
        return self.inter, (
            ("nic out", here, self.nic(sender)),
            ("nic in", there, self.nic(receiver)),
        )

    def nic(self, device: DeviceId) -> int:
        """Which of its node's connections *device* uses."""
        return (device % self.devices_per_node) * self.nics // self.devices_per_node


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a message or collective asks of the links: after ``latency`` seconds, ``nbytes`` times
    the port's fraction through each of ``ports``.
    """

    latency: float
    nbytes: float
    ports: tuple[tuple[Port, float], ...]


def traffic(topology: Topology, role: str, members: Sequence[DeviceId], nbytes: float) -> Traffic:
    """The traffic of one rendezvous whose messages have *nbytes* in all (what each member has
    afterwards).

    Collectives take the bandwidth of rings of the members, which is the least possible, and the
    latency of recursive doubling (Thakur, Rabenseifner and Gropp, 2005): an all-reduce sends 2·(n −
    1)/n of its bytes through each device's port in 2·⌈log2 n⌉ rounds, the others (n − 1)/n of the
    whole in ⌈log2 n⌉. Between nodes there are as many rings as each node has connections for the
    members on it, each with an equal part of the bytes.
    """
    if role in ("send", "receive"):
        link, path = topology.path(members[0], members[1])
        return Traffic(link.latency, nbytes, tuple((port, 1.0) for port in path))
    count = len(members)
    if count < 2:
        return Traffic(0.0, 0.0, ())
    volume, rounds = _volume(role)(nbytes, count)
    rounds *= _doublings(count)
    by_node: dict[int, list[DeviceId]] = {}
    for member in members:
        by_node.setdefault(topology.node(member), []).append(member)
    ports: dict[Port, float] = {}
    for mine in by_node.values():
        if len(mine) > 1:
            ports.update((("out", d, 0), 1.0) for d in mine)
            ports.update((("in", d, 0), 1.0) for d in mine)
    if len(by_node) == 1:
        known = topology.collectives.get(KINDS.get(role, role))
        if known:
            link = _measured(known, role, count)
            return Traffic(
                link.latency,
                nbytes * topology.intra.bandwidth / link.bandwidth,
                tuple(ports.items()),
            )
        return Traffic(rounds * topology.intra.latency, volume, tuple(ports.items()))
    nics = {node: sorted({topology.nic(d) for d in mine}) for node, mine in by_node.items()}
    rings = min(map(len, nics.values()))
    for node, numbers in nics.items():
        for number in numbers[:rings]:
            ports["nic out", node, number] = ports["nic in", node, number] = 1 / rings
    return Traffic(rounds * topology.inter.latency, volume, tuple(ports.items()))


def _measured(known: Mapping[int, Link], role: str, count: int) -> Link:
    """The time of a collective of *count* members; of another number than was measured, in the
    proportions of :func:`traffic`.
    """
    nearest = min(known, key=lambda members: (abs(members - count), members))
    link, volume = known[nearest], _volume(role)
    more = volume(1.0, count)[0] / volume(1.0, nearest)[0]
    rounds = _doublings(count) / _doublings(nearest)
    return Link(link.latency * rounds, link.bandwidth / more)


def _doublings(count: int) -> int:
    return math.ceil(math.log2(count))


KINDS: Mapping[str, str] = {
    "refresh": "all_gather",
    "all_to_all_rows": "all_to_all",
    "all_to_all_counts": "all_to_all",
}
"""The role of a rendezvous → the collective that it is to the network, where they differ."""


def _volume(role: str) -> Callable[[float, int], tuple[float, int]]:
    """Bytes through each port and rounds (of log2 n), from the bytes that a member has afterwards
    and the members.
    """
    match role:
        case "all_reduce":
            return lambda nbytes, n: (2 * (n - 1) / n * nbytes, 2)
        case "reduce_scatter":  # what a member has afterwards is one of n parts
            return lambda nbytes, n: ((n - 1) * nbytes, 1)
        case _:
            return lambda nbytes, n: ((n - 1) / n * nbytes, 1)


def alone_seconds(topology: Topology, asked: Traffic) -> float:
    """How long *asked* takes on idle links."""
    if not asked.ports or not asked.nbytes:
        return asked.latency
    rate = min(topology.bandwidth(port) / fraction for port, fraction in asked.ports)
    return asked.latency + asked.nbytes / rate

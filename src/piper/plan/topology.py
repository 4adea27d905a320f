"""Which links connect the devices, and what a message or a collective asks of them."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from piper.errors import ConfigError
from piper.ids import DeviceId

Port: TypeAlias = tuple[str, int, int]
"""One direction of one connection: ``("out" | "in", device, 0)`` within a node, ``("nic out" | "nic in", node, number)`` between nodes."""


@dataclass(frozen=True, slots=True)
class Link:
    """Seconds until the first byte arrives, and bytes per second in each direction."""

    latency: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Topology:
    """``nodes`` machines with ``devices_per_node`` devices each; device d is on node d // devices_per_node.

    Every device has a connection of its own to the others of its node (``intra``). Every node has ``nics`` connections to
    the other nodes (``inter`` each), which its devices share: device number i of a node uses number i · nics // devices_per_node. All are
    full duplex. What goes through one port at once shares its bandwidth in equal parts.
    """

    nodes: int
    devices_per_node: int
    intra: Link
    inter: Link
    nics: int = 1

    def __post_init__(self) -> None:
        if min(self.nodes, self.devices_per_node, self.nics) < 1:
            raise ConfigError(
                f"a topology has at least 1 node, 1 device per node and 1 connection per node, found nodes={self.nodes}, "
                f"devices_per_node={self.devices_per_node}, nics={self.nics}"
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
            ("nic out", here, self._nic(sender)),
            ("nic in", there, self._nic(receiver)),
        )

    def _nic(self, device: DeviceId) -> int:
        return (device % self.devices_per_node) * self.nics // self.devices_per_node


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a message or collective asks of the links: ``nbytes`` through each of ``ports``, after ``latency`` seconds."""

    latency: float
    nbytes: float
    ports: tuple[Port, ...]


def traffic(
    topology: Topology, role: str, members: Sequence[DeviceId], nbytes: float
) -> Traffic:
    """The traffic of one rendezvous whose messages have *nbytes* in all (what each member has afterwards).

    Collectives take the bandwidth of a ring of the members in node order, which is the least possible, and the latency of
    recursive doubling (Thakur, Rabenseifner and Gropp, 2005): an all-reduce sends 2·(n − 1)/n of its bytes through each port in 2·⌈log2 n⌉
    rounds, the others (n − 1)/n of the whole in ⌈log2 n⌉.
    """
    if role in ("send", "receive"):
        link, ports = topology.path(members[0], members[1])
        return Traffic(link.latency, nbytes, ports)
    count = len(members)
    if count < 2:
        return Traffic(0.0, 0.0, ())
    volume, rounds = _volume(role)(nbytes, count)
    ring = sorted(members)
    hops = [topology.path(a, b) for a, b in pairwise([*ring, ring[0]])]
    ports = tuple(dict.fromkeys(port for _, hop in hops for port in hop))
    latency = max(link.latency for link, _ in hops)
    return Traffic(rounds * math.ceil(math.log2(count)) * latency, volume, ports)


def _volume(role: str) -> Callable[[float, int], tuple[float, int]]:
    """Bytes through each port and rounds (of log2 n), from the bytes that a member has afterwards and the members."""
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
    return asked.latency + asked.nbytes / slowest(topology, asked.ports)


def slowest(topology: Topology, ports: Iterable[Port]) -> float:
    """The least bandwidth of *ports*."""
    return min(topology.bandwidth(port) for port in ports)

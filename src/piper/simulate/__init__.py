"""What a plan would do, without running it.

``engine`` executes the plan in simulated time, ``memory`` follows its allocations, ``critical``
finds what its length is made of, ``timeline`` is the result as data.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from piper.boundary import public
from piper.errors import ConfigError, expect
from piper.ids import DeviceId, NodeId
from piper.ops.all_to_all import ExchangeRows
from piper.ops.base import Instruction, Rendezvous
from piper.ops.compute import Compute
from piper.pausing import collector_paused
from piper.plan.account import OptimizerBytes, account
from piper.plan.added import wholly_added
from piper.plan.costs import ADDED, Costs, UnitCosts, hardware
from piper.plan.model import Plan
from piper.plan.topology import Port, Topology, Traffic, traffic
from piper.plan.work import touched_bytes
from piper.simulate.build import build_timeline
from piper.simulate.engine import Flow, run
from piper.simulate.timeline import FORWARDS, SECONDS, Timeline

__all__ = ["simulate"]


@public
def simulate(
    plan: Plan,
    costs: Costs | str | None = None,
    *,
    optimizer_bytes: OptimizerBytes = 0,
    frame_bytes: Callable[[int], int] = int,
) -> Timeline:
    """What *plan* would do, instruction by instruction. Deterministic.

    *costs* are :class:`~piper.plan.costs.UnitCosts` (the default), a
    :class:`~piper.plan.costs.Hardware` or its preset's name (``"H100"``), or a
    :class:`~piper.plan.profile.Profile`. *optimizer_bytes* and *frame_bytes* are those of
    :func:`~piper.plan.account.account`.

    Of a folded plan, the links are those of the devices that have a program: the times are the
    whole plan's where replicas are connected alike, as they are when groups of replicas fill whole
    nodes.

    Raises :class:`~piper.errors.ConfigError` for an unknown preset, too few devices, or a chunk
    that was not measured; :class:`~piper.errors.PlanError` for a plan that never ends.
    """
    expect(plan, Plan, "simulate", "piper.plan makes one of a training DAG")
    if costs is not None and not isinstance(costs, (str, Costs)):
        raise ConfigError(
            f'simulate: costs are piper.UnitCosts(), a preset such as "H100", a piper.Hardware or a piper.Profile, found {costs!r:.80}'
        )
    chosen = hardware(costs) if isinstance(costs, str) else costs or UnitCosts()
    with collector_paused():
        timing = _Timing(plan, chosen, chosen.topology_for(plan.num_devices))
        found = run(plan, timing)
        memory = account(plan, optimizer_bytes, frame_bytes=frame_bytes)
        unit = FORWARDS if isinstance(chosen, UnitCosts) else SECONDS
        return build_timeline(plan, found, memory, peak=chosen.peak_flops, unit=unit)


@dataclass
class _Timing:
    """Implements :class:`~piper.simulate.engine.Timing` with costs."""

    plan: Plan
    costs: Costs
    topology: Topology | None
    _chunks: dict[NodeId, float] = field(default_factory=dict)
    _traffic: dict[tuple[str, tuple[DeviceId, ...], int], Traffic] = field(default_factory=dict)
    _crossings: dict[int, dict[Port, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.host_blocks, self.launch = self.costs.host_blocks, self.costs.launch
        self.contention = self.costs.contention
        self._added: set[int] = set()
        if self.host_blocks:
            for mine in self.plan.devices:
                self._added |= {id(mine.instructions[i]) for i in wholly_added(mine.instructions)}
        self._present = {mine.device for mine in self.plan.devices if mine.instructions}
        # Of a folded plan, the ports of devices without a program are loaded like those of the ones
        # that stand for them.
        self._near: set[Port] = set()
        if self.topology is not None:
            for device in self._present:
                node, nic = self.topology.node(device), self.topology.nic(device)
                self._near |= {("out", device, 0), ("in", device, 0)}
                self._near |= {("nic out", node, nic), ("nic in", node, nic)}

    def local(self, device: DeviceId, instruction: Instruction) -> float:
        """Seconds of a chunk; of all else by the bytes that it reads and writes, and of handing
        communication to the network.
        """
        if isinstance(instruction, Compute):
            node = instruction.node
            if (seconds := self._chunks.get(node)) is None:
                chunk = self.plan.dag.nodes[node]
                # Only chunks are computed: the verifier saw to it.
                seconds = self.costs.chunk(self.plan.dag, self.plan.bindings, chunk)  # type: ignore[arg-type]
                self._chunks[node] = seconds
            return seconds
        nbytes = touched_bytes(self.plan.devices[device], instruction)
        op = ADDED if id(instruction) in self._added else instruction.op
        seconds = self.costs.local(op, nbytes) if nbytes else 0.0
        if (meeting := instruction.rendezvous()) is None:
            return seconds
        crossing = self._crossing_bytes(device, instruction, meeting)
        return seconds + self.costs.issue(meeting.role, len(meeting.members), crossing)

    def _crossing_bytes(
        self, device: DeviceId, instruction: Instruction, meeting: Rendezvous
    ) -> int:
        """Bytes that a member has afterwards. Rows for experts come with room for all of the
        group's: taken to be as many as a member gives.
        """
        if not isinstance(instruction, ExchangeRows):
            return meeting.nbytes
        given = self.plan.devices[device].slots[instruction.inputs[0]].message.nbytes
        return min(given, meeting.nbytes)

    def flow(self, members: Sequence[tuple[DeviceId, Instruction]]) -> Flow:
        """By the topology. What hosts do with what they waited for is part of it: they can do
        nothing else then.
        """
        if self.topology is None:
            return Flow(0.0)
        device, instruction = members[0]
        meeting = instruction.rendezvous()
        assert meeting is not None
        nbytes = self._crossing_bytes(device, instruction, meeting)
        key = (meeting.role, meeting.members, nbytes)
        if (asked := self._traffic.get(key)) is None:
            asked = self._traffic[key] = traffic(self.topology, *key)
        latency = asked.latency + max(self._unpack(*member) for member in members)
        if not self.plan.roles:
            return Flow(latency, asked.nbytes, tuple((p, 1.0, part) for p, part in asked.ports))
        shares = self._shares(instruction.node)
        ports = tuple((p, shares.get(p, 1.0), part) for p, part in asked.ports if p in self._near)
        return Flow(latency, asked.nbytes, ports)

    def _unpack(self, device: DeviceId, instruction: Instruction) -> float:
        nbytes = touched_bytes(self.plan.devices[device], instruction)
        return self.costs.unpack(instruction.op, nbytes)

    def _shares(self, node: NodeId) -> dict[Port, float]:
        """Of a folded plan: how many of a node's groups go through each port, for each of those
        that have a program; ports that are not listed have one.
        """
        assert self.topology is not None
        groups: tuple[tuple[DeviceId, ...], ...] = self.plan.dag.nodes[node].groups  # type: ignore[union-attr]  # a communication
        if len(groups) == 1:
            return {}
        if (known := self._crossings.get(id(groups))) is None:
            everyone: dict[Port, int] = {}
            represented: dict[Port, int] = {}
            role = self.plan.dag.nodes[node].work.kind
            for group in groups:
                mine = not self._present.isdisjoint(group)
                for port, _ in traffic(self.topology, _ROLES.get(role, role), group, 1.0).ports:
                    everyone[port] = everyone.get(port, 0) + 1
                    represented[port] = represented.get(port, 0) + mine
            known = {p: everyone[p] / count for p, count in represented.items() if count}
            self._crossings[id(groups)] = known
        return known

    def bandwidth(self, port: Port) -> float:
        """Bytes per second."""
        assert self.topology is not None
        return self.topology.bandwidth(port)


_ROLES = {"transfer": "send"}
"""A node's kind → the role of its rendezvous, where they differ."""

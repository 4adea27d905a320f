"""How long things take: what the simulator, and on request the planner, believe.

Three kinds: :class:`UnitCosts` counts in forwards, :class:`Hardware` estimates from the data sheet
of a device, :class:`~piper.plan.profile.Profile` remembers measurements.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from piper.boundary import public
from piper.dtypes import DType
from piper.errors import ConfigError, expect, nearest
from piper.ids import BodyId
from piper.ir.dag import Chunk, Dag, Pass
from piper.ops.compute import Call
from piper.plan.topology import Contention, Link, Topology
from piper.plan.work import BodyWork, body_work

COPIES = frozenset({"send", "post_receive"})

ADDED = "added"
"""What an ``Accumulate`` is called for :meth:`Costs.local` if chunks do all of it: see
:mod:`piper.plan.added`.
"""


@runtime_checkable
class Costs(Protocol):
    """Durations in seconds (:class:`UnitCosts`: in forwards).

    ``host_blocks``: the device computes where it is told to, as a CPU does: one instruction after
    the other, and a wait stops all that follows. Else the host runs ahead, and each stream goes its
    own way. ``launch`` is what the host needs per instruction. ``peak_flops`` is what one device
    could do per second, ``None`` where nothing is known. ``contention``: whether communication and
    computation hold each other up; ``None``: they do not.
    """

    @property
    def host_blocks(self) -> bool: ...

    @property
    def launch(self) -> float: ...

    @property
    def peak_flops(self) -> float | None: ...

    @property
    def contention(self) -> Contention | None: ...

    def topology_for(self, num_devices: int) -> Topology | None:
        """The links between *num_devices* devices; ``None``: communication takes no time.

        Raises :class:`ConfigError` if there are fewer devices.
        """

    def chunk(self, dag: Dag, bindings: Mapping[str, int], chunk: Chunk) -> float:
        """Seconds of a chunk that calls a body; *bindings* gives the symbols their sizes.

        Raises :class:`ConfigError` for a chunk about which nothing is known.
        """

    def local(self, op: str, nbytes: int) -> float:
        """Seconds of any other instruction ``op`` that reads and writes *nbytes*; of communication,
        of what is done before it is issued.
        """

    def issue(self, role: str, members: int, nbytes: int) -> float:
        """Seconds until the host has issued communication of *nbytes* in all, and goes on."""

    def unpack(self, op: str, nbytes: int) -> float:
        """Seconds that a host spends on what communication ``op`` brought, once it has waited for
        it; *nbytes* as for :meth:`local`.
        """


@public
@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Chunks by their pass, in units of one forward of a stage; all else takes no time. Schedules
    are usually drawn so.
    """

    forward: float = 1.0
    backward: float = 2.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    host_blocks: bool = False
    launch: float = 0.0
    peak_flops: float | None = None
    contention: Contention | None = None

    def topology_for(self, num_devices: int) -> None:
        """See :class:`Costs`."""

    def chunk(self, dag: Dag, bindings: Mapping[str, int], chunk: Chunk) -> float:  # noqa: ARG002
        """See :class:`Costs`."""
        return {
            Pass.FORWARD: self.forward,
            Pass.BACKWARD: self.backward,
            Pass.BACKWARD_INPUT: self.backward_input,
            Pass.BACKWARD_WEIGHT: self.backward_weight,
            Pass.UPDATE: 0.0,
        }[chunk.pass_]

    def local(self, op: str, nbytes: int) -> float:  # noqa: ARG002
        """See :class:`Costs`."""
        return 0.0

    def issue(self, role: str, members: int, nbytes: int) -> float:  # noqa: ARG002
        """See :class:`Costs`."""
        return 0.0

    def unpack(self, op: str, nbytes: int) -> float:  # noqa: ARG002
        """See :class:`Costs`."""
        return 0.0


@public
@dataclass(frozen=True)
class Hardware:
    """A device by its data sheet.

    ``flops`` is the peak per element type of products (a type that is not listed computes like the
    slowest), ``memory`` bytes per second. Products reach ``efficiency`` of the peak and
    ``memory_efficiency`` of the bandwidth; each operator call takes ``call`` seconds at least, a
    call as long as the longer of its arithmetic and its memory traffic. ``topology`` is by default
    as many nodes of ``devices_per_node`` devices as there need to be, connected by ``intra`` and,
    with one connection per ``devices_per_nic`` devices, ``inter``.
    """

    name: str
    flops: Mapping[DType, float]
    memory: float
    intra: Link
    inter: Link
    devices_per_node: int = 8
    devices_per_nic: int = 1
    efficiency: float = 0.6
    memory_efficiency: float = 0.8
    call: float = 4e-6
    launch: float = 1e-6
    host_blocks: bool = False
    contention: Contention | None = None
    topology: Topology | None = None
    peak_dtype: DType = DType.BFLOAT16
    _work: dict[tuple[BodyId, tuple[tuple[str, int], ...]], BodyWork] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def peak_flops(self) -> float:
        """See :class:`Costs`: that of ``peak_dtype``."""
        return self.flops[self.peak_dtype]

    def topology_for(self, num_devices: int) -> Topology:
        """See :class:`Costs`."""
        if self.topology is not None:
            self.topology.check(num_devices)
            return self.topology
        nodes = max(1, -(-num_devices // self.devices_per_node))
        nics = max(1, self.devices_per_node // self.devices_per_nic)
        return Topology(nodes, self.devices_per_node, self.intra, self.inter, nics)

    def chunk(self, dag: Dag, bindings: Mapping[str, int], chunk: Chunk) -> float:
        """See :class:`Costs`."""
        assert isinstance(chunk.work, Call)
        key = (chunk.work.body, tuple(sorted(bindings.items())))
        if (work := self._work.get(key)) is None:
            work = self._work[key] = body_work(dag.bodies[chunk.work.body], bindings)
        slow = min(self.flops.values())
        return sum(
            self.call
            + max(
                call.flops / (self.flops.get(call.dtype, slow) * self.efficiency),
                call.nbytes / (self.memory * self.memory_efficiency),
            )
            for call in work.calls
        )

    def local(self, op: str, nbytes: int) -> float:
        """See :class:`Costs`. What is sent and received is not copied by devices other than
        CPUs.
        """
        if op in COPIES and not self.host_blocks:
            return 0.0
        return self.call + nbytes / (self.memory * self.memory_efficiency)

    def issue(self, role: str, members: int, nbytes: int) -> float:  # noqa: ARG002
        """See :class:`Costs`: part of :meth:`local`."""
        return 0.0

    def unpack(self, op: str, nbytes: int) -> float:  # noqa: ARG002
        """See :class:`Costs`: part of :meth:`local`."""
        return 0.0


def _gpu(
    name: str,
    bfloat16: float,
    float32: float,
    float64: float,
    memory: float,
    nvlink: float,
    nic: float,
) -> Hardware:
    """Peaks in TFLOP/s (dense), bandwidths in GB/s per direction."""
    flops = {
        DType.BFLOAT16: bfloat16 * 1e12,
        DType.FLOAT16: bfloat16 * 1e12,
        DType.FLOAT32: float32 * 1e12,
        DType.FLOAT64: float64 * 1e12,
    }
    return Hardware(name, flops, memory * 1e9, Link(5e-6, nvlink * 1e9), Link(1e-5, nic * 1e9))


PRESETS: Mapping[str, Hardware] = {
    "A100": _gpu("A100", 312, 19.5, 19.5, 2039, 300, 25),
    "H100": _gpu("H100", 989, 67, 67, 3350, 450, 50),
    "H200": _gpu("H200", 989, 67, 67, 4800, 450, 50),
    "CPU": Hardware(
        "CPU",
        {DType.FLOAT32: 5e10, DType.FLOAT64: 2.5e10},
        1e10,
        Link(5e-5, 1e9),
        Link(2e-4, 1.25e8),
        devices_per_node=2,
        devices_per_nic=2,
        call=2e-6,
        launch=2e-6,
        host_blocks=True,
        peak_dtype=DType.FLOAT32,
    ),
}
"""Devices by name. NVIDIA's data sheets (SXM, 80 GB or 141 GB): dense peaks, NVLink per direction,
one 200 or 400 Gbit/s adapter per GPU. CPU: one core of a server, gloo over loopback, 1 Gbit/s
between machines.
"""


@public
def hardware(name: str, topology: Topology | None = None) -> Hardware:
    """The preset *name*, connected by *topology* if given. Raises :class:`ConfigError` for an
    unknown name.
    """
    expect(name, str, "hardware", f"known: {', '.join(PRESETS)}")
    for known, preset in PRESETS.items():
        if known.lower() == name.lower():
            return preset if topology is None else replace(preset, topology=topology)
    raise ConfigError(
        f"unknown device preset {name!r}{nearest(name.upper(), PRESETS)}; known: {', '.join(PRESETS)}"
    )

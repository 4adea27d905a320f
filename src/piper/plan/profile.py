"""Measured durations, as a file: what ``piper profile`` writes and ``piper simulate --profile``
reads.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from piper.boundary import public
from piper.brief import brief, count
from piper.errors import ConfigError
from piper.ids import BodyId
from piper.ir.dag import Chunk, Dag
from piper.ops.compute import Call
from piper.plan.topology import KINDS, Contention, Link, Topology

VERSION = 2
"""Format version of profile files; a file of another version is refused."""


class Rate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds that something takes: ``fixed``, and ``per_byte`` more."""

    fixed: float
    per_byte: float

    def seconds(self, nbytes: float) -> float:
        """For *nbytes*."""
        return self.fixed + nbytes * self.per_byte


_NOTHING = Rate(0.0, 0.0)
"""Of instructions that a plan does not have."""


class Exchange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Communication whose members have nothing else to do: seconds until a host has issued it, and
    from then until it is complete. The bytes are those that each member has afterwards.
    """

    issue: Rate
    travel: Rate

    @property
    def link(self) -> Link:
        """From when it is issued."""
        return Link(self.travel.fixed, 1 / max(self.travel.per_byte, 1e-15))


def _brief_profile(it: "Profile") -> str:
    return f"{it.machine!r}, {count(len(it.chunks), 'chunk')}, {count(len(it.collectives), 'kind')} of collectives"


@brief(_brief_profile)
class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Durations measured on one device. Implements :class:`~piper.plan.costs.Costs`.

    ======================  ============================================================================================================
    ``chunks``              seconds per call, by body and sizes (:func:`chunk_key`)
    ``rates``               local work by the name of its instruction, per byte that it reads and writes; of communication, what is done
                            before it is issued (packing a bucket)
    ``unpacking``           the same for what is done when communication was waited for
    ``messages``            one message between two devices
    ``collectives``         by kind, and by number of members
    ``contention``          what is left of the speed of local work and of traffic while both need a device's processor
    ``launch``              seconds that the interpreter spends per instruction
    ``machine``             where all this was measured, in words
    ======================  ============================================================================================================
    """

    version: int
    machine: str
    chunks: dict[str, float]
    rates: dict[str, Rate]
    launch: float
    messages: Exchange
    unpacking: dict[str, Rate] = {}
    collectives: dict[str, dict[int, Exchange]] = {}
    contention: Contention | None = None
    host_blocks: bool = True
    peak_flops: float | None = None

    def topology_for(self, num_devices: int) -> Topology:
        """All devices on one node: the link that was measured connects any two."""
        link = self.messages.link
        collectives = {
            kind: {members: exchange.link for members, exchange in found.items()}
            for kind, found in self.collectives.items()
        }
        return Topology(1, num_devices, link, link, collectives=collectives)

    def chunk(self, dag: Dag, bindings: Mapping[str, int], chunk: Chunk) -> float:  # noqa: ARG002
        """See :class:`~piper.plan.costs.Costs`."""
        assert isinstance(chunk.work, Call)
        key = chunk_key(chunk.work.body, bindings)
        if (seconds := self.chunks.get(key)) is None:
            raise ConfigError(
                f"the profile has no measurement of chunk {chunk.label!r} (body {chunk.work.body}, sizes {dict(bindings) or 'fixed'}); "
                "measure it with `piper profile CONFIG` for the configuration that is simulated"
            )
        return seconds

    def local(self, op: str, nbytes: int) -> float:
        """See :class:`~piper.plan.costs.Costs`."""
        return self.rates.get(op, _NOTHING).seconds(nbytes)

    def issue(self, role: str, members: int, nbytes: int) -> float:
        """See :class:`~piper.plan.costs.Costs`."""
        if role == "receive":  # room is made, nothing is copied
            return self.messages.issue.fixed
        if not (known := self.collectives.get(KINDS.get(role, role))):
            return self.messages.issue.seconds(nbytes)
        return known[min(known, key=lambda n: (abs(n - members), n))].issue.seconds(nbytes)

    def unpack(self, op: str, nbytes: int) -> float:
        """See :class:`~piper.plan.costs.Costs`."""
        return self.unpacking.get(op, _NOTHING).seconds(nbytes)

    def save(self, path: str | Path) -> None:
        """Write JSON. Raises :class:`ConfigError` if the file cannot be written."""
        try:
            Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))
        except OSError as error:
            raise ConfigError(f"cannot write profile {path}: {error.strerror}") from error


def chunk_key(body: BodyId, bindings: Mapping[str, int]) -> str:
    """``body@s0=4``: the name of a body's measurement at these sizes."""
    sizes = ",".join(f"{name}={size}" for name, size in sorted(bindings.items()))
    return f"{body}@{sizes}"


class _Version(msgspec.Struct):
    version: int


@public
def load_profile(path: str | Path) -> Profile:
    """The profile in a file. Raises :class:`ConfigError` if there is none, for another version or
    malformed contents.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"profile {path} cannot be read: {error.strerror}; measure one with `piper profile CONFIG -o {path}`"
        ) from error
    try:
        found = msgspec.json.decode(data, type=_Version).version
        if found == VERSION:
            return msgspec.json.decode(data, type=Profile)
    except msgspec.DecodeError as error:  # a ValidationError is one
        raise ConfigError(f"profile {path}: {error}") from error
    raise ConfigError(
        f"profile {path} has format version {found}, this piper reads version {VERSION}; measure again with `piper profile`"
    )

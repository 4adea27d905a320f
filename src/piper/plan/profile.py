"""Measured durations, as a file: what ``piper profile`` writes and ``piper simulate --profile``
reads.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from piper.boundary import public
from piper.brief import brief, count
from piper.errors import ConfigError
from piper.ids import BodyId
from piper.ir.dag import Chunk, Dag
from piper.limits import MAX_DEVICES
from piper.ops.compute import Call
from piper.plan.topology import KINDS, Contention, Link, Topology
from piper.reading import decode_json, read_file

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
    measure = f"; measure one with `piper profile CONFIG -o {path}`"
    data = read_file(Path(path), f"profile {path} cannot be read", ConfigError, remedy=measure)
    where = f"profile {path}"
    found = decode_json(data, _Version, where, ConfigError, whole=False).version
    if found != VERSION:
        raise ConfigError(
            f"{where} has format version {found!r:.40}, this piper reads version {VERSION}; measure again with `piper profile`"
        )
    profile = decode_json(data, Profile, where, ConfigError)
    for place, value in _numbers(profile):
        if not 0 <= value < math.inf:
            raise ConfigError(f"{where}: {place}: expected 0 or more, and finite, found {value:g}")
    for kind, measured in profile.collectives.items():
        if not measured or min(measured) < 2 or max(measured) > MAX_DEVICES:
            raise ConfigError(
                f"{where}: collectives[{kind!r:.40}]: expected measurements of 2 or more members, by their number"
            )
    return profile


def _numbers(profile: Profile) -> Iterator[tuple[str, float]]:
    """Every number, with its place."""
    yield "launch", profile.launch
    yield "peak_flops", profile.peak_flops or 0.0
    yield from ((f"chunks[{key!r:.60}]", seconds) for key, seconds in profile.chunks.items())
    rates = {f"rates[{op!r:.40}]": rate for op, rate in profile.rates.items()}
    rates |= {f"unpacking[{op!r:.40}]": rate for op, rate in profile.unpacking.items()}
    exchanges = {"messages": profile.messages} | {
        f"collectives[{kind!r:.40}][{members}]": exchange
        for kind, measured in profile.collectives.items()
        for members, exchange in measured.items()
    }
    for place, exchange in exchanges.items():
        rates |= {f"{place}.issue": exchange.issue, f"{place}.travel": exchange.travel}
    for place, rate in rates.items():
        yield f"{place}.fixed", rate.fixed
        yield f"{place}.per_byte", rate.per_byte
    if profile.contention is not None:
        for name in ("work", "traffic"):
            share = getattr(profile.contention, name)
            yield f"contention.{name}", share if share <= 1 else math.inf

"""Measured durations, as a file: what ``piper profile`` writes and ``piper simulate --profile`` reads."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from piper.errors import ConfigError
from piper.ids import BodyId
from piper.ir.dag import Chunk, Dag
from piper.ops.compute import Call
from piper.plan.topology import Link, Topology

VERSION = 1
"""Format version of profile files; a file of another version is refused."""


class Rate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds that something takes: ``fixed``, and ``per_byte`` more."""

    fixed: float
    per_byte: float

    def seconds(self, nbytes: float) -> float:
        """For *nbytes*."""
        return self.fixed + nbytes * self.per_byte


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Durations measured on one device. Implements :class:`~piper.plan.costs.Costs`.

    ``chunks`` has, by body and sizes (:func:`chunk_key`), seconds per call. ``rates`` has, by the name of an instruction, the time of
    local work; ``"*"`` stands for all that are not listed. ``link`` connects the devices. ``machine`` says in words where it was measured.
    """

    version: int
    machine: str
    chunks: dict[str, float]
    rates: dict[str, Rate]
    launch: float
    latency: float
    bandwidth: float
    host_blocks: bool = True
    peak_flops: float | None = None

    def topology_for(self, num_devices: int) -> Topology:
        """All devices on one node: the link that was measured connects any two."""
        link = Link(self.latency, self.bandwidth)
        return Topology(1, num_devices, link, link)

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
        return self.rates.get(op, self.rates["*"]).seconds(nbytes)

    def save(self, path: str | Path) -> None:
        """Write JSON."""
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))


def chunk_key(body: BodyId, bindings: Mapping[str, int]) -> str:
    """``body@s0=4``: the name of a body's measurement at these sizes."""
    sizes = ",".join(f"{name}={size}" for name, size in sorted(bindings.items()))
    return f"{body}@{sizes}"


class _Version(msgspec.Struct):
    version: int


def load_profile(path: str | Path) -> Profile:
    """The profile in a file. Raises :class:`ConfigError` if there is none, for another version or malformed contents."""
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

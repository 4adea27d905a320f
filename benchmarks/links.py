"""Links between two benchmark processes: the loopback device, or two network namespaces joined by
one of limited rate.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias

import msgspec
import torch
import torch.distributed as dist

CHECKED = 1 << 24
"""Bytes of the message that checks a link."""

Pair: TypeAlias = tuple[str, str]
"""One for each rank."""


class Link(msgspec.Struct, frozen=True):
    """How the two processes reach each other: what to put before their commands, addresses,
    interfaces.
    """

    name: str
    prefixes: tuple[tuple[str, ...], tuple[str, ...]]
    addresses: Pair
    interfaces: Pair


LOOPBACK = Link("loopback", ((), ()), ("127.0.0.1", "127.0.0.1"), ("lo", "lo"))


def open_link(name: str) -> AbstractContextManager[Link]:
    """The link *name*: ``loopback``, or :func:`limited` to a rate."""
    return nullcontext(LOOPBACK) if name == "loopback" else limited(name)


@contextmanager
def limited(rate: str) -> Iterator[Link]:
    """Two network namespaces joined by a link of *rate* (tc's notation) each way.

    Token buckets (``tc tbf``) on both ends: communication then takes wall time and almost no
    processor time. Torn down on the way out, also after an error.

    Raises:
        PermissionError: this user may not make namespaces, or ``ip`` and ``tc`` are missing.
    """
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise PermissionError("network namespaces need root, ip and tc")
    spaces = f"piper{os.getpid()}a", f"piper{os.getpid()}b"
    interfaces = "pipera", "piperb"
    addresses = "10.94.0.1", "10.94.0.2"
    made: list[str] = []
    try:
        for space in spaces:
            _command("ip", "netns", "add", space)
            made.append(space)
        peer = ("type", "veth", "peer", "name", interfaces[1], "netns", spaces[1])
        _command("ip", "link", "add", interfaces[0], "netns", spaces[0], *peer)
        for space, interface, address in zip(spaces, interfaces, addresses, strict=True):
            _command("ip", "-n", space, "addr", "add", f"{address}/24", "dev", interface)
            _command("ip", "-n", space, "link", "set", interface, "up")
            _command("ip", "-n", space, "link", "set", "lo", "up")
            segment = segment_bytes(rate)
            _command("ip", "-n", space, "link", "set", interface, "gso_max_size", f"{segment}")
            bucket = ("tbf", "rate", rate, "burst", f"{2 * segment}", "latency", "20ms")
            _command("tc", "-n", space, "qdisc", "add", "dev", interface, "root", *bucket)
        enter = ("ip", "netns", "exec")
        prefixes = (*enter, spaces[0]), (*enter, spaces[1])
        yield Link(rate, prefixes, addresses, interfaces)
    finally:
        for space in made:
            subprocess.run(["ip", "netns", "del", space], check=False)


def _command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def exchange(rank: int, nbytes: int) -> float:
    """Seconds that one message of *nbytes* and an empty answer take between ranks 0 and 1; the
    receive is posted first.
    """
    payload, answer = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(1)
    work = dist.irecv(payload, 0) if rank else None
    dist.barrier()
    began = time.perf_counter()
    if work is None:
        dist.send(payload, 1)
        dist.recv(answer, 1)
    else:
        work.wait()
        dist.send(answer, 0)
    return time.perf_counter() - began


def segment_bytes(rate: str) -> int:
    """How much the kernel may hand over to a link of *rate* as one packet: about half a
    millisecond's worth.

    Segments must fit into the bucket, and the bucket must be small beside a message, which would
    otherwise pass without delay after every pause. Smaller ones cost processor time, 8 KiB about 7
    s per GB and rank, 32 KiB 2, the kernel's usual 64 KiB 1.5: taken from the cores that compute,
    it would be measured as communication that does not overlap.
    """
    wanted = bytes_per_second(rate) * 0.5e-3
    return min(60 << 10, max(8 << 10, int(wanted)))


def bytes_per_second(rate: str) -> float:
    """What tc's notation of a rate (``1gbit``, ``100mbit``) means. Raises :class:`ValueError` for
    other units.
    """
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor / 8
    raise ValueError(f"expected a rate in gbit, mbit or kbit, found {rate!r}")

"""``piper profile``: measure how long the parts of a strategy take on this machine."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from piper.cli.plan import make_program
from piper.devices import collectives
from piper.devices.links import LinkTimes, between_processes, between_threads
from piper.ops.base import Rendezvous
from piper.plan.model import Plan
from piper.plan.profile import Exchange, Profile
from piper.plan.topology import KINDS, Contention
from piper.runtime.optimizer import OptimizerSpec
from piper.runtime.profiling import Network, measure_profile
from piper.training.config import load_config
from piper.training.model import make_skeleton

MOST_MEMBERS = 8
"""Larger collectives are measured with as many members; the rest is extrapolated."""


def profile(path: Path, console: Console, output: Path, *, repeats: int) -> None:
    """Write the profile of the configuration at *path* to *output*: messages and collectives
    between as many processes (or threads) as take part, how communication and computation slow each
    other down, and the program of each device by itself, with as many threads as one worker will
    have.
    """
    config = load_config(path)
    plan = make_program(config, make_skeleton(config)).plan
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // plan.num_devices))
    try:
        with console.status("") as status:
            network = _network(plan, config.train.backend, status.update)
            found = measure_profile(
                plan,
                OptimizerSpec(config.optimizer.build),
                network,
                repeats=repeats,
                batch=config.batches()(0),
                on_device=lambda device: status.update(f"running device {device} by itself"),
            )
    finally:
        torch.set_num_threads(before)
    found.save(output)
    for line in (*_lines(found), f"written to {output}"):
        console.print(Text(line), soft_wrap=True)


def _network(plan: Plan, backend: str, tell: Callable[[str], None]) -> Network:
    threads = backend == "inprocess"
    tell("sending messages")
    messages = between_threads() if threads else between_processes()
    measure = collectives.between_threads if threads else collectives.between_processes
    found: dict[str, dict[int, LinkTimes]] = {}
    contention: Contention | None = None
    for members, kinds in sorted(_collectives(plan).items()):
        tell(f"collectives of {members} members")
        times = measure(members, sorted(kinds))
        contention = contention or times.contention
        for kind, of in times.kinds.items():
            found.setdefault(kind, {})[members] = of
    return Network(messages, found, contention)


def _collectives(plan: Plan) -> dict[int, set[str]]:
    """Kinds by number of members. Between two, how communication and computation slow each other
    down is measured in any case.
    """
    found: dict[int, set[str]] = {2: set()} if plan.num_devices > 1 else {}
    for mine in plan.devices:
        for instruction in mine.instructions:
            meeting = instruction.rendezvous()
            if meeting is not None and _is_collective(meeting):
                members = min(len(meeting.members), MOST_MEMBERS)
                found.setdefault(members, set()).add(KINDS.get(meeting.role, meeting.role))
    return found


def _is_collective(meeting: Rendezvous) -> bool:
    return meeting.role not in ("send", "receive") and len(meeting.members) > 1


def _lines(found: Profile) -> Iterator[str]:
    """What was measured, in words."""
    total = sum(found.chunks.values())
    yield f"{len(found.chunks)} chunks, {total * 1e3:.3g} ms in all; other work of {len(found.rates) - 1} kinds"
    yield f"message: {_exchange(found.messages)}"
    for kind, by_members in found.collectives.items():
        for members, exchange in by_members.items():
            yield f"{kind} of {members}: {_exchange(exchange)}"
    if found.contention is not None:
        yield (
            f"while a device does both, its work goes at {found.contention.work:.0%} of its speed, its communication at "
            f"{found.contention.traffic:.0%}"
        )


def _exchange(of: Exchange) -> str:
    whole = of.issue.per_byte + of.travel.per_byte
    fixed = of.issue.fixed + of.travel.fixed
    return f"{fixed * 1e6:.3g} µs and {1e-6 / max(whole, 1e-15):.4g} MB/s"

"""Throughput of a pipeline of two workers: Piper against ``torch.distributed.pipelining``'s class
for the same schedule.

Both train the model of ``examples/gpt_stdlib.toml`` in the same two processes, one thread each,
each pinned to its own core, on the same batches and microbatches, with the same optimizer step, in
alternating rounds. Piper runs as under Ray: a :class:`~piper.runtime.worker.Worker` per process
with gloo communicators. Under 1F1B each rank has one stage, under the other schedules two. First
over the loopback device, then over a link of 100 Mbit/s between two network namespaces (needs root;
skipped with a message otherwise).

Before anything is timed, losses and gradients of one step are compared. Printed per link and
schedule: the ratio of minima and the median of the ratios within a round, of torch's time over
Piper's (above 1 means that Piper is faster); and Piper's step beside its *bound*, the length of the
simulated step (its critical path) with the times that its chunks, its other local work and messages
take by themselves.
"""

import argparse
import signal
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec
import torch
import torch.distributed as dist
from benchmarks.links import LOOPBACK, Link, exchange, free_port, open_link
from benchmarks.pipelines import (
    CONFIG,
    KINDS,
    MICROBATCHES,
    RANKS,
    ROWS,
    PiperSide,
    Setup,
    Side,
    TorchSide,
    check_equal,
)
from benchmarks.processes import join, launch, pinned
from benchmarks.support import busy_seconds, compared, machine, spread
from torch._C._distributed_c10d import Store

from piper.devices.gloo import GlooCommunicator
from piper.devices.links import LinkTimes, answer_link, measure_link
from piper.ids import DeviceId
from piper.plan.profile import Profile
from piper.runtime.profiling import Measured, Network, Replay
from piper.simulate import simulate
from piper.simulate.critical import shares

WARM_UP = 2
MESSAGE = 1 << 17
LINK_MESSAGES = 3

GOALS = {"1f1b": 1.15, "interleaved": 1.15, "zbv": 1.0, "dualpipev": 1.3}
"""Of the ratios over the limited link; 1.0 over the loopback device."""

BOUND_GOAL = 0.95


class Bound(msgspec.Struct, frozen=True):
    """What a step would take if nothing cost more than by itself: seconds, those of the chunks of
    each rank, the number of instructions of each rank, and what the critical path is made of, in
    words.
    """

    seconds: float
    compute: tuple[float, ...]
    instructions: tuple[int, ...]
    path: str


class Found(msgspec.Struct, frozen=True):
    """What was measured, by schedule and ``piper`` or ``torch``: seconds per step in each round,
    processor seconds likewise by rank; the bound and the largest error of a gradient by schedule;
    the cores that others kept busy meanwhile, and the seconds that one message of :data:`MESSAGE`
    bytes takes.
    """

    seconds: dict[str, dict[str, list[float]]]
    cpu: list[dict[str, dict[str, list[float]]]]
    bounds: dict[str, Bound]
    errors: dict[str, float]
    foreign: float
    message: float


def work(rank: int, setup: Setup) -> None:
    """One process. Rank 0 prints the rounds as JSON."""
    pinned(rank)
    store = join(rank, RANKS, setup.link, setup.port)
    ours = {name: PiperSide(name, rank, setup, store) for name in setup.schedules}
    theirs = {name: TorchSide(name, rank, setup) for name in setup.schedules}
    errors = {name: check_equal(name, ours[name], theirs[name]) for name in setup.schedules}
    bounds = Bounds(rank, setup, store, ours)
    sides: dict[str, dict[str, Side]] = {
        name: {"torch": theirs[name], "piper": ours[name]} for name in setup.schedules
    }
    busy, started = busy_seconds(), time.perf_counter()
    own = time.process_time()
    message = min(exchange(rank, MESSAGE) for _ in range(5))
    profiler = _Profiler(setup.profile, rank)
    seconds, cpu = rounds_of(sides, setup, profiler, bounds)
    elapsed = time.perf_counter() - started
    mine = torch.tensor([time.process_time() - own], dtype=torch.float64)
    dist.all_reduce(mine)
    foreign = (busy_seconds() - busy - mine.item()) / elapsed
    profiler.report()
    everyone: list[dict[str, dict[str, list[float]]]] = [{} for _ in range(RANKS)]
    dist.all_gather_object(everyone, cpu)
    worst, found_bounds = _worst(errors), bounds.found()
    if rank == 0:
        found = Found(seconds, everyone, found_bounds, worst, foreign, message)
        print(msgspec.json.encode(found).decode(), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def rounds_of(
    sides: Mapping[str, Mapping[str, Side]],
    setup: Setup,
    profiler: "_Profiler",
    bounds: "Bounds",
) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, list[float]]]]:
    """Seconds per step and processor seconds of this process, of every side in each round. Step 0
    is done.
    """
    seconds = {name: {side: list[float]() for side in of} for name, of in sides.items()}
    cpu = {name: {side: list[float]() for side in of} for name, of in sides.items()}
    losses = {name: {side: list[float]() for side in of} for name, of in sides.items()}
    for turn in range(WARM_UP + setup.rounds):
        first = 1 + turn * setup.steps
        for name, of in sides.items():
            # Who goes first alternates: what runs second finds caches and clock as the other left
            # them.
            for side, variant in list(of.items())[:: 1 if turn % 2 else -1]:
                dist.barrier()
                began, used = time.perf_counter(), time.process_time()
                with profiler.watching(f"{side}:{name}", turn >= WARM_UP):
                    losses[name][side] += variant.run(first, setup.steps)
                used = time.process_time() - used
                dist.barrier()
                took = time.perf_counter() - began
                if turn >= WARM_UP:
                    seconds[name][side].append(took / setup.steps)
                    cpu[name][side].append(used / setup.steps)
            bounds.replay(name)
    for of_name in losses.values():
        torch.testing.assert_close(of_name["piper"], of_name["torch"], rtol=1e-3, atol=0.0)
    return seconds, cpu


class Bounds:
    """Finds the bounds. Both ranks run their programs by themselves at the same time, once in each
    round, so that whatever else keeps the machine busy delays this as much as the steps; of several
    runs the quickest counts.
    """

    def __init__(
        self, rank: int, setup: Setup, store: Store, sides: Mapping[str, PiperSide]
    ) -> None:
        members = DeviceId(0), DeviceId(1)
        self._rank, self._sides = rank, sides
        host = setup.link.addresses[rank]
        pair = GlooCommunicator("links", members, members[rank], store, host=host)
        self._links = LinkTimes({}, {})
        if rank == 0:
            self._links = measure_link(pair, LINK_MESSAGES)
        else:
            answer_link(pair, LINK_MESSAGES)
        self._measured = {name: Measured() for name in sides}
        self._replays = {
            name: Replay(side.program.plan, members[rank], side.optimizer)
            for name, side in sides.items()
        }

    def replay(self, name: str) -> None:
        """Measure a schedule's chunks once more."""
        dist.barrier()
        self._measured[name].add(self._replays[name])

    def found(self) -> dict[str, Bound]:
        """On rank 0, by schedule."""
        bounds: dict[str, Bound] = {}
        for name, measured in self._measured.items():
            others: list[dict[str, float]] = [{} for _ in range(RANKS)]
            dist.all_gather_object(others, measured.chunks)
            if self._rank:
                continue
            # Each rank knows the chunks of its own stages.
            profile = measured.profile(Network(self._links))
            profile = msgspec.structs.replace(profile, chunks=others[1] | others[0])
            bounds[name] = _bound(self._sides[name], profile)
        return bounds


def _bound(side: PiperSide, profile: Profile) -> Bound:
    plan = side.program.plan
    timeline = simulate(plan, profile)
    compute = tuple(
        sum(box.seconds for box in device.boxes() if box.op == "compute")
        for device in timeline.devices
    )
    path = ", ".join(f"{share.what} {share.seconds * 1e3:.1f}" for share in shares(timeline, top=4))
    counts = tuple(len(mine.instructions) for mine in plan.devices)
    return Bound(timeline.seconds, compute, counts, path)


def _worst(errors: Mapping[str, float]) -> dict[str, float]:
    """Over both ranks."""
    values = torch.tensor(list(errors.values()), dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return dict(zip(errors, values.tolist(), strict=True))


class _Profiler:
    """cProfile around one variant's rounds, on request."""

    def __init__(self, variant: str, rank: int) -> None:
        import cProfile  # noqa: PLC0415

        self._variant, self._rank = variant, rank
        self._profile = cProfile.Profile()

    @contextmanager
    def watching(self, name: str, counted: bool) -> Iterator[None]:
        if name != self._variant or not counted:
            yield
            return
        self._profile.enable()
        try:
            yield
        finally:
            self._profile.disable()

    def report(self) -> None:
        import pstats  # noqa: PLC0415

        if self._variant:
            stats = pstats.Stats(self._profile, stream=sys.stderr)
            print(f"rank {self._rank}", file=sys.stderr)
            stats.sort_stats("tottime").print_stats(25)


def measure(setup: Setup) -> Found:
    """Run both processes and wait for them."""
    lines = launch(
        "benchmarks.throughput", msgspec.json.encode(setup).decode(), setup.link.prefixes
    )
    return msgspec.json.decode(lines[-1], type=Found)


def report(setup: Setup, found: Found) -> None:
    """A line about the link, then what was found of every schedule."""
    print(
        f"throughput {setup.link.name:9} {setup.layers} layers of width {setup.width}, {MICROBATCHES} microbatches of "
        f"{ROWS}×{setup.seq_len} tokens; a message of {MESSAGE >> 10} KiB takes {found.message * 1e3:.1f} ms; "
        f"foreign load {found.foreign:.2f} cores"
    )
    for name in setup.schedules:
        report_schedule(name, setup, found)


def report_schedule(name: str, setup: Setup, found: Found) -> None:
    """A line per variant, the comparison, and the bound."""
    where = f"throughput {setup.link.name:9} {name:11}"
    tokens = MICROBATCHES * ROWS * setup.seq_len
    for side, taken in found.seconds[name].items():
        used = " ".join(f"{min(of[name][side]) * 1e3:.1f}" for of in found.cpu)
        print(
            f"{where} {side:6} {spread(taken)} ms per step, "
            f"{tokens / min(taken):7.0f} tokens/s, processor ms per step by rank {used}"
        )
    goal = 1.0 if setup.link == LOOPBACK else GOALS[name]
    ours = found.seconds[name]["piper"]
    minima, middle = compared(ours, found.seconds[name]["torch"])
    print(
        f"{where} piper / torch: ratio of minima {minima:.3f}, median of in-round ratios {middle:.3f} "
        f"(goal {goal}; {setup.rounds} rounds; gradients differ by {found.errors[name]:.1e} at most)"
    )
    bound = found.bounds[name]
    compute = " ".join(f"{seconds * 1e3:.1f}" for seconds in bound.compute)
    counts = " ".join(map(str, bound.instructions))
    print(
        f"{where} bound {bound.seconds * 1e3:.1f} ms, of which chunks by rank {compute} ({counts} instructions); achieved "
        f"{bound.seconds / min(ours):.3f} of it (goal {BOUND_GOAL}); critical path, ms: {bound.path}",
        flush=True,
    )


def chosen_schedules(text: str) -> tuple[str, ...]:
    """Names, separated by commas. Raises :class:`argparse.ArgumentTypeError` for an unknown one."""
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in KINDS]:
        raise argparse.ArgumentTypeError(
            f"unknown schedule {unknown[0]!r}; choose from {', '.join(KINDS)}"
        )
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description="Piper's schedules against torch's.")
    parser.add_argument(
        "--schedules", type=chosen_schedules, default=tuple(KINDS), help=f"of {','.join(KINDS)}"
    )
    parser.add_argument("--rounds", type=int, default=12, help="after two of warm-up")
    parser.add_argument("--steps", type=int, default=2, help="training steps per round")
    parser.add_argument("--quick", action="store_true", help="two rounds of one step: does it run?")
    parser.add_argument("--links", default="loopback,100mbit", help="loopback, or a rate of tc")
    parser.add_argument("--width", type=int, default=0, help="default: the example's")
    parser.add_argument(
        "--profile", default="", help="profile one variant, such as piper:zbv or torch:1f1b"
    )
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("setup", nargs="?", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank >= 0:
        work(options.rank, msgspec.json.decode(options.setup, type=Setup))
        return
    # Unwind on termination too: no namespace and no process is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(machine())
    for name in options.links.split(","):
        try:
            with open_link(name) as link:
                setup = make_setup(link, options)
                report(setup, measure(setup))
        except PermissionError as error:
            print(f"throughput {name}: skipped: {error}")


def make_setup(link: Link, options: argparse.Namespace) -> Setup:
    """The model and sequence length of the example."""
    config = tomllib.loads(CONFIG.read_text())
    return Setup(
        link=link,
        port=free_port(),
        schedules=options.schedules,
        rounds=2 if options.quick else options.rounds,
        steps=1 if options.quick else options.steps,
        seq_len=config["train"]["seq_len"],
        width=options.width or config["model"]["width"],
        layers=config["model"]["num_layers"],
        heads=config["model"]["num_heads"],
        profile=options.profile,
    )


if __name__ == "__main__":
    main()

"""Expert parallelism over a slow link: two workers share the experts of a mixture-of-experts
decoder.

Is the all-to-all of one microbatch hidden behind the compute of another? The same training step in
two processes, one thread each, each pinned to its own core, in alternating rounds, with the
microbatches

* *in turn* (an ``Order``: nothing overlaps),
* *interleaved* (no order: the planner's choice),
* in *pairs*: two microbatches in one overlap group, their forwards, then their backwards,
* *F with B*: the forward of one in one group with the backward of the one before;
* *ZeRO-2*, interleaved: the gradients of what is not an expert are reduced for each microbatch; all-to-alls and reductions have streams of
  their own, or *one stream*, so that who waits for the one waits for what was issued before of the other.

Beside them the bounds: *compute* alone (one worker's share of the work, no communication) and
*communication* alone (the plan's all-to-alls, one after the other; *gloo's own*: by its
collective). First over the loopback device, where communication is processor time and cannot be
hidden, then over links between two network namespaces (needs root; skipped with a message
otherwise). ``expert_pipelines`` does the same for DualPipeV.

Losses and gradients of every variant's first step are compared with one process before anything is
timed. Printed per link: how many times as fast as in turn each is (ratio of minima, median of the
ratios within a round), and how much of what could be hidden is: ``(in turn - variant) / (in turn -
max(compute, communication))``; the second figure adds the processor time of communication to
``compute``, as it is spent on the same core. And how long the first worker waits in a step, in turn
and otherwise (with a clock around every instruction). ``--trace`` prints the longest waits of one
step.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Mapping
from statistics import median

import msgspec
import torch
import torch.distributed as dist
from benchmarks.links import CHECKED, Link, bytes_per_second, exchange, free_port, open_link
from benchmarks.mixtures import (
    SHARING,
    Messages,
    Sizes,
    Step,
    Trained,
    check_all,
    one_process,
)
from benchmarks.processes import join, launch, pinned
from benchmarks.support import busy_seconds, compared, machine, spread
from benchmarks.traces import trace

import piper
from piper.directives.base import Directive

WARM_UP = 2
TRACED = 2
PAIR = 2
SLOW = "in turn"
GOAL, HIDDEN = 1.4, 0.8


class Told(msgspec.Struct, frozen=True):
    """What the processes are told."""

    link: Link
    port: int
    rounds: int
    sizes: Sizes
    variants: tuple[str, ...]
    trace: bool = False


class Rounds(msgspec.Struct, frozen=True):
    """By variant and round: seconds, and processor seconds of this process, the threads that
    communicate included.
    """

    seconds: dict[str, list[float]]
    busy: dict[str, list[float]]


class Found(msgspec.Struct, frozen=True):
    """What was measured; seconds that the first worker waits for communication in a step of each of
    Piper's variants; errors of gradients; seconds of a checking message; cores that others kept
    busy.
    """

    rounds: Rounds
    waits: dict[str, float]
    errors: dict[str, float]
    message: float
    foreign: float


def in_turn(microbatches: int) -> piper.Order:
    """Each microbatch to its end before the next begins."""
    return piper.Order([[{"MB": m, "PASS": p}] for m in range(microbatches) for p in "FB"])


def pairs(microbatches: int) -> piper.Order:
    """Two microbatches at a time."""
    first = range(0, microbatches, PAIR)
    return piper.Order(
        [
            [{"MB": m, "PASS": p} for m in range(i, min(i + PAIR, microbatches))]
            for i in first
            for p in "FB"
        ]
    )


def forward_with_backward(microbatches: int) -> piper.Order:
    """The forward of each microbatch with the backward of the one before."""
    return piper.Order(
        [
            [
                {"MB": m - late, "PASS": p}
                for late, p in enumerate("FB")
                if 0 <= m - late < microbatches
            ]
            for m in range(microbatches + 1)
        ]
    )


ORDERS: Mapping[str, Callable[[int], piper.Order] | None] = {
    SLOW: in_turn,
    "interleaved": None,
    "pairs": pairs,
    "F with B": forward_with_backward,
    "ZeRO-2": None,
    "ZeRO-2 one stream": None,
}


def strategy(variant: str, sizes: Sizes) -> list[Directive]:
    """Everything on both workers."""
    order = ORDERS[variant]
    one = variant.endswith("one stream")
    replicate = (
        piper.Replicate({}, shard_grads=True, reduce_stream="network" if one else "reduce")
        if variant.startswith("ZeRO-2")
        else piper.Replicate({})
    )
    return [
        piper.Place({}, devices=list(range(SHARING))),
        replicate,
        piper.Shard({"EP": "*"}, stream="network" if one else None),
        piper.Split({}, num_microbatches=sizes.microbatches),
        *([] if order is None else [order(sizes.microbatches)]),
    ]


def alone(sizes: Sizes) -> list[Directive]:
    """One worker's share of the work."""
    return [
        piper.Place({}, [0]),
        piper.Split({}, num_microbatches=sizes.microbatches),
        in_turn(sizes.microbatches),
    ]


def work(rank: int, told: Told) -> None:
    """One process. Rank 0 prints what it found as JSON."""
    pinned(rank)
    store = join(rank, SHARING, told.link, told.port)
    message = min(exchange(rank, CHECKED) for _ in range(3))
    link, sizes = told.link, told.sizes
    shared = {
        name: Trained(name, rank, SHARING, link, sizes, store, strategy(name, sizes))
        for name in told.variants
    }
    errors = check_all({name: run.first for name, run in shared.items()}, one_process(sizes))
    plan = next(iter(shared.values())).plan
    variants: dict[str, Step] = {
        **shared,
        "compute": Trained("compute", rank, 1, link, sizes, store, alone(sizes)),
        "communication": Messages("communication", rank, link, plan, store),
        "gloo's own": Messages("plain", rank, link, plan, store, plain=True),
    }
    rounds, foreign = rounds_of(variants, told.rounds)
    waits = waits_of(shared, rank, loud=told.trace)
    if rank == 0:
        found = Found(rounds, waits, errors, message, foreign)
        print(msgspec.json.encode(found).decode(), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def rounds_of(variants: Mapping[str, Step], rounds: int) -> tuple[Rounds, float]:
    """Run *variants* in alternating rounds, of which :data:`WARM_UP` do not count; each from when
    all processes begin until all are done. Also the cores that others kept busy meanwhile.
    """
    others, started, own = busy_seconds(), time.perf_counter(), time.process_time()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    busy: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(WARM_UP + rounds):
        for name, run in variants.items():
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            run()
            dist.barrier()
            if turn >= WARM_UP:
                seconds[name].append(time.perf_counter() - began)
                busy[name].append(time.process_time() - used)
    elapsed = time.perf_counter() - started
    mine = torch.tensor([time.process_time() - own], dtype=torch.float64)
    dist.all_reduce(mine)
    foreign = (busy_seconds() - others - mine.item()) / elapsed
    return Rounds(seconds, busy), foreign


def waits_of(variants: Mapping[str, Trained], rank: int, *, loud: bool) -> dict[str, float]:
    """The least of :data:`TRACED` steps of each variant; *loud*: where the time of the last one
    went, on the first worker.
    """
    waits: dict[str, float] = {}
    for name, run in variants.items():
        found = []
        for _ in range(TRACED):
            dist.barrier()
            found.append(trace(run.backend.worker, run.plan, run))
        waits[name] = min(one.waited for one in found)
        if loud and rank == 0:
            print(f"{name}: " + "\n".join(found[-1].lines), file=sys.stderr, flush=True)
    return waits


class Bounds:
    """How long a step takes at least: the longer of computation and communication; and if what the
    processor does for communication delays computation on the same core.
    """

    def __init__(self, found: Found) -> None:
        self._seconds, self._waits = found.rounds.seconds, found.waits
        compute, communication = (min(self._seconds[n]) for n in ("compute", "communication"))
        handling = median(found.rounds.busy["communication"])
        self._ideal = max(compute, communication)
        self._on_one_core = max(compute + handling, communication)

    def hidden(self, slow: str, quick: str) -> str:
        """How much of what could be hidden in *slow* is in *quick*, by either bound and by what the
        worker waits.
        """
        least = min(self._seconds[slow])
        gained = least - min(self._seconds[quick])
        ideal, less = (gained / (least - bound) for bound in (self._ideal, self._on_one_core))
        waits, before = self._waits[quick], self._waits[slow]
        return (
            f"hidden {ideal:.0%} ({less:.0%} of what leaves the processor free); waits {waits * 1e3:.0f} ms instead of "
            f"{before * 1e3:.0f}, {1 - waits / before:.0%} less"
        )


def check_link(told: Link, message: float) -> str:
    """What is wrong with the link, if anything."""
    if told.name == "loopback":
        return ""
    expected = CHECKED / bytes_per_second(told.name)
    if 0.97 * expected < message < 1.1 * expected:
        return ""
    return (
        f"the link is not what it should be: {CHECKED >> 20} MiB took {message * 1e3:.1f} ms, expected {expected * 1e3:.1f} and up to "
        "10 % more; the figures below say little"
    )


def report(told: Told, found: Found) -> None:
    """A line per variant, and the comparisons."""
    where = f"experts {told.link.name:9}"
    print(
        f"{where} {told.sizes}; {told.rounds} rounds; a message of {CHECKED >> 20} MiB takes {found.message * 1e3:.1f} ms; "
        f"foreign load {found.foreign:.2f} cores"
    )
    if problem := check_link(told.link, found.message):
        print(f"{where} {problem}")
    seconds, busy, bounds = found.rounds.seconds, found.rounds.busy, Bounds(found)
    for name, taken in seconds.items():
        line = f"{where} {name:18} {spread(taken)} ms per step, processor {median(busy[name]) * 1e3:6.0f} ms per worker"
        if name in ORDERS and name != SLOW and SLOW in seconds:
            minima, middle = compared(taken, seconds[SLOW])
            line += f"; {minima:.3f} times as fast as in turn (median of in-round ratios {middle:.3f}), {bounds.hidden(SLOW, name)}"
        if name in found.errors:
            line += f"; gradients off by {found.errors[name]:.1e}"
        print(line, flush=True)
    one, own = seconds.get("ZeRO-2 one stream"), seconds.get("ZeRO-2")
    if one and own:
        minima, middle = compared(own, one)
        print(
            f"{where} streams of their own / one stream: ratio of minima {minima:.3f}, median of in-round ratios {middle:.3f}"
        )
    print(f"{where} goals at 1 Gbit/s: {GOAL} times as fast, {HIDDEN:.0%} hidden", flush=True)


def add_sizes(parser: argparse.ArgumentParser, sizes: Sizes) -> None:
    """Options for the sizes that may be chosen."""
    for name in msgspec.structs.asdict(sizes):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(sizes, name))


def chosen_sizes(options: argparse.Namespace) -> Sizes:
    """The sizes that *options* say."""
    return Sizes(**{name: getattr(options, name) for name in msgspec.structs.asdict(Sizes())})


def main() -> None:
    parser = argparse.ArgumentParser(description="All-to-all hidden behind compute.")
    parser.add_argument("--rounds", type=int, default=8, help="after two of warm-up")
    parser.add_argument("--links", default="loopback,1gbit", help="loopback, or a rate of tc")
    parser.add_argument("--variants", default=",".join(ORDERS))
    parser.add_argument("--trace", action="store_true", help="the longest waits of a step")
    add_sizes(parser, Sizes())
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("told", nargs="?", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank >= 0:
        work(options.rank, msgspec.json.decode(options.told, type=Told))
        return
    # Unwind on termination too: no namespace and no process is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(machine())
    names = tuple(options.variants.split(","))
    if unknown := [name for name in names if name not in ORDERS]:
        parser.error(f"unknown variant {unknown[0]!r}; choose from {', '.join(ORDERS)}")
    for name in options.links.split(","):
        try:
            with open_link(name) as link:
                told = Told(
                    link, free_port(), options.rounds, chosen_sizes(options), names, options.trace
                )
                text = msgspec.json.encode(told).decode()
                lines = launch("benchmarks.experts", text, link.prefixes, timeout=900.0)
                report(told, msgspec.json.decode(lines[-1], type=Found))
        except PermissionError as error:
            print(f"experts {name}: skipped: {error}")


if __name__ == "__main__":
    main()

"""DualPipeV with expert parallelism over a slow link: is a forward's all-to-all hidden behind a
backward's compute, and the other way round?

Every stage is on two workers, one at each end of the link, which share its experts: ``--ranks`` R
pipeline ranks are 2·R workers. Only the experts' messages (and the reductions) cross the link;
stages of different ranks talk within one end. With one rank, the default on a machine of two cores,
both stages of the V are on the same two workers: there is no bubble and no message between stages,
and the step is computation and all-to-alls alone. More ranks than there are cores for would share
cores: what one worker waits for, another would hide, whatever the schedule, so such figures are
printed with a warning.

The same model, microbatches and optimizer step

* under 1F1B (with one rank: each microbatch's forward, then its backward),
* in the order of DualPipeV *in turn*: the members of each overlap group one after the other,
* under DualPipeV as it is, the planner interleaving each group;
* under torch's ``Schedule1F1B`` and ``ScheduleDualPipeV``, whose model does its own all-to-alls; the latter also *overlapped* by two threads
  (see ``torch_mixtures``).

Beside them the bounds *compute* (one rank only) and *communication*, as in ``experts``. Losses and
gradients of every first step are compared with one process before anything is timed.
"""

import argparse
import os
import signal
import sys
from collections.abc import Collection
from statistics import median

import msgspec
import torch.distributed as dist
from benchmarks.experts import (
    Bounds,
    Found,
    add_sizes,
    alone,
    check_link,
    chosen_sizes,
    rounds_of,
    waits_of,
)
from benchmarks.links import CHECKED, Link, exchange, free_port, open_link
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
from benchmarks.support import compared, machine, spread
from benchmarks.torch_mixtures import Groups, TorchPipeline
from torch._C._distributed_c10d import Store

import piper
from piper.directives.base import Directive

GOAL = 1.13
PIPER = ("1f1b", "dualpipev in turn", "dualpipev")
TORCH = ("torch 1f1b", "torch dualpipev", "torch dualpipev overlapped")
VARIANTS = (*PIPER, *TORCH)


class Told(msgspec.Struct, frozen=True):
    """What the processes are told."""

    link: Link
    port: int
    rounds: int
    ranks: int
    sizes: Sizes
    variants: tuple[str, ...]
    trace: bool = False


def strategy(variant: str, ranks: int, microbatches: int) -> list[Directive]:
    """Stages on pairs of workers that share experts."""
    groups = [[SHARING * rank, SHARING * rank + 1] for rank in range(ranks)]
    if variant == "1f1b":
        placed = piper.placements.chain(groups)
        orders = piper.schedules.one_f_one_b(ranks, microbatches)
    else:
        placed = piper.placements.v_shape(groups)
        orders = piper.schedules.dualpipev(ranks, microbatches)
    if variant == "dualpipev in turn":
        orders = [in_turn(order) for order in orders]
    split = piper.Split({}, num_microbatches=microbatches)
    return [*placed, piper.Replicate({}), piper.Shard({"EP": "*"}), split, *orders]


def in_turn(order: piper.Order) -> piper.Order:
    """The members of each group one after the other."""
    return piper.Order([[member] for group in order.filters for member in group])


def stages_of(variant: str, ranks: int) -> int:
    """How many stages the model has."""
    return ranks if variant.endswith("1f1b") else 2 * ranks


def work(rank: int, told: Told) -> None:
    """One process. Rank 0 prints what it found as JSON."""
    pinned(rank)
    size, ranks, sizes, link = SHARING * told.ranks, told.ranks, told.sizes, told.link
    store = join(rank, size, link, told.port)
    message = min(exchange(rank, CHECKED) for _ in range(3)) if size == SHARING else 0.0
    groups = Groups(rank, ranks)
    runs: dict[str, Trained | TorchPipeline] = {
        variant: make(variant, rank, told, store, groups) for variant in told.variants
    }
    errors = check_all({name: run.first for name, run in runs.items()}, one_process(sizes))
    variants: dict[str, Step] = {**runs}
    pipers = {name: run for name, run in runs.items() if isinstance(run, Trained)}
    if pipers:
        plan = next(iter(pipers.values())).plan
        variants["communication"] = Messages("communication", rank, link, plan, store)
    if ranks == 1:
        variants["compute"] = Trained("compute", rank, 1, link, sizes, store, alone(sizes))
    rounds, foreign = rounds_of(variants, told.rounds)
    waits = waits_of(pipers, rank, loud=told.trace)
    if rank == 0:
        found = Found(rounds, waits, errors, message, foreign)
        print(msgspec.json.encode(found).decode(), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def make(
    variant: str, rank: int, told: Told, store: Store, groups: Groups
) -> Trained | TorchPipeline:
    """This process's worker of a variant."""
    ranks, sizes = told.ranks, told.sizes
    if variant in PIPER:
        chosen = strategy(variant, ranks, sizes.microbatches)
        stages = stages_of(variant, ranks)
        return Trained(variant, rank, SHARING * ranks, told.link, sizes, store, chosen, stages)
    kind = "1f1b" if variant == "torch 1f1b" else "dualpipev"
    overlapped = variant.endswith("overlapped")
    return TorchPipeline(kind, rank, ranks, sizes, groups, overlapped=overlapped)


def report(told: Told, found: Found) -> None:
    """A line per variant, and the comparisons."""
    where, ranks = f"expert_pipelines {told.link.name:9}", told.ranks
    print(
        f"{where} {told.sizes}; {ranks} pipeline ranks of {SHARING} workers; {told.rounds} rounds; foreign load {found.foreign:.2f} cores"
    )
    if SHARING * ranks > (os.cpu_count() or 1):
        print(f"{where} workers share cores, and so hide what others wait for: figures say little")
    elif ranks == 1 and (problem := check_link(told.link, found.message)):
        print(f"{where} {problem}")
    seconds, busy = found.rounds.seconds, found.rounds.busy
    for name, taken in seconds.items():
        error = f"; gradients off by {found.errors[name]:.1e}" if name in found.errors else ""
        print(
            f"{where} {name:27} {spread(taken)} ms per step, processor {median(busy[name]) * 1e3:6.0f} ms per worker{error}"
        )
    for ours, theirs, goal in comparisons(seconds):
        minima, middle = compared(seconds[ours], seconds[theirs])
        print(
            f"{where} {ours} / {theirs}: ratio of minima {minima:.3f}, median of in-round ratios {middle:.3f}{goal}"
        )
    if {"compute", "communication"} <= seconds.keys():
        bounds = Bounds(found)
        for quick, slow in (("dualpipev", "dualpipev in turn"), ("dualpipev", "1f1b")):
            if quick in seconds and slow in seconds:
                print(
                    f"{where} {quick} beside {slow}: {bounds.hidden(slow, quick)}",
                    flush=True,
                )


def comparisons(names: Collection[str]) -> list[tuple[str, str, str]]:
    """What is compared with what, and a goal in words."""
    wanted = [
        ("dualpipev", "1f1b", f" (goal {GOAL} at 1 Gbit/s)"),
        ("dualpipev", "dualpipev in turn", ""),
        ("torch dualpipev overlapped", "torch dualpipev", ""),
        ("torch dualpipev overlapped", "torch 1f1b", ""),
        ("1f1b", "torch 1f1b", ""),
        ("dualpipev", "torch dualpipev", ""),
        ("dualpipev", "torch dualpipev overlapped", ""),
    ]
    return [(a, b, goal) for a, b, goal in wanted if a in names and b in names]


def main() -> None:
    parser = argparse.ArgumentParser(description="DualPipeV with expert parallelism.")
    parser.add_argument("--rounds", type=int, default=8, help="after two of warm-up")
    parser.add_argument("--links", default="loopback,1gbit", help="loopback, or a rate of tc")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    # On two cores two workers, which are one rank.
    default = min(2, max(1, (os.cpu_count() or 1) // SHARING))
    parser.add_argument("--ranks", type=int, default=default, help="of the pipeline")
    parser.add_argument("--trace", action="store_true", help="the longest waits of a step")
    add_sizes(parser, Sizes(layers=2 * default, rows=8, microbatches=8))
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
    if unknown := [name for name in names if name not in VARIANTS]:
        parser.error(f"unknown variant {unknown[0]!r}; choose from {', '.join(VARIANTS)}")
    sizes = chosen_sizes(options)
    for name in options.links.split(","):
        try:
            with open_link(name) as link:
                told = Told(
                    link, free_port(), options.rounds, options.ranks, sizes, names, options.trace
                )
                text = msgspec.json.encode(told).decode()
                prefixes = link.prefixes * options.ranks
                lines = launch("benchmarks.expert_pipelines", text, prefixes, timeout=900.0)
                report(told, msgspec.json.decode(lines[-1], type=Found))
        except PermissionError as error:
            print(f"expert_pipelines {name}: skipped: {error}")


if __name__ == "__main__":
    main()

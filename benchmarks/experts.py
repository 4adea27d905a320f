"""Expert parallelism over a slow link: two workers share the experts of a mixture-of-experts decoder.

Is the all-to-all of one microbatch hidden behind the compute of another? The same training step in two processes, one thread each, each
pinned to its own core, in alternating rounds: with the microbatches *in turn* (an ``Order``: nothing overlaps), and *interleaved* (no order:
the planner's choice). Beside them the bounds: *compute* alone (one worker's share of the work, no communication) and *communication*
alone (the same messages, one after the other). First over the loopback device, where communication is processor time and cannot be hidden, then over
links between two network namespaces (needs root; skipped with a message otherwise).

Printed per link: how many times as fast as in turn interleaved is (ratio of minima, median of the ratios within a round), and how
much of what could be hidden is: ``(in turn - interleaved) / (in turn - max(compute, communication))``.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable

import msgspec
import torch
import torch.distributed as dist
from benchmarks.links import Link, free_port, open_link
from benchmarks.processes import OneOf, join, launch, pinned
from benchmarks.support import compared, machine, spread
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import PrefixStore

import piper
from piper.api.programs import Programs, model_tensors
from piper.backends.inprocess import InProcessBackend
from piper.directives.base import Directive
from piper.models import MoE, MoEConfig, moe_loss
from piper.ops.all_reduce import AllReduceBucket
from piper.ops.all_to_all import ExchangeExperts
from piper.plan.model import Plan
from piper.runtime.batch import Batch
from piper.runtime.optimizer import OptimizerSpec

WORKERS = 2
WARM_UP = 2


class Sizes(msgspec.Struct, frozen=True):
    """Model and batch: ``rows`` sequences of ``length`` tokens in each of ``microbatches`` microbatches of a worker."""

    width: int = 256
    layers: int = 2
    experts: int = 8
    expert_width: int = 256
    rows: int = 16
    length: int = 128
    microbatches: int = 4

    @property
    def message(self) -> int:
        """Bytes of one all-to-all on one worker: two choices per token, float32."""
        return 2 * self.rows * self.length * self.width * 4


class Told(msgspec.Struct, frozen=True):
    """What the processes are told."""

    link: Link
    port: int
    rounds: int
    sizes: Sizes


def build_model(sizes: Sizes) -> MoE:
    torch.manual_seed(0)
    return MoE(
        MoEConfig(
            width=sizes.width,
            num_layers=sizes.layers,
            num_experts=sizes.experts,
            expert_width=sizes.expert_width,
            capacity_factor=1.0,
        )
    )


def build_optimizer(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def batch_of(sizes: Sizes, workers: int) -> Batch:
    rows = workers * sizes.microbatches * sizes.rows
    ids = torch.randint(
        0, 256, (rows, sizes.length + 1), generator=torch.Generator().manual_seed(0)
    )
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def in_turn(microbatches: int) -> piper.Order:
    """Each microbatch to its end before the next begins."""
    steps = [[{"MB": m, "PASS": pass_}] for m in range(microbatches) for pass_ in "FB"]
    return piper.Order(steps)


def strategy(sizes: Sizes, *orders: Directive) -> list[Directive]:
    return [
        piper.Place({}, devices=list(range(WORKERS))),
        piper.Replicate({}),
        piper.Shard({"EP": "*"}),
        piper.Split({}, num_microbatches=sizes.microbatches),
        *orders,
    ]


def shared(
    rank: int, told: Told, store: Store, *orders: Directive
) -> tuple[Callable[[], None], Plan]:
    """A step of both workers."""
    model, batch = build_model(told.sizes), batch_of(told.sizes, WORKERS)
    program = Programs(model, moe_loss, strategy(told.sizes, *orders)).training(batch)
    # Two plans, each with communicators of its own, though of the same names.
    backend = OneOf(
        rank, WORKERS, PrefixStore(f"{len(orders)} orders", store), told.link.addresses[rank]
    )
    backend.start(WORKERS)
    backend.load("train", program.plan, program.signature, program.constants)
    backend.initialise("train", model_tensors(model), OptimizerSpec(build_optimizer))
    return lambda: _step(backend, batch), program.plan


def alone(told: Told) -> Callable[[], None]:
    """One worker's share of the work without communication."""
    model, batch = build_model(told.sizes), batch_of(told.sizes, 1)
    split = piper.Split({}, num_microbatches=told.sizes.microbatches)
    program = Programs(model, moe_loss, [split]).training(batch)
    backend = InProcessBackend(threads=1)
    backend.start(1)
    backend.load("train", program.plan, program.signature, program.constants)
    backend.initialise("train", model_tensors(model), OptimizerSpec(build_optimizer))
    return lambda: _step(backend, batch)


def _step(backend: OneOf | InProcessBackend, batch: Batch) -> None:
    backend.run("train", [batch], first_step=0)


def messages_of(plan: Plan) -> Callable[[], None]:
    """The plan's collectives, one after the other."""
    moves: list[Callable[[], object]] = []
    for instruction in plan.devices[0].instructions:
        if not isinstance(instruction, (ExchangeExperts, AllReduceBucket)):
            continue
        flat = torch.zeros(sum(message.numel for message in instruction.messages))
        if isinstance(instruction, AllReduceBucket):
            moves.append(lambda flat=flat: dist.all_reduce(flat))
        else:
            out = torch.empty_like(flat)
            moves.append(lambda flat=flat, out=out: dist.all_to_all_single(out, flat))

    def run() -> None:
        for move in moves:
            move()

    return run


def work(rank: int, told: Told) -> None:
    """One process. Rank 0 prints the seconds of each round, by variant, as JSON."""
    pinned(rank)
    store = join(rank, WORKERS, told.link, told.port)
    first, plan = shared(rank, told, store, in_turn(told.sizes.microbatches))
    second, _ = shared(rank, told, store)
    variants = {
        "in turn": first,
        "interleaved": second,
        "compute": alone(told),
        "communication": messages_of(plan),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(WARM_UP + told.rounds):
        for name, run in variants.items():
            dist.barrier()
            began = time.perf_counter()
            run()
            dist.barrier()
            if turn >= WARM_UP:
                seconds[name].append(time.perf_counter() - began)
    if rank == 0:
        print(msgspec.json.encode(seconds).decode(), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measure(told: Told) -> dict[str, list[float]]:
    """Run both processes and wait for them."""
    text = msgspec.json.encode(told).decode()
    lines = launch("benchmarks.experts", text, told.link.prefixes, timeout=900.0)
    return msgspec.json.decode(lines[-1], type=dict[str, list[float]])


def report(told: Told, seconds: dict[str, list[float]]) -> None:
    """A line per variant, and the comparison."""
    link, sizes = told.link.name, told.sizes
    print(
        f"experts {link:9} {sizes.layers} layers of width {sizes.width}, {sizes.microbatches} microbatches of "
        f"{sizes.rows}×{sizes.length} tokens, {sizes.message / 2**20:.1f} MiB per all-to-all and worker"
    )
    for name, taken in seconds.items():
        print(f"experts {link:9} {name:13} {spread(taken)} ms per step")
    minima, middle = compared(seconds["interleaved"], seconds["in turn"])
    least = {name: min(taken) for name, taken in seconds.items()}
    bound = max(least["compute"], least["communication"])
    hidden = (least["in turn"] - least["interleaved"]) / (least["in turn"] - bound)
    print(
        f"experts {link:9} interleaved / in turn: ratio of minima {minima:.3f}, median of in-round ratios {middle:.3f} "
        f"(goal 1.4 at 1 Gbit/s); of what could be hidden {hidden:.0%} is (goal 80 %)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="All-to-all hidden behind compute.")
    parser.add_argument("--rounds", type=int, default=10, help="after two of warm-up")
    parser.add_argument("--links", default="loopback,1gbit", help="loopback, or a rate of tc")
    parser.add_argument("--width", type=int, default=Sizes().width)
    parser.add_argument("--expert-width", type=int, default=Sizes().expert_width)
    parser.add_argument("--rows", type=int, default=Sizes().rows)
    parser.add_argument("--microbatches", type=int, default=Sizes().microbatches)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("told", nargs="?", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank >= 0:
        work(options.rank, msgspec.json.decode(options.told, type=Told))
        return
    # Unwind on termination too: no namespace and no process is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(machine())
    sizes = Sizes(
        width=options.width,
        expert_width=options.expert_width,
        rows=options.rows,
        microbatches=options.microbatches,
    )
    for name in options.links.split(","):
        try:
            with open_link(name) as link:
                told = Told(link, free_port(), options.rounds, sizes)
                report(told, measure(told))
        except PermissionError as error:
            print(f"experts {name}: skipped: {error}")


if __name__ == "__main__":
    main()

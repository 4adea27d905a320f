"""Data parallelism over a slow link: Piper's levels of sharding against ``DistributedDataParallel``
and ``fully_shard``.

Two processes, one thread each, each pinned to its own core, in network namespaces joined by a link
of 1 Gbit/s (needs root; skipped with a message otherwise, or where the link is not what it should
be). The same transformer on both sides, each block a bucket, the same batches, gradients
accumulated over 1 and 4 microbatches, SGD; all variants in alternating rounds.

Printed per variant: the fraction of the ideal, which is the time of the same computation without
communication (on one process of Piper's, no replicas, while the other one does the same) over the
step's, as ratio of minima and median of the ratios within a round; and its bound: what must cross
the link in one direction at the link's rate, overlapped perfectly: min(1, compute / link).

    all-reduce 1 × parameters, ZeRO-1 the same (reduce-scatter ½, all-gather ½), ZeRO-2 ½ per
    microbatch + ½, ZeRO-3 ½ per microbatch (reduce-scatter) + ½ per gather.

Beside it the processor time of a step: on cores that compute, communication takes some of it, which
no overlap hides.

The volume's bound lets every byte hide behind any computation. The *order's* bound, of Piper's
variants, does not: it is the simulated step of the very plan whose chunks together take as long as
the computation alone, on a link without latency, all other work being free.

Microbatches go one after the other, as in a training loop, or (*layer by layer*) each layer runs
all of them before the next one does: sums are complete earlier, and gathers and scatters serve all
microbatches.

``--trace`` prints, for one step of each of Piper's variants, the longest waits and for what they
were.
"""

import argparse
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache

import msgspec
import torch
import torch.distributed as dist
from benchmarks.links import (
    CHECKED,
    LOOPBACK,
    Link,
    bytes_per_second,
    exchange,
    free_port,
    limited,
)
from benchmarks.processes import OneOf, join, launch, pinned
from benchmarks.support import busy_seconds, compared, machine
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import piper
from piper.api.programs import model_tensors
from piper.capture import Captured, capture_with_constants
from piper.directives.base import Directive
from piper.ids import DeviceId
from piper.ir.dag import Chunk, Dag
from piper.models.transformer import Transformer, TransformerConfig, transformer_loss
from piper.ops.all_gather import AllGatherBucket, RefreshBucket
from piper.ops.all_reduce import AllReduceBucket
from piper.ops.reduce_scatter import ReduceScatterBucket
from piper.ops.wait import Wait
from piper.plan.costs import UnitCosts, hardware
from piper.plan.model import Plan
from piper.plan.topology import Link as PortLink
from piper.plan.topology import Topology
from piper.runtime.batch import Batch, signature
from piper.runtime.optimizer import OptimizerSpec, ParamsArgument
from piper.runtime.worker import Worker

REPLICAS = 2
WARM_UP = 2
QUICK = {"width": 128, "layers": 4, "seq_len": 64}
"""The model of ``--quick``, where nothing else is asked for."""
ALONE = "alone"
CPU = hardware("CPU")
MIB = 1 << 20

Step = Callable[[], object]


class Setup(msgspec.Struct, frozen=True):
    """What the processes are told."""

    link: Link
    port: int
    warm_up: int
    rounds: int
    width: int
    layers: int
    seq_len: int
    rows: int
    counts: tuple[int, ...]
    variants: tuple[str, ...]
    gather_bytes: str
    reduce_bytes: str
    rate: float
    trace: bool


class Found(msgspec.Struct, frozen=True):
    """What was measured: seconds per step of each variant in each round, and of rank 0's processor;
    of the checking message; bytes that each of Piper's variants sends per step, and of the
    parameters; seconds that the order of each of Piper's needs; the cores that others kept busy.
    """

    seconds: dict[str, list[float]]
    processor: dict[str, list[float]]
    message: float
    sent: dict[str, int]
    parameters: int
    ordered: dict[str, float]
    foreign: float


LAYERED = " layer by layer"
PIPER = tuple(
    level + order
    for order in ("", LAYERED)
    for level in ("replicated", "ZeRO-1", "ZeRO-2", "ZeRO-3")
)
TORCH = ("DDP", "FSDP2 whole", "FSDP2 reshard")
VARIANTS = (*PIPER, *TORCH)


def build_model(setup: Setup) -> Transformer:
    """Every block a region; the embedding and the head are one more."""
    torch.manual_seed(0)
    model = Transformer(
        TransformerConfig(
            context=setup.seq_len,
            width=setup.width,
            num_layers=setup.layers,
            num_heads=max(1, setup.width // 64),
        )
    )
    for index, block in enumerate(model.blocks):
        piper.annotate_module(block, "LAYER", index)
    return model


def build_optimizer(parameters: ParamsArgument) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def batch_of(setup: Setup, count: int, replicas: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    shape = (REPLICAS * count * setup.rows, setup.seq_len + 1)
    ids = torch.randint(0, 256, shape, generator=generator)[: replicas * count * setup.rows]
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


# --- Piper --------------------------------------------------------------------------------------


def strategy_of(variant: str, setup: Setup, count: int) -> list[Directive]:
    if variant == ALONE:
        return [piper.Place({}, [0]), piper.Split({}, num_microbatches=count), depth_first(count)]
    level = 0 if variant.startswith("replicated") else int(variant[5])
    replicate = piper.Replicate(
        {},
        shard_optimizer=level == 1,
        shard_grads=level == 2,
        shard_params=level == 3,
    )
    layered = variant.endswith(LAYERED)
    order = layer_by_layer(setup.layers) if layered else depth_first(count)
    return [
        piper.Place({}, [0, 1]),
        replicate,
        piper.Split({}, num_microbatches=count),
        order,
    ]


def depth_first(count: int) -> piper.Order:
    """One microbatch after the other, as a training loop does."""
    return piper.Order([[{"MB": m, "PASS": p}] for m in range(count) for p in "FB"])


def layer_by_layer(layers: int) -> piper.Order:
    """A layer on all microbatches, then the next layer."""
    forward = [[{"LAYER": i, "PASS": "F"}] for i in range(layers)]
    backward = [[{"LAYER": i, "PASS": "B"}] for i in reversed(range(layers))]
    return piper.Order(forward + backward)


@cache
def captured_model(setup: Setup) -> tuple[Transformer, Captured]:
    """One model and one capture, at the size of a microbatch, for all variants."""
    model = build_model(setup)
    batch = batch_of(setup, 1, 1)
    return model, capture_with_constants(model, transformer_loss, batch, batch_size=setup.rows)


class PiperRun:
    """Training of one variant in this process."""

    def __init__(self, variant: str, rank: int, setup: Setup, count: int, store: Store) -> None:
        size = 1 if variant == ALONE else REPLICAS
        batch = batch_of(setup, count, size)
        model, captured = captured_model(setup)
        dag = replace(captured.dag, batch_size=size * count * setup.rows)
        self.plan: Plan = piper.plan(
            piper.apply(dag, strategy_of(variant, setup, count)),
            gather_bytes=setup.gather_bytes,
            reduce_bytes=setup.reduce_bytes,
        )
        piper.verify(self.plan)
        self.device = DeviceId(rank % size)
        host = setup.link.addresses[rank]
        own = PrefixStore(f"{variant} {count} {rank if size == 1 else ''}", store)
        self.backend = OneOf(self.device, size, own, host)
        self.backend.start(size)
        self.backend.load("train", self.plan, signature(batch), captured.constants)
        self.backend.initialise("train", model_tensors(model), OptimizerSpec(build_optimizer))
        self.batch = batch

    def __call__(self) -> None:
        self.backend.run("train", [self.batch], first_step=0)

    def sent(self) -> int:
        """Bytes that this device sends in one step, two members of a group exchanging halves."""
        total = 0
        for instruction in self.plan.devices[self.device].instructions:
            match instruction:
                case AllReduceBucket(messages=messages):
                    total += sum(m.nbytes for m in messages)
                case ReduceScatterBucket(messages=messages):
                    total += sum(m.nbytes for m in messages)
                case AllGatherBucket(messages=messages) | RefreshBucket(messages=messages):
                    total += sum(m.nbytes for m in messages) // REPLICAS
                case _:
                    pass
        return total

    def trace(self, label: str) -> list[str]:
        """Where a step's time goes: the longest closures that are not computation, with when they
        began.
        """
        program = _program(self.backend.worker)
        began = time.perf_counter()
        found: list[tuple[float, float, str]] = []
        steps, closures = program._steps, program._closures  # noqa: SLF001

        def timed(closure: Callable[[], None], text: str) -> Callable[[], None]:
            def run() -> None:
                start = time.perf_counter()
                closure()
                found.append((time.perf_counter() - start, start - began, text))

            return run

        texts = [self._text(step.instruction) for step in steps]
        program._closures = [  # noqa: SLF001
            timed(c, t) for c, t in zip(closures, texts, strict=True)
        ]
        dist.barrier()
        began = time.perf_counter()
        self()
        total = time.perf_counter() - began
        program._closures = closures  # noqa: SLF001
        computing = sum(t for t, _, text in found if text.startswith("compute "))
        kinds: dict[str, float] = {}
        for took, _, text in found:
            kinds[text.split()[0]] = kinds.get(text.split()[0], 0.0) + took
        rest = sorted((f for f in found if not f[2].startswith("compute ")), reverse=True)
        by_kind = ", ".join(
            f"{k} {t * 1e3:.0f}" for k, t in sorted(kinds.items(), key=lambda x: -x[1])
        )
        lines = [
            f"{label}: {total * 1e3:.0f} ms, computing {computing * 1e3:.0f}; ms by kind: {by_kind}"
        ]
        lines += [
            f"    at {at * 1e3:6.0f} for {took * 1e3:5.1f} ms: {text}"
            for took, at, text in rest[:8]
        ]
        return lines

    def _text(self, instruction: object) -> str:
        node = self.plan.dag.nodes.get(instruction.node)
        label = "" if node is None else node.label
        kind = "wait" if isinstance(instruction, Wait) else instruction.op
        return f"{kind} [{label}] on {instruction.stream}"


@dataclass(frozen=True)
class ChunksOnly(UnitCosts):
    """Costs of chunks, ``slower`` times what the preset of a CPU says, and of bytes on a link; all
    else is free.
    """

    topology: Topology | None = None
    slower: float = 1.0

    def topology_for(self, num_devices: int) -> Topology | None:  # type: ignore[override]  # unit costs have no links
        """See :class:`~piper.plan.costs.Costs`."""
        if self.topology is not None:
            self.topology.check(num_devices)
        return self.topology

    def chunk(self, dag: Dag, bindings: Mapping[str, int], chunk: Chunk) -> float:
        """See :class:`~piper.plan.costs.Costs`."""
        return self.slower * CPU.chunk(dag, bindings, chunk)


def seconds_of_order(plan: Plan, single: Plan, alone: float, rate: float) -> float:
    """How long *plan* takes at least in its order, with chunks that together take *alone* seconds
    in the plan *single*.
    """
    link = PortLink(latency=0.0, bandwidth=rate)
    costs = ChunksOnly(topology=Topology(REPLICAS, 1, link, link))
    slower = alone / piper.simulate(single, costs).seconds
    return piper.simulate(plan, replace(costs, slower=slower)).seconds


def _program(worker: Worker) -> piper.runtime.interpreter.Program:
    program = worker._plans["train"].program  # noqa: SLF001
    assert program is not None
    return program


# --- torch --------------------------------------------------------------------------------------


def torch_run(variant: str, rank: int, setup: Setup, count: int) -> Step:
    """A training step of torch's, gradients synchronised with the last microbatch."""
    model = build_model(setup)
    for block in model.blocks:
        block.__dict__.pop("forward", None)
    inputs, targets = (p.chunk(REPLICAS)[rank] for p in batch_of(setup, count, REPLICAS))
    if variant == "DDP":
        wrapped: torch.nn.Module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        mesh = init_device_mesh("cpu", (REPLICAS,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=variant == "FSDP2 reshard")
        wrapped = fully_shard(model, mesh=mesh, reshard_after_forward=variant == "FSDP2 reshard")
    optimizer = build_optimizer(list(wrapped.parameters()))

    def step() -> None:
        for m, (x, y) in enumerate(zip(inputs.chunk(count), targets.chunk(count), strict=True)):
            last = m == count - 1
            if variant == "DDP":
                context = nullcontext() if last else wrapped.no_sync()
            else:
                context = nullcontext()
                wrapped.set_requires_gradient_sync(last)
                wrapped.set_is_last_backward(last)
            with context:
                (transformer_loss(wrapped(x), y) / count).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


# --- measuring ----------------------------------------------------------------------------------


def say(rank: int, text: str) -> None:
    """Progress, of rank 0."""
    if rank == 0:
        print(f"data_parallel {text}", file=sys.stderr, flush=True)


def work(rank: int, setup: Setup) -> None:
    """One process. Rank 0 prints what it found as JSON."""
    pinned(rank)
    warnings.simplefilter("ignore")
    store = join(rank, REPLICAS, setup.link, setup.port)
    message = min(exchange(rank, CHECKED) for _ in range(5))
    runs: dict[str, Step] = {}
    began = time.perf_counter()
    for count in setup.counts:
        for variant in (ALONE, *setup.variants):
            name = f"{variant} × {count}"
            if variant in TORCH:
                runs[name] = torch_run(variant, rank, setup, count)
            else:
                runs[name] = PiperRun(variant, rank, setup, count, store)
            say(rank, f"ready: {name}")
    say(rank, f"{len(runs)} variants ready in {time.perf_counter() - began:.0f} s")
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    processor: dict[str, list[float]] = {name: [] for name in runs}
    busy, started, own = busy_seconds(), time.perf_counter(), time.process_time()
    for turn in range(setup.warm_up + setup.rounds):
        began = time.perf_counter()
        for name, run in runs.items():
            dist.barrier()
            at, used = time.perf_counter(), time.process_time()
            run()
            dist.barrier()
            if turn >= setup.warm_up:
                seconds[name].append(time.perf_counter() - at)
                processor[name].append(time.process_time() - used)
        took = time.perf_counter() - began
        kind = " of warm-up" if turn < setup.warm_up else ""
        say(rank, f"round {turn + 1} of {setup.warm_up + setup.rounds}{kind}: {took:.0f} s")
    elapsed = time.perf_counter() - started
    mine = torch.tensor([time.process_time() - own], dtype=torch.float64)
    dist.all_reduce(mine)
    foreign = (busy_seconds() - busy - mine.item()) / elapsed
    pipers = {name: run for name, run in runs.items() if isinstance(run, PiperRun)}
    if setup.trace:
        for name, run in pipers.items():
            lines = run.trace(name)
            if rank == 0:
                print("\n".join(lines), file=sys.stderr, flush=True)
    sent = {name: run.sent() for name, run in pipers.items()}
    ordered = {}
    for name, run in pipers.items():
        single = f"{ALONE} × {name.partition(' × ')[2]}"
        ordered[name] = seconds_of_order(
            run.plan, pipers[single].plan, min(seconds[single]), setup.rate
        )
    size = sum(p.nbytes for p in build_model(setup).parameters())
    if rank == 0:
        found = Found(seconds, processor, message, sent, size, ordered, foreign)
        print(msgspec.json.encode(found).decode(), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def torch_sent(variant: str, parameters: int, count: int) -> int:
    """Bytes that one of torch's variants must send per step."""
    half = parameters // REPLICAS
    match variant:
        case "DDP":
            return parameters
        case "FSDP2 whole":
            return half + half  # gathered once per step, scattered once
        case _:
            return 2 * half * count + half
    raise AssertionError(variant)


def report(setup: Setup, found: Found, rate: float) -> None:
    print(
        f"data_parallel {setup.link.name}: {setup.layers} blocks of width {setup.width} ({found.parameters / MIB:.1f} MiB of "
        f"parameters), microbatches of {setup.rows}×{setup.seq_len} tokens per process; a message of {CHECKED >> 20} MiB takes "
        f"{found.message * 1e3:.1f} ms; {setup.rounds} rounds; foreign load {found.foreign:.2f} cores"
    )
    for count in setup.counts:
        alone = found.seconds[f"{ALONE} × {count}"]
        print(
            f"data_parallel × {count} {'computation alone':25} {min(alone) * 1e3:7.1f} ms, "
            f"processor {min(found.processor[f'{ALONE} × {count}']) * 1e3:6.1f} ms"
        )
        for variant in setup.variants:
            name = f"{variant} × {count}"
            taken = found.seconds[name]
            sent = found.sent.get(name) or torch_sent(variant, found.parameters, count)
            bound = min(1.0, min(alone) / (sent / rate))
            minima, middle = compared(taken, alone)
            order = min(alone) / found.ordered[name] if name in found.ordered else None
            print(
                f"data_parallel × {count} {variant:25} {min(taken) * 1e3:7.1f} ms, of the ideal {minima:.3f} (median {middle:.3f}), "
                f"processor {min(found.processor[name]) * 1e3:6.1f} ms, sends {sent / MIB:6.1f} MiB, bound {bound:.3f}, of the bound {minima / bound:.3f} (median {middle / bound:.3f})"
                + (f"; order's bound {order:.3f}, of it {minima / order:.3f}" if order else ""),
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Data parallelism over a slow link.")
    parser.add_argument("--rounds", type=int, default=8, help="after two of warm-up")
    parser.add_argument("--link", default="1gbit", help="loopback, or a rate of tc")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--rows", type=int, default=1, help="of a microbatch")
    parser.add_argument("--counts", default="1,4", help="microbatches per process and step")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--gather-bytes", default="24MiB", help="bound on early gathers")
    parser.add_argument("--reduce-bytes", default="64MiB", help="bound on reductions in flight")
    parser.add_argument("--trace", action="store_true", help="where the time goes")
    parser.add_argument(
        "--quick", action="store_true", help="a small model, two rounds, for development"
    )
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("setup", nargs="?", help=argparse.SUPPRESS)
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**QUICK)
    options = parser.parse_args()
    if options.rank >= 0:
        work(options.rank, msgspec.json.decode(options.setup, type=Setup))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(machine())
    chosen = tuple(options.variants.split(","))
    if unknown := [v for v in chosen if v not in VARIANTS]:
        parser.error(f"unknown variant {unknown[0]!r}; choose from {', '.join(VARIANTS)}")
    local = options.link == "loopback"
    rate = 1e12 if local else bytes_per_second(options.link)
    try:
        with nullcontext(LOOPBACK) if local else limited(options.link) as link:
            setup = Setup(
                link=link,
                port=free_port(),
                warm_up=1 if options.quick else WARM_UP,
                rounds=2 if options.quick else options.rounds,
                width=options.width,
                layers=options.layers,
                seq_len=options.seq_len,
                rows=options.rows,
                counts=tuple(int(c) for c in options.counts.split(",")),
                variants=chosen,
                gather_bytes=options.gather_bytes,
                reduce_bytes=options.reduce_bytes,
                rate=rate,
                trace=options.trace,
            )
            told = msgspec.json.encode(setup).decode()
            lines = launch("benchmarks.data_parallel", told, link.prefixes)
            found = msgspec.json.decode(lines[-1], type=Found)
    except PermissionError as error:
        print(f"data_parallel {options.link}: skipped: {error}")
        return
    expected = CHECKED / rate
    if not local and not 0.97 * expected < found.message < 1.1 * expected:
        print(
            f"data_parallel {options.link}: the link is not what it should be: {CHECKED >> 20} MiB took {found.message * 1e3:.1f} ms, "
            f"expected {expected * 1e3:.1f} and up to 10 % more; the figures below say little"
        )
    report(setup, found, rate)


if __name__ == "__main__":
    main()

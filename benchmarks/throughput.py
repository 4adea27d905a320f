"""Throughput of a pipeline of two workers under 1F1B: Piper against ``torch.distributed.pipelining.Schedule1F1B``.

Both train the model of ``examples/gpt_stdlib.toml`` in the same two processes, one thread each, each pinned to its own core,
on the same batches and microbatches, with the same optimizer step, in alternating rounds. Piper runs as under Ray: a
:class:`~piper.runtime.worker.Worker` per process with gloo communicators. First over the loopback device, then over a link of
100 Mbit/s between two network namespaces (needs root; skipped with a message otherwise).

Printed per link: the ratio of minima and the median of the ratios within a round, of torch's time over Piper's: above 1
means that Piper is faster.
"""

import argparse
import signal
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from benchmarks.links import LOOPBACK, Link, exchange, free_port, limited
from benchmarks.processes import OneOf, join, launch, pinned
from benchmarks.stages import Stage
from benchmarks.support import busy_seconds, compared, machine, spread
from torch._C._distributed_c10d import Store
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from piper import strategies
from piper.api.programs import Programs, model_tensors
from piper.models.transformer import Transformer, TransformerConfig, transformer_loss
from piper.runtime.batch import Batch
from piper.runtime.state import OptimizerSpec, ParamsArgument

CONFIG = Path(__file__).parent.parent / "examples" / "gpt_stdlib.toml"
NUM_STAGES = 2
MICROBATCHES = 8
ROWS = 4
WARM_UP = 2
MESSAGE = 1 << 17


class Setup(msgspec.Struct, frozen=True):
    """What the processes are told. They meet on ``port`` of the first one."""

    link: Link
    port: int
    rounds: int
    steps: int
    seq_len: int
    width: int
    layers: int
    heads: int
    profile: str = ""


class Found(msgspec.Struct, frozen=True):
    """What they measured: seconds per step of each variant in each round, processor seconds likewise by rank, the cores that
    others kept busy meanwhile, and the seconds that one message of :data:`MESSAGE` bytes takes."""

    seconds: dict[str, list[float]]
    cpu: list[dict[str, list[float]]]
    foreign: float
    message: float


def build_model(setup: Setup) -> Transformer:
    torch.manual_seed(0)
    return Transformer(
        TransformerConfig(
            context=setup.seq_len,
            width=setup.width,
            num_layers=setup.layers,
            num_heads=setup.heads,
            num_stages=NUM_STAGES,
        )
    )


def build_optimizer(parameters: ParamsArgument) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=5e-4, betas=(0.9, 0.99), weight_decay=0.1)


def batch_of(step: int, setup: Setup) -> Batch:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 256, (MICROBATCHES * ROWS, setup.seq_len + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


Run = Callable[[int, int], list[float]]
"""``run(first, count)``: training steps first, first + 1, …; the microbatch losses, on the last stage."""


def piper_run(rank: int, setup: Setup, store: Store) -> Run:
    model = build_model(setup)
    strategy = strategies.pipeline("1f1b", [[0], [1]], MICROBATCHES)
    program = Programs(model, transformer_loss, strategy).training(batch_of(0, setup))
    backend = OneOf(rank, NUM_STAGES, store, setup.link.addresses[rank])
    backend.start(NUM_STAGES)
    backend.load("train", program.plan, program.signature, program.constants)
    backend.initialise("train", model_tensors(model), OptimizerSpec(build_optimizer))

    def run(first: int, count: int) -> list[float]:
        # A function of the step, as `trainer.fit` passes it on: before each step the workers agree to run it.
        done = backend.run(
            "train", partial(batch_of, setup=setup), first_step=first, num_steps=count
        )
        return [value for step in done.steps for value in step.values.get("loss", {}).values()]

    return run


def torch_run(rank: int, setup: Setup) -> Run:
    stage = Stage(build_model(setup), rank, NUM_STAGES)
    pipeline_stage = PipelineStage(stage, rank, NUM_STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(pipeline_stage, MICROBATCHES, loss_fn=transformer_loss)
    parameters: list[torch.Tensor] = list(stage.parameters())
    optimizer = build_optimizer(parameters)

    def run(first: int, count: int) -> list[float]:
        found: list[float] = []
        for step in range(first, first + count):
            inputs, targets = batch_of(step, setup)
            losses: list[torch.Tensor] = []
            if rank == 0:
                schedule.step(inputs, return_outputs=False)
            else:
                schedule.step(target=targets, losses=losses, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            found += [loss.item() for loss in losses]
        return found

    return run


def work(rank: int, setup: Setup) -> None:
    """One process. Rank 0 prints the rounds as JSON."""
    pinned(rank)
    store = join(rank, NUM_STAGES, setup.link, setup.port)
    variants = {"torch": torch_run(rank, setup), "piper": piper_run(rank, setup, store)}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    losses: dict[str, list[float]] = {"torch": [], "piper": []}
    cpu: dict[str, list[float]] = {name: [] for name in variants}
    busy, started = busy_seconds(), time.perf_counter()
    own = time.process_time()
    message = min(exchange(rank, MESSAGE) for _ in range(5))
    profiler = _Profiler(setup.profile, rank)
    for turn in range(WARM_UP + setup.rounds):
        for name, run in variants.items():
            first = turn * setup.steps
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            with profiler.watching(name, turn >= WARM_UP):
                losses[name] += run(first, setup.steps)
            used = time.process_time() - used
            dist.barrier()
            took = (time.perf_counter() - began) / setup.steps
            if turn >= WARM_UP:
                seconds[name].append(took)
                cpu[name].append(used / setup.steps)
    elapsed = time.perf_counter() - started
    mine = torch.tensor([time.process_time() - own], dtype=torch.float64)
    dist.all_reduce(mine)
    foreign = (busy_seconds() - busy - mine.item()) / elapsed
    profiler.report()
    torch.testing.assert_close(losses["piper"], losses["torch"], rtol=1e-3, atol=0.0)
    everyone: list[dict[str, list[float]]] = [{} for _ in range(NUM_STAGES)]
    dist.all_gather_object(everyone, cpu)
    if rank == 0:
        print(msgspec.json.encode(Found(seconds, everyone, foreign, message)).decode(), flush=True)
    dist.barrier()
    dist.destroy_process_group()


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
    """A line per variant, and the comparison."""
    link, tokens = setup.link, MICROBATCHES * ROWS * setup.seq_len
    print(
        f"throughput {link.name:9} {setup.layers} layers of width {setup.width}, {MICROBATCHES} microbatches of "
        f"{ROWS}×{setup.seq_len} tokens; a message of {MESSAGE >> 10} KiB takes {found.message * 1e3:.1f} ms"
    )
    for name, taken in found.seconds.items():
        used = " ".join(f"{min(of[name]) * 1e3:.1f}" for of in found.cpu)
        print(
            f"throughput {link.name:9} {name:6} {spread(taken)} ms per step, "
            f"{tokens / min(taken):7.0f} tokens/s, processor ms per step by rank {used}"
        )
    goal = 1.0 if link == LOOPBACK else 1.15
    minima, middle = compared(found.seconds["piper"], found.seconds["torch"])
    print(
        f"throughput {link.name:9} piper / torch: ratio of minima {minima:.3f}, "
        f"median of in-round ratios {middle:.3f} (goal {goal}; "
        f"{setup.rounds} rounds; foreign load {found.foreign:.2f} cores)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Piper's 1F1B against torch's.")
    parser.add_argument("--rounds", type=int, default=12, help="after two of warm-up")
    parser.add_argument("--steps", type=int, default=2, help="training steps per round")
    parser.add_argument("--links", default="loopback,100mbit", help="loopback, or a rate of tc")
    parser.add_argument("--width", type=int, default=0, help="default: the example's")
    parser.add_argument("--profile", default="", help="profile one variant: piper or torch")
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
            with nullcontext(LOOPBACK) if name == "loopback" else limited(name) as link:
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
        rounds=options.rounds,
        steps=options.steps,
        seq_len=config["train"]["seq_len"],
        width=options.width or config["model"]["width"],
        layers=config["model"]["num_layers"],
        heads=config["model"]["num_heads"],
        profile=options.profile,
    )


if __name__ == "__main__":
    main()

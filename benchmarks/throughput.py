"""Throughput of a pipeline of two workers under 1F1B: Piper against ``torch.distributed.pipelining.Schedule1F1B``.

Both train the model of ``examples/gpt_stdlib.toml`` in the same two processes, one thread each, each pinned to its own core,
on the same batches and microbatches, with the same optimizer step, in alternating rounds. Piper runs as under Ray: a
:class:`~piper.runtime.worker.Worker` per process with gloo communicators. First over the loopback device, then over a link of
100 Mbit/s between two network namespaces (needs root; skipped with a message otherwise).

Printed per link: the ratio of minima and the median of the ratios within a round, of torch's time over Piper's: above 1
means that Piper is faster.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec
import torch
import torch.distributed as dist
from benchmarks.support import busy_seconds, compared, machine, spread
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from piper import strategies
from piper.api.programs import Programs, model_tensors
from piper.backends.base import WorkerBackend
from piper.devices.cpu import CpuDevice
from piper.devices.gloo import GlooCommunicator
from piper.ids import DeviceId
from piper.models.transformer import Transformer, TransformerConfig, transformer_loss
from piper.ops.base import CommunicatorId
from piper.runtime.batch import Batch
from piper.runtime.state import OptimizerSpec, ParamsArgument
from piper.runtime.worker import Worker

CONFIG = Path(__file__).parent.parent / "examples" / "gpt_stdlib.toml"
NUM_STAGES = 2
MICROBATCHES = 8
ROWS = 4
WARM_UP = 2
MESSAGE = 1 << 17


Pair: TypeAlias = tuple[str, str]
"""One for each rank."""


class Link(msgspec.Struct, frozen=True):
    """How the two processes reach each other: what to put before their commands, addresses, interfaces."""

    name: str
    goal: float
    prefixes: tuple[tuple[str, ...], tuple[str, ...]]
    addresses: Pair
    interfaces: Pair


LOOPBACK = Link("loopback", 1.0, ((), ()), ("127.0.0.1", "127.0.0.1"), ("lo", "lo"))


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


class Stage(torch.nn.Module):
    """One stage of the model, cut by hand as torch's pipelining wants it."""

    def __init__(self, model: Transformer, stage: int) -> None:
        super().__init__()
        self.model = model
        self.stage = stage
        model.blocks = torch.nn.ModuleList(model.blocks[i] for i in model.stages[stage])
        ends = ("token_embedding", "position_embedding"), ("norm", "head")
        for name in ends[1 - stage]:
            delattr(model, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.stage == 0:
            x = self.model._embed(x)  # noqa: SLF001 (what the model's own forward does)
        for block in self.model.blocks:
            x = block(x)
        if self.stage == NUM_STAGES - 1:
            x = self.model.head(self.model.norm(x))
        return x


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


class OneOfTwo(WorkerBackend):
    """The backend of a program that is itself one of the workers: what the driver asks of all, each process asks of its own."""

    def __init__(self, rank: int, setup: Setup, store: Store) -> None:
        super().__init__()
        self._worker = Worker(rank, NUM_STAGES, CpuDevice, self._communicator)
        self._rank, self._store, self._own_host = rank, store, setup.link.addresses[rank]

    def _communicator(
        self, name: CommunicatorId, members: tuple[DeviceId, ...]
    ) -> GlooCommunicator:
        return GlooCommunicator(
            name, members, DeviceId(self._rank), self._store, host=self._own_host
        )

    def _start(self, num_devices: int) -> None:
        assert num_devices == NUM_STAGES

    def _call(self, method: str, arguments: Sequence[Mapping[str, object]]) -> list[object]:
        result = getattr(self._worker, method)(**arguments[self._rank])
        return [result] * NUM_STAGES

    def _stop(self) -> None:
        """Ends with the process."""


def piper_run(rank: int, setup: Setup, store: Store) -> Run:
    model = build_model(setup)
    strategy = strategies.pipeline("1f1b", [[0], [1]], MICROBATCHES)
    program = Programs(model, transformer_loss, strategy).training(batch_of(0, setup))
    backend = OneOfTwo(rank, setup, store)
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
    stage = Stage(build_model(setup), rank)
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
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = setup.link.interfaces[rank]
    limit = timedelta(seconds=300)
    store = TCPStore(setup.link.addresses[0], setup.port, is_master=rank == 0, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_STAGES, timeout=limit)
    variants = {"torch": torch_run(rank, setup), "piper": piper_run(rank, setup, store)}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    losses: dict[str, list[float]] = {"torch": [], "piper": []}
    cpu: dict[str, list[float]] = {name: [] for name in variants}
    busy, started = busy_seconds(), time.perf_counter()
    own = time.process_time()
    message = min(_message(rank) for _ in range(5))
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


def _message(rank: int) -> float:
    """Seconds of one message there, and an empty one back."""
    payload, answer = torch.zeros(MESSAGE, dtype=torch.uint8), torch.zeros(1)
    dist.barrier()
    began = time.perf_counter()
    if rank == 0:
        dist.send(payload, 1)
        dist.recv(answer, 1)
    else:
        dist.recv(payload, 0)
        dist.send(answer, 0)
    return time.perf_counter() - began


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


@contextmanager
def limited(rate: str) -> Iterator[Link]:
    """Two network namespaces joined by a link of *rate* (tc's notation) each way.

    Token buckets (``tc tbf``) on both ends: communication then takes wall time and almost no processor time. Torn down on the way
    out, also after an error.

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
            # Segments that the kernel hands over whole must fit into the bucket, and the bucket must be small beside a
            # message, which would otherwise pass without delay after every pause.
            _command("ip", "-n", space, "link", "set", interface, "gso_max_size", "8192")
            bucket = ("tbf", "rate", rate, "burst", "16kb", "latency", "20ms")
            _command("tc", "-n", space, "qdisc", "add", "dev", interface, "root", *bucket)
        enter = ("ip", "netns", "exec")
        prefixes = (*enter, spaces[0]), (*enter, spaces[1])
        yield Link(rate, 1.15, prefixes, addresses, interfaces)
    finally:
        for space in made:
            subprocess.run(["ip", "netns", "del", space], check=False)


def _command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")


def measure(setup: Setup) -> Found:
    """Run both processes and wait for them."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = (sys.executable, "-m", "benchmarks.throughput")
    told = msgspec.json.encode(setup).decode()
    processes = [
        subprocess.Popen(
            [*prefix, *command, "--rank", str(rank), told],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=CONFIG.parent.parent,
        )
        for rank, prefix in enumerate(setup.link.prefixes)
    ]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError("a benchmark process failed; see above")
    return msgspec.json.decode(outputs[0].splitlines()[-1], type=Found)


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
    minima, middle = compared(found.seconds["piper"], found.seconds["torch"])
    print(
        f"throughput {link.name:9} piper / torch: ratio of minima {minima:.3f}, "
        f"median of in-round ratios {middle:.3f} (goal {link.goal}; "
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
        port=_free_port(),
        rounds=options.rounds,
        steps=options.steps,
        seq_len=config["train"]["seq_len"],
        width=options.width or config["model"]["width"],
        layers=config["model"]["num_layers"],
        heads=config["model"]["num_heads"],
        profile=options.profile,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main()

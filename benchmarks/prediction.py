"""Predicted against measured step time: how good is ``piper simulate --profile``?

Two processes, each pinned to a core, as under Ray: pipelines under several schedules and data parallelism at several ZeRO levels, over
the loopback device and over a limited link. In every round both processes run their devices' programs by themselves and time messages between
them, then every configuration runs. The least of all rounds goes into the profile, from which the step times are predicted,
and is what these are compared with; the median of the rounds beside it says how noisy the machine is.

Printed at the end: the errors, how many pairs of configurations are ranked as measured, what choosing by prediction costs against
the best, and how many events per second the simulator handles.
"""

import argparse
import signal
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median

import msgspec
import torch
import torch.distributed as dist
from benchmarks.links import Link, free_port, open_link
from benchmarks.pipelines import CONFIG, build_optimizer
from benchmarks.processes import OneOf, join, launch, pinned
from benchmarks.support import machine
from torch._C._distributed_c10d import PrefixStore

from piper import strategies
from piper.api.programs import Program, Programs, model_tensors
from piper.devices.gloo import GlooCommunicator
from piper.devices.links import LinkTimes, answer_link, measure_link
from piper.ids import DeviceId
from piper.models.transformer import Transformer, TransformerConfig, transformer_loss
from piper.plan.profile import Profile
from piper.runtime.profiling import Measured, Replay
from piper.runtime.state import OptimizerSpec
from piper.simulate import simulate

ROWS = 16
WARM_UP = 2
LINK_ROUNDS = 5
RANKS = 2


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


class Case(msgspec.Struct, frozen=True):
    """One configuration."""

    schedule: str
    microbatches: int
    virtual: int = 1
    zero: int | None = None

    @property
    def name(self) -> str:
        if self.zero is not None:
            return f"dp zero={self.zero} M={self.microbatches}"
        return f"{self.schedule} M={self.microbatches}" + (
            f" v={self.virtual}" if self.virtual > 1 else ""
        )

    @property
    def groups(self) -> list[list[int]]:
        return [[0, 1]] if self.zero is not None else [[0], [1]]


CASES = [
    *(Case(s, m) for s in ("gpipe", "1f1b") for m in (2, 4, 8)),
    *(Case(s, m, virtual=2) for s in ("interleaved_1f1b", "looped_bfs") for m in (2, 4)),
    *(Case("gpipe", m, zero=0) for m in (1, 2)),
    *(Case("gpipe", 2, zero=z) for z in (1, 2, 3)),
]


class Found(msgspec.Struct, frozen=True):
    """What was measured: seconds per step of each case in each round, and the profile."""

    seconds: dict[str, list[float]]
    profile: Profile


def program_of(case: Case, setup: Setup) -> tuple[Program, Transformer]:
    torch.manual_seed(0)
    model = Transformer(
        TransformerConfig(
            context=setup.seq_len,
            width=setup.width,
            num_layers=setup.layers,
            num_heads=setup.heads,
            num_stages=len(case.groups) * case.virtual,
        )
    )
    strategy = strategies.pipeline(
        case.schedule,
        case.groups,
        case.microbatches,
        num_virtual_stages=case.virtual,
        zero=case.zero or 0,
    )
    return Programs(model, transformer_loss, strategy).training(batch(setup)), model


def batch(setup: Setup) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (ROWS, setup.seq_len + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def work(rank: int, setup: Setup) -> None:
    """One process. Rank 0 prints what was found as JSON."""
    pinned(rank)
    host = setup.link.addresses
    store = join(rank, RANKS, setup.link, setup.port)
    everyone = (DeviceId(0), DeviceId(1))
    pair = GlooCommunicator("links", everyone, everyone[rank], store, host=host[rank])
    made = {case.name: program_of(case, setup) for case in CASES}
    backends: dict[str, OneOf] = {}
    for name, (program, model) in made.items():
        backend = backends[name] = OneOf(rank, RANKS, PrefixStore(name, store), host[rank])
        backend.start(RANKS)
        backend.load("train", program.plan, program.signature, program.constants)
        backend.initialise("train", model_tensors(model), OptimizerSpec(build_optimizer))
    measured = Measured()
    spec = OptimizerSpec(build_optimizer)
    replays = [Replay(p.plan, everyone[rank], spec) for p, _ in made.values()]
    links: list[LinkTimes] = []
    seconds: dict[str, list[float]] = {name: [] for name in made}
    data = batch(setup)
    for turn in range(WARM_UP + setup.rounds):
        dist.barrier()
        for replay in replays:
            measured.add(replay)
        dist.barrier()
        if rank == 0:
            links.append(measure_link(pair, LINK_ROUNDS))
        else:
            answer_link(pair, LINK_ROUNDS)
        for name, backend in backends.items():
            dist.barrier()
            began = time.perf_counter()
            backend.run("train", [data] * setup.steps, first_step=turn * setup.steps)
            dist.barrier()
            if turn >= WARM_UP:
                seconds[name].append((time.perf_counter() - began) / setup.steps)
    others: list[dict[str, float]] = [{}, {}]
    dist.all_gather_object(others, measured.chunks)
    if rank == 0:
        best = LinkTimes(_least([x.issue for x in links]), _least([x.travel for x in links]))
        profile = measured.profile(best)
        # Rank 1 knows the chunks of its own stages.
        profile = msgspec.structs.replace(profile, chunks=others[1] | others[0])
        print(msgspec.json.encode(Found(seconds, profile)).decode(), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _least(times: Sequence[Mapping[int, float]]) -> dict[int, float]:
    return {size: min(t[size] for t in times) for size in times[0]}


def measure(setup: Setup) -> Found:
    """Run both processes and wait for them."""
    told = msgspec.json.encode(setup).decode()
    lines = launch("benchmarks.prediction", told, setup.link.prefixes, timeout=900.0)
    return msgspec.json.decode(lines[-1], type=Found)


def report(setup: Setup, found: Found) -> None:
    """A line per case, and the summary."""
    link, profile = setup.link.name, found.profile
    print(
        f"prediction {link:9} message {profile.latency * 1e6:.0f} µs + {profile.bandwidth / 1e6:.1f} MB/s; {len(profile.chunks)} chunks"
    )
    predicted: dict[str, float] = {}
    measured = {name: min(taken) for name, taken in found.seconds.items()}
    took, boxes = 0.0, 0
    for case in CASES:
        plan = program_of(case, setup)[0].plan
        began = time.process_time()
        line = simulate(plan, profile)
        took += time.process_time() - began
        boxes += sum(len(mine.instructions) for mine in plan.devices)
        predicted[case.name] = line.seconds
        least, middle = measured[case.name], median(found.seconds[case.name])
        print(
            f"prediction {link:9} {case.name:24} predicted {line.seconds * 1e3:8.1f} ms, measured min {least * 1e3:8.1f} "
            f"median {middle * 1e3:8.1f} ms; error {line.seconds / least - 1:+6.1%} (median of rounds {middle / least - 1:+.1%})"
        )
    errors = [abs(predicted[name] / measured[name] - 1) for name in measured]
    pairs = list(combinations(measured, 2))
    apart = [(a, b) for a, b in pairs if abs(measured[a] / measured[b] - 1) > 0.03]
    right = sum((predicted[a] < predicted[b]) == (measured[a] < measured[b]) for a, b in apart)
    chosen = min(predicted, key=predicted.__getitem__)
    regret = measured[chosen] / min(measured.values()) - 1
    print(
        f"prediction {link:9} {len(errors)} configurations: |error| median {median(errors):.1%}, worst {max(errors):.1%}; "
        f"{right} of {len(apart)} pairs that differ by more than 3% are ranked as measured; the one predicted quickest is {regret:.1%} slower than the "
        f"quickest; simulator {boxes / took:,.0f} instructions/s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=8, help="after two of warm-up")
    parser.add_argument(
        "--steps", type=int, default=1, help="training steps per round and configuration"
    )
    parser.add_argument("--links", default="loopback,500mbit", help="loopback, or a rate of tc")
    parser.add_argument("--width", type=int, default=0, help="default: the example's")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("setup", nargs="?", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank >= 0:
        work(options.rank, msgspec.json.decode(options.setup, type=Setup))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(machine())
    for name in options.links.split(","):
        try:
            with open_link(name) as link:
                setup = make_setup(link, options)
                report(setup, measure(setup))
        except PermissionError as error:
            print(f"prediction {name}: skipped: {error}")


def make_setup(link: Link, options: argparse.Namespace) -> Setup:
    """The example's model and sequence length."""
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
    )


if __name__ == "__main__":
    main()

"""Predicted against measured step time: how good is ``piper simulate --profile``?

Two processes, each pinned to a core, as under Ray: pipelines under several schedules, data
parallelism at several ZeRO levels, and expert parallelism (with a capacity and dropless,
microbatches in turn and interleaved), over the loopback device and over a limited link. In every
round both processes run their devices' programs by themselves and time messages and collectives
between them, then every configuration runs. The quickest run of each program goes into the profile,
from which the step times are predicted, and the least of the rounds is what these are compared
with. Beside it stands how noisy that is: what the median of the rounds is above it, and how much
the least of the even and of the odd rounds differ.

Printed at the end: the errors, the configurations in the predicted and in the measured order, how
many pairs of them are ranked as measured, what choosing by prediction costs against the best, and
how many events per second the simulator handles.
"""

import argparse
import signal
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile
from typing import cast

import msgspec
import torch
import torch.distributed as dist
from benchmarks.experts import in_turn
from benchmarks.links import Link, free_port, open_link
from benchmarks.pipelines import CONFIG, build_optimizer
from benchmarks.processes import OneOf, join, launch, pinned
from benchmarks.support import busy_seconds, machine
from torch._C._distributed_c10d import PrefixStore

import piper
from piper import strategies
from piper.api.programs import model_tensors
from piper.capture import Captured, capture_with_constants
from piper.devices.collectives import CollectiveTimes, measure_collectives
from piper.devices.gloo import GlooCommunicator
from piper.devices.links import LARGE, SMALL, LinkTimes, answer_link, measure_link
from piper.directives.base import Directive
from piper.ids import DeviceId
from piper.models import MoE, MoEConfig, moe_loss
from piper.models.transformer import Transformer, TransformerConfig, transformer_loss
from piper.ops.compute import Compute
from piper.plan.codec import decode_plan, encode_plan
from piper.plan.model import Plan
from piper.plan.profile import Profile, Rate, chunk_key
from piper.plan.topology import Contention
from piper.runtime.batch import Batch, signature
from piper.runtime.optimizer import OptimizerSpec
from piper.runtime.profiling import Measured, Network, Replay
from piper.simulate import simulate

ROWS = 8
WARM_UP = 2
LINK_ROUNDS = 5
KINDS = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
RANKS = 2


NO_LINK = LinkTimes({SMALL: 0.0, LARGE: 0.0}, {SMALL: 0.0, LARGE: 0.0})
NOTHING = Network(NO_LINK)


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
    programs: str
    """A file of what :func:`make_programs` makes."""


class Case(msgspec.Struct, frozen=True):
    """One configuration: a pipeline, data parallelism at level ``zero``, or shared ``experts``
    (``capacity`` or ``dropless``).
    """

    schedule: str
    microbatches: int
    virtual: int = 1
    zero: int | None = None
    experts: str = ""

    @property
    def name(self) -> str:
        if self.experts:
            level = f" zero={self.zero}" if self.zero else ""
            return f"ep {self.experts} {self.schedule}{level} M={self.microbatches}"
        if self.zero is not None:
            return f"dp zero={self.zero} M={self.microbatches}"
        return f"{self.schedule} M={self.microbatches}" + (
            f" v={self.virtual}" if self.virtual > 1 else ""
        )

    @property
    def groups(self) -> list[list[int]]:
        return [[0, 1]] if self.zero is not None else [[0], [1]]

    def strategy(self) -> list[Directive]:
        if not self.experts:
            return strategies.pipeline(
                self.schedule,
                self.groups,
                self.microbatches,
                num_virtual_stages=self.virtual,
                zero=self.zero or 0,
            )
        order = [in_turn(self.microbatches)] if self.schedule == "in turn" else []
        level = {"shard_optimizer": self.zero == 1, "shard_params": self.zero == 3}
        return [
            piper.Place({}, devices=[0, 1]),
            piper.Replicate({}, **level),
            piper.Shard({"EP": "*"}),
            piper.Split({}, num_microbatches=self.microbatches),
            *order,
        ]


CASES = [
    *(Case(s, m) for s in ("gpipe", "1f1b") for m in (2, 4)),
    *(Case(s, m, virtual=2) for s in ("interleaved_1f1b", "looped_bfs") for m in (2, 4)),
    Case("zbv", 4, virtual=2),
    *(Case("gpipe", 2, zero=z) for z in (0, 1, 2, 3)),
    *(
        Case(order, 2, zero=0, experts=e)
        for e in ("capacity", "dropless")
        for order in ("in turn", "interleaved")
    ),
    Case("in turn", 2, zero=1, experts="capacity"),
    Case("in turn", 2, zero=3, experts="capacity"),
]


class Found(msgspec.Struct, frozen=True):
    """What was measured: seconds per step of each case in each round, the profile, and how many
    cores others kept busy meanwhile.
    """

    seconds: dict[str, list[float]]
    profile: Profile
    foreign: float


def model_of(case: Case, setup: Setup) -> torch.nn.Module:
    torch.manual_seed(0)
    if case.experts:
        return MoE(
            MoEConfig(
                width=setup.width,
                num_layers=setup.layers // 2,
                num_heads=setup.heads,
                expert_width=setup.width,
                capacity_factor=1.0 if case.experts == "capacity" else None,
            )
        )
    return Transformer(
        TransformerConfig(
            context=setup.seq_len,
            width=setup.width,
            num_layers=setup.layers,
            num_heads=setup.heads,
            num_stages=len(case.groups) * case.virtual,
        )
    )


class Program(msgspec.Struct, frozen=True):
    """A plan as files, and the values of its constant buffers."""

    files: Mapping[str, bytes]
    constants: Mapping[str, torch.Tensor]

    @property
    def plan(self) -> Plan:
        return decode_plan(self.files)


def make_programs(setup: Setup) -> dict[str, Program]:
    """The programs of all cases by name; each model is captured once."""
    captured: dict[object, Captured] = {}
    found: dict[str, Program] = {}
    for case in CASES:
        key = (case.experts, len(case.groups) * case.virtual)
        if key not in captured:
            loss = moe_loss if case.experts else transformer_loss
            captured[key] = capture_with_constants(model_of(case, setup), loss, batch(setup))
        planned = piper.plan(piper.apply(captured[key].dag, case.strategy()))
        piper.verify(planned)
        found[case.name] = Program(encode_plan(planned), captured[key].constants)
    return found


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
    data = batch(setup)
    programs: dict[str, Program] = torch.load(setup.programs, weights_only=False)
    plans = {name: program.plan for name, program in programs.items()}
    backends: dict[str, OneOf] = {}
    for case in CASES:
        name = case.name
        backend = backends[name] = OneOf(rank, RANKS, PrefixStore(name, store), host[rank])
        backend.start(RANKS)
        backend.load("train", plans[name], signature(data), programs[name].constants)
        weights = model_tensors(model_of(case, setup))
        backend.initialise("train", weights, OptimizerSpec(build_optimizer))
    measured = Measured()
    replays = different(list(plans.values()), everyone[rank], data)
    links: list[LinkTimes] = []
    collectives: list[CollectiveTimes] = []
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    busy, own, started = 0.0, 0.0, 0.0
    for turn in range(WARM_UP + setup.rounds):
        dist.barrier()
        if turn == WARM_UP:
            busy, own, started = busy_seconds(), time.process_time(), time.perf_counter()
        replay_all(replays, measured)
        if rank == 0:
            links.append(measure_link(pair, LINK_ROUNDS))
        else:
            answer_link(pair, LINK_ROUNDS)
        collectives.append(measure_collectives(pair, KINDS, rounds=1))
        for name, backend in backends.items():
            dist.barrier()
            began = time.perf_counter()
            backend.run("train", [data] * setup.steps, first_step=turn * setup.steps)
            dist.barrier()
            if turn >= WARM_UP:
                seconds[name].append((time.perf_counter() - began) / setup.steps)
    spent = time.process_time() - own
    foreign = (busy_seconds() - busy, time.perf_counter() - started)
    # Rank 1 knows the chunks of its own stages, and times links only as an answer.
    mine = measured.profile(network(links, collectives) if rank == 0 else NOTHING)
    others: list[object] = [None, None]
    dist.all_gather_object(others, (mine, spent))
    if rank == 0:
        (_, first), (theirs, second) = cast("list[tuple[Profile, float]]", others)
        profile = msgspec.structs.replace(
            mine, chunks=theirs.chunks | mine.chunks, rates=means(theirs.rates, mine.rates)
        )
        found = Found(seconds, profile, (foreign[0] - first - second) / foreign[1])
        print(msgspec.json.encode(found).decode(), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def replay_all(replays: Sequence[Replay], measured: Measured) -> None:
    """Run each once, in both processes at once. A step is quick when both are: so is a pair of
    runs.
    """
    taken = [replay.run() for replay in replays]
    together = torch.tensor([of.seconds for of in taken])
    dist.all_reduce(together)
    for replay, of, both in zip(replays, taken, together.tolist(), strict=True):
        measured.keep(replay, of, both)


def means(one: Mapping[str, Rate], two: Mapping[str, Rate]) -> dict[str, Rate]:
    """By name, the mean of what both ranks measured, or what one did; what stands for the rest is
    that of *two*.
    """
    both = {
        op: Rate((one[op].fixed + two[op].fixed) / 2, (one[op].per_byte + two[op].per_byte) / 2)
        for op in one.keys() & two.keys() - {"*"}
    }
    return {**one, **two, **both}


def different(plans: Sequence[Plan], device: DeviceId, data: Batch) -> list[Replay]:
    """The programs of *device* in plans that have something to tell that none before has."""
    known: set[object] = set()
    found: list[Replay] = []
    for plan in plans:
        instructions = [i for mine in plan.devices for i in mine.instructions]
        tells: set[object] = {i.op for i in instructions if i.reads() or i.writes()}
        tells |= {chunk_key(i.body, plan.bindings) for i in instructions if isinstance(i, Compute)}
        if not tells <= known:
            found.append(Replay(plan, device, OptimizerSpec(build_optimizer), data))
            known |= tells
    return found


def network(links: Sequence[LinkTimes], collectives: Sequence[CollectiveTimes]) -> Network:
    """The quickest of all rounds; of contention, which is ratios, the median."""
    contentions = [c.contention for c in collectives if c.contention is not None]
    return Network(
        quickest(links),
        {kind: {RANKS: quickest([c.kinds[kind] for c in collectives])} for kind in KINDS},
        Contention(median(c.work for c in contentions), median(c.traffic for c in contentions)),
    )


def quickest(times: Sequence[LinkTimes]) -> LinkTimes:
    """By size, the times of the quickest."""
    best = {
        size: min(times, key=lambda t, size=size: t.issue[size] + t.travel[size])
        for size in times[0].issue
    }
    return LinkTimes(
        {size: of.issue[size] for size, of in best.items()},
        {size: of.travel[size] for size, of in best.items()},
    )


def measure(setup: Setup) -> Found:
    """Run both processes and wait for them."""
    told = msgspec.json.encode(setup).decode()
    lines = launch("benchmarks.prediction", told, setup.link.prefixes, timeout=900.0)
    return msgspec.json.decode(lines[-1], type=Found)


def report(link: str, programs: Mapping[str, Program], found: Found) -> None:
    """A line per case, and the summary."""
    describe(link, found)
    predicted: dict[str, float] = {}
    measured = {name: min(taken) for name, taken in found.seconds.items()}
    took, boxes = 0.0, 0
    for case in CASES:
        plan = programs[case.name].plan
        began = time.process_time()
        line = simulate(plan, found.profile)
        took += time.process_time() - began
        boxes += sum(len(mine.instructions) for mine in plan.devices)
        predicted[case.name] = line.seconds
        taken, least = found.seconds[case.name], measured[case.name]
        halves = min(taken[::2]), min(taken[1::2])
        print(
            f"prediction {link:9} {case.name:30} predicted {line.seconds * 1e3:8.1f} ms, measured min {least * 1e3:8.1f} ms; "
            f"error {line.seconds / least - 1:+6.1%} (of the measurement: even against odd rounds {max(halves) / min(halves) - 1:.1%}, "
            f"median of rounds {median(taken) / least - 1:+.1%})"
        )
    errors = [abs(predicted[name] / measured[name] - 1) for name in measured]
    pairs = list(combinations(measured, 2))
    apart = [(a, b) for a, b in pairs if abs(measured[a] / measured[b] - 1) > 0.03]
    right = sum((predicted[a] < predicted[b]) == (measured[a] < measured[b]) for a, b in apart)
    chosen = min(predicted, key=predicted.__getitem__)
    regret = measured[chosen] / min(measured.values()) - 1
    for what, of in (("predicted", predicted), ("measured", measured)):
        print(
            f"prediction {link:9} {what}, quickest first: {', '.join(sorted(of, key=of.__getitem__))}"
        )
    print(
        f"prediction {link:9} {len(errors)} configurations: |error| median {median(errors):.1%}, worst {max(errors):.1%}; "
        f"{right} of {len(apart)} pairs that differ by more than 3% are ranked as measured; the one predicted quickest is {regret:.1%} slower than the "
        f"quickest; simulator {boxes / took:,.0f} instructions/s",
        flush=True,
    )


def describe(link: str, found: Found) -> None:
    """What the profile says, apart from chunks."""
    profile, contention = found.profile, found.profile.contention
    print(
        f"prediction {link:9} {len(profile.chunks)} chunks; foreign load {found.foreign:.2f} cores"
    )
    exchanges = {"message": profile.messages}
    exchanges |= {kind: of[RANKS] for kind, of in profile.collectives.items()}
    for kind, of in exchanges.items():
        issue, link_of = of.issue, of.link
        print(
            f"prediction {link:9} {kind:15} issued in {issue.fixed * 1e6:.0f} µs + {issue.per_byte * 1e9:.3f} ns/byte, "
            f"there after {link_of.latency * 1e6:.0f} µs + {1e9 / link_of.bandwidth:.3f} ns/byte"
        )
    if contention is not None:
        print(
            f"prediction {link:9} both at once: work at {contention.work:.2f}, traffic at {contention.traffic:.2f} of the speed alone"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="after two of warm-up")
    parser.add_argument(
        "--steps", type=int, default=1, help="training steps per round and configuration"
    )
    parser.add_argument("--links", default="loopback,1gbit", help="loopback, or a rate of tc")
    parser.add_argument("--width", type=int, default=0, help="default: the example's")
    parser.add_argument("--save", default="", help="write what was measured to SAVE-LINK.json")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("setup", nargs="?", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank >= 0:
        work(options.rank, msgspec.json.decode(options.setup, type=Setup))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(machine())
    with NamedTemporaryFile() as file:
        programs: dict[str, Program] = {}
        for name in options.links.split(","):
            try:
                with open_link(name) as link:
                    setup = make_setup(link, file.name, options)
                    if not programs:
                        programs = make_programs(setup)
                        torch.save(programs, file.name)
                    found = measure(setup)
                if options.save:
                    Path(f"{options.save}-{name}.json").write_bytes(msgspec.json.encode(found))
                report(name, programs, found)
            except PermissionError as error:
                print(f"prediction {name}: skipped: {error}")


def make_setup(link: Link, programs: str, options: argparse.Namespace) -> Setup:
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
        programs=programs,
    )


if __name__ == "__main__":
    main()

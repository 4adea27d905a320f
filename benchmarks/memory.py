"""Memory of pipeline × sharded data parallelism: Piper against ``fully_shard`` ×
``torch.distributed.pipelining``.

Four processes, two stages × two replicas, the example transformer (each block a bucket, on both
sides), AdamW, one thread each, no recomputation on either side. The same three figures for torch's
``DistributedDataParallel`` and ``fully_shard`` without and with resharding after the forward, and
for Piper's levels of sharding:

``peak``      the most bytes alive in one process during the third step, under 1F1B. Measured alike on both sides: storages alive
              after each operator (``benchmarks.live``), in a run of its own; what gloo holds and what an operator gives back
              itself are not in it. Beside it, as a control, the growth of the resident set (VmHWM) in a run without counting.
``largest``   the largest microbatch that fits into what torch needs without resharding for one of ``--rows`` rows; Piper's is
              found by planned bytes and confirmed by a measured run.
``gradients`` the largest relative error of a gradient against one process, in float64, under every schedule: torch's in four
              processes, Piper's by ``piper.check``.

Piper gathers at most one block ahead and has one block's reduction in flight, as ``fully_shard``.
"""

import argparse
import copy
import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.pipelining.schedules as torch_schedules
from benchmarks.links import LOOPBACK, free_port
from benchmarks.live import ENVIRONMENT, Live, Resident
from benchmarks.processes import OneOf, join, launch
from benchmarks.stages import Stage
from benchmarks.support import machine
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

import piper
from piper.api.programs import model_tensors
from piper.capture import Captured, capture_with_constants
from piper.models.transformer import Block, Transformer, TransformerConfig, transformer_loss
from piper.plan.account import account, adam_bytes, gloo_frame
from piper.plan.codec import decode_plan, encode_plan
from piper.plan.model import Plan
from piper.runtime.batch import signature
from piper.runtime.optimizer import OptimizerSpec, ParamsArgument
from piper.schedules import SCHEDULES

STAGES = REPLICAS = 2
SIZE = STAGES * REPLICAS
GROUPS = [[REPLICAS * s + r for r in range(REPLICAS)] for s in range(STAGES)]
MIB = 1 << 20
VOCABULARY = 256
WARM_UP = 2

DDP, WHOLE, RESHARD = "DDP", "no reshard", "reshard"
TORCH_MODES = (DDP, WHOLE, RESHARD)
LEVELS = (0, 1, 2, 3)

LOOPED, V_SHAPE = [[0, 2], [1, 3]], [[0, 3], [1, 2]]
"""The stages of each pipeline rank, of four."""

TORCH_SCHEDULES = {
    "gpipe": (torch_schedules.ScheduleGPipe, [[0], [1]]),
    "1f1b": (torch_schedules.Schedule1F1B, [[0], [1]]),
    "looped_bfs": (torch_schedules.ScheduleLoopedBFS, LOOPED),
    "interleaved_1f1b": (torch_schedules.ScheduleInterleaved1F1B, LOOPED),
    "interleaved_zero_bubble": (torch_schedules.ScheduleInterleavedZeroBubble, LOOPED),
    "zbv": (torch_schedules.ScheduleZBVZeroBubble, V_SHAPE),
    "dualpipev": (torch_schedules.ScheduleDualPipeV, V_SHAPE),
}


class Setup(msgspec.Struct, frozen=True):
    """What the processes are told; ``figures`` of ``peak``, ``largest``, ``gradients``."""

    port: int
    figures: tuple[str, ...]
    width: int
    layers: int
    seq_len: int
    rows: int
    microbatches: int
    most: int
    modes: tuple[str, ...] = TORCH_MODES
    levels: tuple[int, ...] = LEVELS

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's parameters, about."""
        return 12 * self.width * self.width * 4


def build_model(setup: Setup, num_stages: int = STAGES) -> Transformer:
    """The whole model; every block a region of its own inside its stage."""
    torch.manual_seed(0)
    model = Transformer(
        TransformerConfig(
            vocab_size=VOCABULARY,
            context=setup.seq_len,
            width=setup.width,
            num_layers=setup.layers,
            num_heads=max(1, setup.width // 64),
            num_stages=num_stages,
        )
    )
    for index, block in enumerate(model.blocks):
        piper.annotate_module(block, "LAYER", index)
    return model


def build_optimizer(parameters: ParamsArgument) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


Tensors = tuple[torch.Tensor, torch.Tensor]


def batch_of(setup: Setup, rows: int) -> Tensors:
    """A global batch whose microbatches have *rows* rows."""
    generator = torch.Generator().manual_seed(rows)
    shape = (REPLICAS * setup.microbatches * rows, setup.seq_len + 1)
    ids = torch.randint(0, VOCABULARY, shape, generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class Peak(msgspec.Struct, frozen=True):
    """The most bytes of any process: alive, resident, and planned (0: nothing was planned)."""

    live: int
    resident: int
    planned: int = 0


Step = Callable[[], object]
Start = Callable[[Live | None], Step]
"""Makes the state of one process, seen by a meter if given; the function that it returns trains one
step.
"""


# --- torch --------------------------------------------------------------------------------------


class TorchSide:
    """One process of torch's."""

    def __init__(self, rank: int, setup: Setup, mesh: DeviceMesh) -> None:
        self.setup, self.mesh = setup, mesh
        self.place, self.replica = divmod(rank, REPLICAS)

    def stages(
        self, model: Transformer, owned: Sequence[Sequence[int]], mode: str, live: Live | None
    ) -> list[tuple[Stage, torch.nn.Module, int]]:
        """The stages of *model* that are here, each also as the pipeline sees it, and its
        number.
        """
        count = sum(map(len, owned))
        found: list[tuple[Stage, torch.nn.Module, int]] = []
        for number in owned[self.place]:
            stage = Stage(copy.deepcopy(model), number, count)
            for block in stage.model.blocks:
                block.__dict__.pop("forward", None)  # without the annotation of Piper's region
            for parameter in stage.parameters() if live else ():
                live.show(parameter)
            found.append((stage, self._parallel(stage, mode), number))
        return found

    def _parallel(self, stage: Stage, mode: str) -> torch.nn.Module:
        group = self.mesh["dp"]
        if mode == DDP:
            return DistributedDataParallel(
                stage, process_group=group.get_group(), gradient_as_bucket_view=True
            )
        for block in stage.model.blocks:
            assert isinstance(block, Block)
            fully_shard(block, mesh=group, reshard_after_forward=mode == RESHARD)
        fully_shard(stage, mesh=group, reshard_after_forward=mode == RESHARD)
        return stage

    def run(
        self,
        schedule: str,
        stages: Sequence[tuple[Stage, torch.nn.Module, int]],
        batch: Tensors,
    ) -> Step:
        """Forward and backward of all microbatches of this replica's share of *batch*."""
        cls, owned = TORCH_SCHEDULES[schedule]
        count = sum(map(len, owned))
        group = self.mesh["pp"].get_group()
        device = torch.device("cpu")
        pipes = [PipelineStage(m, n, count, device, group=group) for _, m, n in stages]
        single = count == STAGES
        made = cls(pipes[0] if single else pipes, self.setup.microbatches, loss_fn=transformer_loss)
        inputs, targets = (part.chunk(REPLICAS)[self.replica] for part in batch)
        first, last = 0 in owned[self.place], count - 1 in owned[self.place]

        def step() -> None:
            given = (inputs,) if first else ()
            wanted = {"target": targets, "losses": []} if last else {}
            made.step(*given, return_outputs=False, **wanted)

        return step

    def start(self, model: Transformer, mode: str, batch: Tensors) -> Start:
        """Training under 1F1B."""

        def begin(live: Live | None) -> Step:
            with live or nullcontext():
                owned = TORCH_SCHEDULES["1f1b"][1]
                stages = self.stages(model, owned, mode, live)
                optimizer = build_optimizer([p for s, _, _ in stages for p in s.parameters()])
                run = self.run("1f1b", stages, batch)

            def step() -> None:
                run()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

            return step

        return begin

    def gradient_error(self, model: Transformer, schedule: str, mode: str, batch: Tensors) -> str:
        """The largest relative error of a gradient here, and how many there are none of."""
        reference = copy.deepcopy(model)
        transformer_loss(reference(batch[0]), batch[1]).backward()
        wanted = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
        stages = self.stages(model, TORCH_SCHEDULES[schedule][1], mode, None)
        self.run(schedule, stages, batch)()
        largest = max(gradient.norm().item() for gradient in wanted.values())
        worst, missing, count = 0.0, 0, 0
        for stage, _, _ in stages:
            for name, parameter in stage.named_parameters():
                expected, found = wanted[stage.names[name]], parameter.grad
                count += 1
                if found is None:
                    missing += 1
                    continue
                whole = found.full_tensor() if hasattr(found, "full_tensor") else found
                size = max(expected.norm().item(), 1e-6 * largest)
                worst = max(worst, (whole - expected).norm().item() / size)
        totals = torch.tensor([missing, count], dtype=torch.float64)
        dist.all_reduce(totals, group=self.mesh["pp"].get_group())
        error = torch.tensor(worst, dtype=torch.float64)
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
        lost = f", {totals[0]:.0f} of {totals[1]:.0f} missing" if totals[0] else ""
        return f"{error.item():.1e}{lost}"


# --- Piper --------------------------------------------------------------------------------------


class PiperSide:
    """One process of Piper's. Rank 0 plans for all."""

    def __init__(self, rank: int, setup: Setup, store: Store) -> None:
        self.rank, self.setup, self.store = rank, setup, store
        self._captures: dict[bool, Captured] = {}
        self._started = 0

    def plan(self, model: Transformer, level: int, rows: int) -> Plan:
        """The plan, on rank 0."""
        dag = self._captured(model, rows).dag
        dag = replace(dag, batch_size=REPLICAS * self.setup.microbatches * rows)
        strategy = piper.strategies.pipeline("1f1b", GROUPS, self.setup.microbatches, zero=level)
        block = self.setup.block_bytes
        made = piper.plan(piper.apply(dag, strategy), gather_bytes=block, reduce_bytes=block)
        piper.verify(made)
        return made

    def _captured(self, model: Transformer, rows: int) -> Captured:
        """What was captured for any number of rows but one does not hold for one."""
        single = rows == 1
        if single not in self._captures:
            batch = batch_of(self.setup, self.setup.rows)
            size = 1 if single else None
            self._captures[single] = capture_with_constants(
                model, transformer_loss, batch, batch_size=size
            )
        return self._captures[single]

    def planned(self, made: Plan) -> int:
        """The most bytes of any device."""
        return max(m.peak for m in account(made, adam_bytes, frame_bytes=gloo_frame))

    def start(self, model: Transformer, level: int, batch: Tensors, rows: int) -> tuple[Start, int]:
        """Training under 1F1B, and the bytes that were planned for it."""
        told: list[object] = [None]
        if self.rank == 0:
            made = self.plan(model, level, rows)
            constants = dict(self._captured(model, rows).constants)
            told = [(dict(encode_plan(made)), constants, self.planned(made))]
        dist.broadcast_object_list(told)
        files, constants, planned = told[0]
        plan = decode_plan(files)

        def begin(live: Live | None) -> Step:
            self._started += 1
            store = PrefixStore(f"memory{self._started}", self.store)
            backend = OneOf(self.rank, SIZE, store, LOOPBACK.addresses[0])
            with live or nullcontext():
                backend.start(SIZE)
                backend.load("train", plan, signature(batch), constants)
                backend.initialise("train", model_tensors(model), OptimizerSpec(build_optimizer))
            return lambda: backend.run("train", [batch], first_step=0)

        return begin, planned


# --- what is measured ---------------------------------------------------------------------------


def measure(start: Start, planned: int = 0, *, control: bool = True) -> Peak:
    """Run a few steps counting, and as many again that do not count; the most of any process."""
    live = Live()
    step = start(live)
    with live:
        for _ in range(WARM_UP):
            step()
    alive = live.measure(step)
    del step, live
    gc.collect()
    resident = 0
    if control:
        before = Resident()
        step = start(None)
        for _ in range(WARM_UP):
            step()
        resident = before.measure(step)
        del step
        gc.collect()
    found = torch.tensor([alive, resident], dtype=torch.int64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return Peak(int(found[0]), int(found[1]), planned)


def largest(fits: Callable[[int], bool], guess: int, most: int) -> int:
    """The largest number up to *most* that fits, if all smaller ones do; found from *guess* on,
    step by step. 0 if none does.
    """
    rows = min(max(guess, 1), most)
    if fits(rows):
        while rows < most and fits(rows + 1):
            rows += 1
        return rows
    while rows > 0 and not fits(rows):
        rows -= 1
    return rows


class Search:
    """Largest microbatches of both sides within a budget."""

    def __init__(
        self, setup: Setup, model: Transformer, torch_side: TorchSide, piper_side: PiperSide
    ) -> None:
        self.setup, self.model = setup, model
        self.torch_side, self.piper_side = torch_side, piper_side
        self._known: dict[tuple[object, int], int] = {}

    def of(self, variant: str | int, rows: int) -> int:
        """Bytes alive at the peak, of a mode of torch's or a level of Piper's."""
        if (variant, rows) not in self._known:
            batch = batch_of(self.setup, rows)
            if isinstance(variant, str):
                start = self.torch_side.start(self.model, variant, batch)
            else:
                start, _ = self.piper_side.start(self.model, variant, batch, rows)
            self._known[variant, rows] = measure(start, control=False).live
        return self._known[variant, rows]

    def run(self, variant: str | int, budget: int) -> tuple[int, int]:
        """The largest number of rows whose measured peak is within *budget*, and that peak."""
        rows = largest(
            lambda n: self.of(variant, n) <= budget, self._guess(variant, budget), self.setup.most
        )
        return rows, self.of(variant, rows) if rows else 0

    def _guess(self, variant: str | int, budget: int) -> int:
        """By planned bytes, or along the line through two measured points."""
        if isinstance(variant, int):
            return self._planned(variant, budget)
        low, high = self.setup.rows, 2 * self.setup.rows
        one, two = self.of(variant, low), self.of(variant, high)
        return low + (budget - one) * (high - low) // max(two - one, 1)

    def _planned(self, level: int, budget: int) -> int:
        told = torch.zeros((), dtype=torch.int64)
        if dist.get_rank() == 0:
            side, low, high = self.piper_side, 1, self.setup.most + 1
            while high - low > 1:
                middle = (low + high) // 2
                fits = side.planned(side.plan(self.model, level, middle)) <= budget
                low, high = (middle, high) if fits else (low, middle)
            told.fill_(low)
        dist.broadcast(told, 0)
        return int(told)


def work(rank: int, setup: Setup) -> None:
    """One process; rank 0 prints the lines."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = join(rank, SIZE, LOOPBACK, setup.port)
    mesh = init_device_mesh("cpu", (STAGES, REPLICAS), mesh_dim_names=("pp", "dp"))
    torch_side, piper_side = TorchSide(rank, setup, mesh), PiperSide(rank, setup, store)
    lines: Iterator[str]
    for figure in setup.figures:
        if figure == "gradients":
            lines = gradient_lines(setup, torch_side)
        else:
            search = Search(setup, build_model(setup), torch_side, piper_side)
            lines = peak_lines(search) if figure == "peak" else largest_lines(search)
        for line in lines:
            if rank == 0:
                print(f"memory {line}", file=sys.stderr, flush=True)
    dist.barrier()
    # Torch's own destructors of process groups may wait for each other.
    sys.stderr.flush()
    os._exit(0)


def peak_lines(search: Search) -> Iterator[str]:
    setup, model = search.setup, search.model
    batch = batch_of(setup, setup.rows)
    for mode in setup.modes:
        found = measure(search.torch_side.start(model, mode, batch))
        yield f"peak      torch {mode:11} live {_mib(found.live)}, resident {_mib(found.resident)}"
    for level in setup.levels:
        start, planned = search.piper_side.start(model, level, batch, setup.rows)
        found = measure(start, planned)
        yield (
            f"peak      piper ZeRO-{level}      live {_mib(found.live)}, resident {_mib(found.resident)}, "
            f"planned {_mib(planned)}"
        )


def largest_lines(search: Search) -> Iterator[str]:
    setup = search.setup
    budget = search.of(WHOLE, setup.rows)
    found: dict[str | int, int] = {}
    for variant in (WHOLE, RESHARD, *setup.levels):
        found[variant], peak = search.run(variant, budget)
        name = f"torch {variant}" if isinstance(variant, str) else f"piper ZeRO-{variant}"
        capped = " (as many as were tried)" if found[variant] == setup.most else ""
        yield (
            f"largest   {name:17} {found[variant]:3} rows in {_mib(budget)}{capped}; "
            f"measured {_mib(peak)}"
        )
    best = max(found[level] for level in setup.levels)
    yield (
        f"largest   piper / torch: {best / max(found[WHOLE], 1):.2f} without resharding (goal 3), "
        f"{best / max(found[RESHARD], 1):.2f} with (goal 1)"
    )


def gradient_lines(setup: Setup, side: TorchSide) -> Iterator[str]:
    small = msgspec.structs.replace(setup, width=64, layers=8, seq_len=16)
    batch = batch_of(small, 2)
    for schedule, (_, owned) in TORCH_SCHEDULES.items():
        model = build_model(small, sum(map(len, owned))).double()
        for mode in setup.modes:
            error = side.gradient_error(model, schedule, mode, batch)
            yield f"gradients torch {schedule:23} {mode:11} {error}"
    for name, ours in SCHEDULES.items():
        virtual = 2 if ours.placement.virtual_stages else 1
        for level in setup.levels:
            if dist.get_rank() == 0:
                yield f"gradients piper {name:23} ZeRO-{level}      {_checked(small, name, virtual, level, batch)}"


def _checked(setup: Setup, schedule: str, virtual: int, level: int, batch: Tensors) -> str:
    strategy = piper.strategies.pipeline(
        schedule, GROUPS, setup.microbatches, num_virtual_stages=virtual, zero=level
    )
    report = piper.check(
        build_model(setup, STAGES * virtual),
        transformer_loss,
        strategy,
        batch,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )
    return f"{report.max_grad_error:.1e}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:7.1f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of Piper against fully_shard.")
    parser.add_argument("--figures", default="peak,largest,gradients")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=32)
    parser.add_argument("--rows", type=int, default=2, help="of torch's microbatch in the budget")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--most", type=int, default=64, help="rows that are tried")
    parser.add_argument("--modes", default=",".join(TORCH_MODES), help="of torch")
    parser.add_argument("--levels", default="0,1,2,3", help="of Piper's sharding")
    parser.add_argument("--quick", action="store_true", help="a small model, for development")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("setup", nargs="?", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank >= 0:
        work(options.rank, msgspec.json.decode(options.setup, type=Setup))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(machine())
    setup = Setup(
        port=free_port(),
        figures=tuple(options.figures.split(",")),
        width=256 if options.quick else options.width,
        layers=4 if options.quick else options.layers,
        seq_len=options.seq_len,
        rows=options.rows,
        microbatches=4 if options.quick else options.microbatches,
        most=options.most,
        modes=tuple(mode for mode in options.modes.split(",") if mode),
        levels=tuple(int(level) for level in options.levels.split(",") if level),
    )
    stage = setup.layers // STAGES * setup.block_bytes
    print(
        f"memory {STAGES} stages × {REPLICAS} replicas, {setup.layers} blocks of width {setup.width} ({stage / MIB:.1f} MiB of "
        f"parameters per stage), {setup.microbatches} microbatches of {setup.rows}×{setup.seq_len} tokens, AdamW, float32, "
        "no recomputation",
        flush=True,
    )
    told = msgspec.json.encode(setup).decode()
    launch("benchmarks.memory", told, [()] * SIZE, timeout=1200.0, environment=ENVIRONMENT)


if __name__ == "__main__":
    main()

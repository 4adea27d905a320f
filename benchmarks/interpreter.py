"""The cost of the runtime itself: microseconds per instruction, and chunk code against eager
PyTorch.

1. Every kind of instruction with tensors of 8 × 8, one device and two devices in one process: the quickest of many executions of
   each closure, averaged over the instructions of its kind. Compute contains its matrix products, of which one is
   shown bare. The whole step gives the loop around the closures too. Goal: at most 10 µs per instruction.
2. One transformer layer, forward and backward and an SGD step: a plan on one device against autograd, alternating.
3. The same layer with every instruction recorded against the same without, beside a second program without, which shows what this comparison can tell.
   Goal: at most 2% slower.
"""

import argparse
import threading
import time
from collections.abc import Callable, Mapping
from statistics import median

import torch
from benchmarks.support import compared, machine

from piper import apply, plan, schedules, strategies
from piper.api.programs import model_tensors
from piper.capture import annotate, capture
from piper.devices.cpu import CpuDevice
from piper.devices.memory import Hub
from piper.directives.split import Split
from piper.models.transformer import Block, TransformerConfig
from piper.ops.base import Instruction
from piper.plan.model import Plan
from piper.runtime.context import Context
from piper.runtime.interpreter import Program
from piper.runtime.optimizer import OptimizerSpec
from piper.runtime.state import ModelState

STEPS = 300
MICROBATCHES = 8


class Chain(torch.nn.Module):
    """A product of small matrices, one region each."""

    def __init__(self, num_stages: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.eye(8) for _ in range(num_stages))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage, weight in enumerate(self.weights):
            with annotate("PP", stage):
                x = x @ weight
        return x


def mean_product(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that costs next to nothing."""
    return (outputs * targets).mean()


def bind(
    planned: Plan,
    model: torch.nn.Module,
    batch: tuple[object, object],
    *,
    recorded: bool = False,
) -> list[Program]:
    """One program per device, connected in memory, with plain SGD."""
    hub = Hub()
    programs = []
    for mine in planned.devices:
        device = CpuDevice()
        names = {info.name for info in mine.slots}
        tensors = {n: t for n, t in model_tensors(model).items() if n in names}
        state = ModelState(
            tensors,
            {},
            planned.dag.parameters,
            OptimizerSpec(lambda parameters: torch.optim.SGD(parameters, lr=1e-6)),
            device.torch_device,
        )
        context = Context(planned, device.torch_device)
        context.leaves = {"inputs": batch[0], "targets": batch[1]}
        communicators = {
            info.name: hub.communicator(info.name, info.members, mine.device)
            for info in planned.communicators
            if mine.device in info.members
        }
        programs.append(
            Program(
                plan=planned,
                mine=mine,
                device=device,
                state=state,
                context=context,
                communicators=communicators,
                constants={},
                recorded=recorded,
            )
        )
    return programs


def in_threads(programs: list[Program], work: Callable[[Program], None]) -> None:
    """``work(program)`` on a thread per device."""
    threads = [threading.Thread(target=work, args=(program,)) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def quickest(program: Program, steps: int) -> list[tuple[Instruction, float]]:
    """The quickest execution of each closure in *steps* steps, in microseconds."""
    entries = program._steps  # noqa: SLF001 (what is measured)
    best = [float("inf")] * len(entries)
    clock = time.perf_counter_ns
    timer = min(_difference(clock) for _ in range(1000))
    with torch.no_grad():
        for _ in range(steps):
            for i, entry in enumerate(entries):
                run = entry.run
                began = clock()
                run()
                best[i] = min(best[i], clock() - began)
            program._device.synchronize()  # noqa: SLF001
    return [(e.instruction, (b - timer) / 1e3) for e, b in zip(entries, best, strict=True)]


def _difference(clock: Callable[[], int]) -> int:
    began = clock()
    return clock() - began


def instruction_costs() -> None:
    """Print the first table."""
    torch.set_num_threads(1)
    batch = torch.ones(2 * MICROBATCHES, 8), torch.ones(2 * MICROBATCHES, 8)
    model = Chain(2)
    dag = capture(model, mean_product, batch)
    alone = plan(
        apply(
            dag,
            [
                Split({}, num_microbatches=MICROBATCHES),
                *schedules.gpipe(num_stages=2, num_microbatches=MICROBATCHES),
            ],
        )
    )
    (program,) = bind(alone, model, batch)
    _print_kinds("one device", quickest(program, STEPS))
    whole = min(_timed(program.run) for _ in range(STEPS))
    count = len(program._steps)  # noqa: SLF001
    print(
        f"interpreter one device   whole step {whole * 1e6 / count:6.2f} µs per instruction ({count})"
    )
    _print_bare(batch[0][:2])

    pair = plan(apply(dag, strategies.pipeline("1f1b", [[0], [1]], MICROBATCHES)))
    programs = bind(pair, model, batch)
    measured: list[tuple[Instruction, float]] = []
    in_threads(programs, lambda program: measured.extend(quickest(program, STEPS)))
    _print_kinds("two devices", measured)


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _print_kinds(where: str, measured: list[tuple[Instruction, float]]) -> None:
    by_kind: dict[str, list[float]] = {}
    for instruction, microseconds in measured:
        by_kind.setdefault(instruction.op, []).append(microseconds)
    for kind, values in sorted(by_kind.items()):
        mean = sum(values) / len(values)
        note = "" if kind in _PURE else ", its torch operations included"
        print(f"interpreter {where:12} {kind:15} {mean:6.2f} µs ({len(values)} per step{note})")
    everything = sum(microseconds for _, microseconds in measured) / len(measured)
    print(
        f"interpreter {where:12} mean of all     {everything:6.2f} µs per instruction (goal: at most 10)"
    )


_PURE = frozenset({"free", "wait", "post_receive", "send"})
"""Kinds that do no arithmetic."""


def _print_bare(x: torch.Tensor) -> None:
    """What the products cost by themselves."""
    weight = torch.eye(8)
    mm = torch.ops.aten.mm.default._op  # noqa: SLF001 (what chunk code calls)
    with torch.no_grad():
        best = min(_timed(lambda: mm(x, weight)) for _ in range(2000))
    print(f"interpreter one device   bare 2×8 by 8×8 product {best * 1e6:6.2f} µs")


class Layer(torch.nn.Module):
    """One transformer layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = Block(TransformerConfig(width=width, num_heads=width // 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.block(x)
        return out


def layer_against_eager(width: int, rows: int, length: int, rounds: int) -> None:
    """Print one line of the second comparison."""
    torch.manual_seed(0)
    model = Layer(width)
    batch = torch.randn(rows, length, width), torch.randn(rows, length, width)
    (program,) = bind(plan(apply(capture(model, mean_product, batch), [])), model, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def eager() -> None:
        mean_product(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    variants: Mapping[str, Callable[[], None]] = {"piper": program.run, "eager": eager}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 2):
        for name, run in variants.items():
            took = _timed(run)
            if turn >= 2:
                seconds[name].append(took)
    minima, middle = compared(seconds["eager"], seconds["piper"])
    print(
        f"interpreter layer {width:4} wide, {rows}×{length} tokens: piper / eager time: ratio of minima {minima:.3f}, "
        f"median of in-round ratios {middle:.3f} ({median(seconds['piper']) * 1e3:.2f} against "
        f"{median(seconds['eager']) * 1e3:.2f} ms)"
    )


def recording_cost(width: int, rows: int, length: int, rounds: int) -> None:
    """Print one line of the third comparison: 8 microbatches."""
    torch.manual_seed(0)
    model = Layer(width)
    size = rows * MICROBATCHES
    batch = torch.randn(size, length, width), torch.randn(size, length, width)
    dag = apply(capture(model, mean_product, batch), [Split({}, num_microbatches=MICROBATCHES)])
    planned = plan(dag)
    (plain,), (control,) = bind(planned, model, batch), bind(planned, model, batch)
    (recorded,) = bind(planned, model, batch, recorded=True)

    def record() -> None:
        assert recorded.recorder is not None
        recorded.recorder.start()
        recorded.run()
        recorded.recorder.spans()

    variants: Mapping[str, Callable[[], None]] = {
        "plain": plain.run,
        "recorded": record,
        "control": control.run,
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 2):
        for name, run in variants.items():
            took = _timed(run)
            if turn >= 2:
                seconds[name].append(took)
    for name, goal in (("recorded", " (goal: at most 1.02)"), ("control", "")):
        minima, middle = compared(seconds["plain"], seconds[name])
        print(
            f"interpreter recording, layer {width:4} wide, {MICROBATCHES} microbatches of {rows}×{length} tokens: {name} / plain time: "
            f"ratio of minima {minima:.4f}, median of in-round ratios {middle:.4f}{goal}"
        )


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    torch.set_num_threads(1)
    print(machine())
    instruction_costs()
    recording_cost(128, 2, 64, rounds=100)
    recording_cost(256, 2, 64, rounds=50)
    layer_against_eager(128, 2, 64, rounds=200)
    layer_against_eager(256, 2, 64, rounds=100)
    layer_against_eager(512, 4, 128, rounds=30)


if __name__ == "__main__":
    main()

"""``piper plan``: what every device will do, as a picture and a table."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from piper.api.memory import frame_bytes, optimizer_bytes
from piper.api.programs import Program, Programs, make_clip, model_tensors
from piper.backends.measured import measure
from piper.directives.order import left_out
from piper.ids import DeviceId, Stream
from piper.ir.dag import Dag, Pass, Role, Tags
from piper.models.transformer import Transformer, transformer_loss
from piper.ops.base import Instruction
from piper.ops.compute import Compute
from piper.ops.update import OptimizerStep
from piper.plan.account import account
from piper.plan.codec import save_plan
from piper.plan.memory import Category, DeviceMemory
from piper.plan.model import DevicePlan, Plan
from piper.plan.text import overlap_text, plan_text
from piper.planner.estimate import Rates, node_seconds
from piper.runtime.batch import Batch
from piper.runtime.optimizer import OptimizerSpec
from piper.simulate.playback import Durations, Track, play
from piper.sizes import size_text, to_bytes
from piper.training.config import RunConfig, load_config
from piper.training.model import make_model, make_skeleton
from piper.visualize.terminal import Box, DeviceRow, draw

FOLD_ABOVE = 32
"""Of plans for more devices, those that do the same are planned, simulated and shown once."""

SHOWN_OVERLAPS = 8
"""Overlap groups that are listed."""

UNITS = {
    Pass.FORWARD: 1.0,
    Pass.BACKWARD: 2.0,
    Pass.BACKWARD_INPUT: 1.0,
    Pass.BACKWARD_WEIGHT: 1.0,
    Pass.UPDATE: 0.0,
}
"""Durations of chunks by pass: what schedules are usually drawn with."""


def plan(
    path: Path,
    console: Console,
    *,
    estimated: bool,
    text: bool,
    save: Path | None,
    measured: bool = False,
    memory_budget: str | None = None,
) -> None:
    """Print the plan of the configuration at *path*; write its files into *save*. *memory_budget*
    takes the place of the configuration's.

    With *estimated*, chunks and messages are as long as the planner takes them to be; else see
    :data:`UNITS`. With *measured*, two steps are run in this process to measure their memory.
    Raises what :func:`piper.compile` raises before it starts workers.
    """
    config = load_config(path)
    if memory_budget is not None:
        to_bytes(memory_budget, "--memory-budget")
        config = replace(config, memory=replace(config.memory, budget=memory_budget))
    model = make_model(config) if measured else make_skeleton(config)
    # Files and instructions are for all devices.
    fold = not (measured or text or save is not None)
    program = make_program(config, model, measured=measured, fold=fold)
    planned = program.plan
    if save is not None:
        save_plan(planned, save)
    if text:
        console.out(plan_text(planned), highlight=False, end="")
        return
    durations = estimated_durations(planned) if estimated else unit_durations(planned)
    timelines = play(planned, durations)
    rows = list(boxes(planned, timelines))
    console.print(_headline(planned))
    say_folded(planned, console)
    console.print(draw(rows, console.width))
    _say_left_out(planned.dag, config, console)
    console.print(_table(planned, rows))
    _show_overlaps(planned, console)
    found = measure_memory(config, model, program) if measured else None
    memory = plan_memory(config, planned, measured=measured)
    _show_memory(planned, memory, found, console)
    if save is not None:
        console.print(Text(f"plan written to {save}"), soft_wrap=True)


def _say_left_out(dag: Dag, config: RunConfig, console: Console) -> None:
    """Say which chunks no order speaks of, where it does of others like them."""
    if chunks := left_out(dag, config.strategy.directives()):
        shown = ", ".join(chunk.label for chunk in chunks[:4]) + (" …" if len(chunks) > 4 else "")
        text = (
            f"no Order names {_count(len(chunks), 'chunk')} of regions that others order: {shown}"
        )
        console.print(Text(text), soft_wrap=True)


def _show_overlaps(plan: Plan, console: Console) -> None:
    """How the planner interleaves what may overlap, at most :data:`SHOWN_OVERLAPS` groups."""
    lines = overlap_text(plan).splitlines()
    if not lines:
        return
    console.print(Text("overlap groups, and in brackets what is communicated meanwhile"))
    for line in lines[:SHOWN_OVERLAPS]:
        console.print(Text(f"  {line}"), soft_wrap=True)
    if len(lines) > SHOWN_OVERLAPS:
        console.print(Text(f"  … and {len(lines) - SHOWN_OVERLAPS} more; --text shows all"))
    console.print()


def _show_memory(
    plan: Plan,
    planned: Sequence[DeviceMemory],
    measured: Sequence[DeviceMemory] | None,
    console: Console,
) -> None:
    """The table of memory; where each device's peak is stands below if there is no room beside."""
    table = _memory_table(plan, planned, measured)
    room = console.options.update(max_width=10_000)
    if console.measure(table, options=room).maximum <= console.width:
        console.print(table)
        return
    console.print(_memory_table(plan, planned, measured, places=False))
    for alike in plan.represented():
        mine = plan.devices[alike[0]]
        place = _place(plan, mine.instructions[planned[mine.device].position])
        console.print(Text(f"device {device_name(alike)} is at its peak after {place}"))


def say_folded(plan: Plan, console: Console) -> None:
    """Say so where one device stands for several."""
    if plan.roles:
        text = f"folded: {plan.num_devices} devices have {len(plan.roles)} roles; one device of each is shown, the others do the same"
        console.print(Text(text), soft_wrap=True)


def device_name(alike: Sequence[DeviceId]) -> str:
    """The first of devices that do the same, and how many others there are: ``0 (+7)``."""
    return f"{alike[0]}" + (f" (+{len(alike) - 1})" if len(alike) > 1 else "")


def make_program(
    config: RunConfig, model: Transformer, *, measured: bool = False, fold: bool = False
) -> Program:
    """The verified plan of a training step of *model*. Needs neither weights nor data. *fold*: the
    plan is only looked at; one for more than :data:`FOLD_ABOVE` devices may be folded.
    """
    directives = config.strategy.directives()
    clip = make_clip(config.train.max_grad_norm, 2.0)
    limits = dataclasses.replace(
        config.memory.limits(),
        optimizer_bytes=optimizer_bytes(OptimizerSpec(config.optimizer.build)),
        frame_bytes=_frame_bytes(config, measured=measured),
    )
    programs = Programs(
        model,
        transformer_loss,
        directives,
        clip=clip,
        precision=config.train.policy(),
        limits=limits,
        fold_above=FOLD_ABOVE if fold else None,
    )
    return programs.training(_batch(config))


def plan_memory(config: RunConfig, plan: Plan, *, measured: bool) -> tuple[DeviceMemory, ...]:
    """What each device needs; if *measured*, as threads of this process, else on the
    configuration's backend.
    """
    frame_bytes = _frame_bytes(config, measured=measured)
    return account(
        plan, optimizer_bytes(OptimizerSpec(config.optimizer.build)), frame_bytes=frame_bytes
    )


def _frame_bytes(config: RunConfig, *, measured: bool) -> Callable[[int], int]:
    return frame_bytes("inprocess" if measured else config.train.backend)


def measure_memory(
    config: RunConfig, model: Transformer, program: Program
) -> tuple[DeviceMemory, ...]:
    """What each device uses in a step of *program*, which is made for *model*."""
    return measure(
        program.plan,
        _batch(config),
        model_tensors(model),
        OptimizerSpec(config.optimizer.build),
        program.constants,
    )


def _batch(config: RunConfig) -> Batch:
    """A batch of the right sizes."""
    shape = (config.train.batch_size, config.train.seq_len)
    return torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)


def unit_durations(plan: Plan) -> Durations:
    """:data:`UNITS` for chunks, nothing for all else."""
    nodes = plan.dag.nodes

    def duration(_device: DeviceId, instruction: Instruction) -> float:
        if not isinstance(instruction, Compute):
            return 0.0
        return UNITS[nodes[instruction.node].pass_]

    return duration


def estimated_durations(plan: Plan) -> Durations:
    """Milliseconds of chunks, updates and communication, as the planner estimates them."""
    seconds = node_seconds(plan.dag, plan.bindings, Rates())

    def duration(_device: DeviceId, instruction: Instruction) -> float:
        if isinstance(instruction, (Compute, OptimizerStep)) or instruction.rendezvous():
            return 1000 * seconds[instruction.node]
        return 0.0

    return duration


def boxes(plan: Plan, timelines: Sequence[Track]) -> Iterator[DeviceRow]:
    """A row for each stream on which a device computes, a box per chunk and update that takes
    time.
    """
    for mine, timeline in zip(plan.devices, timelines, strict=True):
        by_stream: dict[Stream, list[Box]] = {}
        for played in timeline:
            instruction = played.instruction
            if not isinstance(instruction, (Compute, OptimizerStep)):
                continue
            row = by_stream.setdefault(instruction.stream, [])
            node = plan.dag.nodes[instruction.node]
            length = played.end - played.start
            if length > 0:
                row.append(
                    Box(
                        start=played.start,
                        duration=length,
                        pass_=node.pass_.value,
                        microbatch=plan.dag.microbatch(node.tags),
                        stage=_stage(plan.dag, node.tags),
                    )
                )
        for row in by_stream.values():
            yield DeviceRow(mine.device, tuple(row))


def _stage(dag: Dag, tags: Tags) -> int:
    """The index of the outermost region; 0 for a node outside of all."""
    return next((index for _, index in dag.region(tags)), 0)


def _headline(plan: Plan) -> Text:
    sizes = {
        "replica": plan.num_replicas,
        "microbatch": plan.num_microbatches,
        "sequence": plan.microbatch_size,
    }
    precision = "" if plan.dag.precision is None else f"; {plan.dag.precision}"
    scaled = ", scaled loss" if plan.dag.loss_scaled else ""
    return Text(
        f"one step on {_count(plan.num_devices, 'device')}: "
        + " × ".join(_count(n, what) for what, n in sizes.items())
        + precision
        + scaled
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "es" if what.endswith("ch") else "s")


_TRAFFIC = ("sends", "receives", "collectives")


@dataclass(frozen=True, slots=True)
class _Traffic:
    """Messages or collectives of one device: how many, and their bytes."""

    count: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.count}, {size_text(self.nbytes)}" if self.count else "none"


def _table(plan: Plan, rows: Sequence[DeviceRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("device", justify="right", no_wrap=True)
    traffic = {mine.device: _traffic(mine) for mine in plan.devices}
    kinds = [i for i in range(len(_TRAFFIC)) if any(t[i].count for t in traffic.values())]
    shown = [_TRAFFIC[i] for i in kinds]
    for name in ("regions", "chunks", "params", *shown, "idle"):
        table.add_column(name, justify="left" if name == "regions" else "right", no_wrap=True)
    every = [b for row in rows for b in row.boxes]
    begin, end = min(b.start for b in every), max(b.end for b in every)
    for alike in plan.represented():
        mine = plan.devices[alike[0]]
        busy = sum(b.duration for row in rows if row.device == mine.device for b in row.boxes)
        chunks = [i for i in mine.instructions if isinstance(i, Compute)]
        table.add_row(
            device_name(alike),
            _regions(plan.dag, chunks),
            str(len(chunks)),
            size_text(_parameter_bytes(mine)),
            *(str(traffic[mine.device][i]) for i in kinds),
            f"{1 - busy / (end - begin):.1%}",
        )
    return table


def _regions(dag: Dag, chunks: Sequence[Compute]) -> str:
    """The outermost regions that a device computes, such as ``PP=0,3``; ``-`` outside of all."""
    found: dict[str, set[int]] = {}
    for chunk in chunks:
        tags = dag.region(dag.nodes[chunk.node].tags)
        name, index = tags[0] if tags else ("", 0)
        found.setdefault(name, set()).add(index)
    return " ".join(
        f"{name}={','.join(map(str, sorted(indices)))}" if name else "-"
        for name, indices in sorted(found.items())
    )


def _parameter_bytes(mine: DevicePlan) -> int:
    held = {slot.name: slot.message.nbytes for slot in mine.slots if slot.role is Role.PARAMETER}
    return sum(held.values())


def _traffic(mine: DevicePlan) -> tuple[_Traffic, _Traffic, _Traffic]:
    """As :data:`_TRAFFIC`."""
    sizes: dict[str, list[int]] = {"send": [], "receive": [], "collective": []}
    for instruction in mine.instructions:
        if (meeting := instruction.rendezvous()) is not None:
            kind = meeting.role if meeting.role in sizes else "collective"
            sizes[kind].append(sum(message.nbytes for message in meeting.messages))
    sends, receives, collectives = (_Traffic(len(s), sum(s)) for s in sizes.values())
    return sends, receives, collectives


_HEADINGS = {
    Category.COMMUNICATION: "in flight",
    Category.PARAMETERS: "params",
    Category.GRADIENTS: "grads",
}
"""Short names of categories, so that a table fits into 80 columns."""


def _memory_table(
    plan: Plan,
    planned: Sequence[DeviceMemory],
    measured: Sequence[DeviceMemory] | None,
    *,
    places: bool = True,
) -> Table:
    """Each device's peak, what it consists of, and where it is if *places*; columns that say next to
    nothing are left out. Host memory, where some is used, has a peak of its own.
    """
    represented = plan.represented()
    planned = [planned[alike[0]] for alike in represented]
    least = max(memory.peak for memory in planned) / 1000
    on_device = [c for c in Category if c is not Category.HOST]
    columns = [c for c in on_device if any(memory.by_category[c] > least for memory in planned)]
    offloaded = any(memory.highest[Category.HOST] for memory in planned)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    names = [_HEADINGS.get(c, c.value) for c in columns]
    for name in ("device", "memory", *(() if measured is None else ("measured",)), *names):
        table.add_column(name, justify="right", no_wrap=True)
    if places:
        table.add_column("at its peak after", no_wrap=True)
    if offloaded:
        table.add_column("host memory", justify="right", no_wrap=True)
    for alike, memory in zip(represented, planned, strict=True):
        mine = plan.devices[alike[0]]
        table.add_row(
            device_name(alike),
            size_text(memory.peak),
            *(() if measured is None else (size_text(measured[mine.device].peak),)),
            *(size_text(memory.by_category[category]) for category in columns),
            *((_place(plan, mine.instructions[memory.position]),) if places else ()),
            *((size_text(memory.highest[Category.HOST]),) if offloaded else ()),
        )
    return table


def _place(plan: Plan, instruction: Instruction) -> str:
    """For people: which node an instruction belongs to."""
    node = plan.dag.nodes.get(instruction.node)
    return instruction.op if node is None else node.label

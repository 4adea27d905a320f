"""``piper simulate``: how long a step would take, and what to improve first."""

from dataclasses import dataclass, replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from piper.api.memory import frame_bytes, optimizer_bytes
from piper.cli.main import UNIT
from piper.cli.plan import device_name, make_program, say_folded
from piper.errors import ConfigError
from piper.plan.costs import Costs, UnitCosts, hardware
from piper.plan.model import Plan
from piper.plan.profile import load_profile
from piper.plan.topology import Topology
from piper.runtime.optimizer import OptimizerSpec
from piper.simulate import simulate as run
from piper.simulate.critical import shares
from piper.simulate.timeline import SECONDS, Timeline, time_text
from piper.sizes import size_text
from piper.training.config import RunConfig, load_config
from piper.training.model import make_skeleton
from piper.visualize.trace import save_trace


@dataclass(frozen=True, slots=True)
class Choice:
    """What the command line says about costs: a preset or ``unit``, or a measured profile; the
    machines, if not as many as needed.
    """

    device: str = UNIT
    profile: Path | None = None
    nodes: int | None = None
    devices_per_node: int | None = None

    def costs(self) -> Costs:
        """The costs. Raises :class:`ConfigError` for an unknown preset, an unreadable profile, or
        options that exclude each other.
        """
        sized = self.nodes is not None or self.devices_per_node is not None
        if self.profile is not None:
            if self.device != UNIT or sized:
                raise ConfigError(
                    "--profile says all about devices and links; leave out --device, --nodes and --devices-per-node"
                )
            return load_profile(self.profile)
        if self.device == UNIT:
            if sized:
                raise ConfigError("--nodes and --devices-per-node need a --device, such as H100")
            return UnitCosts()
        chosen = hardware(self.device)
        if self.devices_per_node is not None:
            chosen = replace(chosen, devices_per_node=self.devices_per_node)
        if self.nodes is None:
            return chosen
        one = chosen.topology_for(1)
        topology = Topology(self.nodes, one.devices_per_node, one.intra, one.inter, one.nics)
        return replace(chosen, topology=topology)


def simulate(
    path: Path,
    console: Console,
    choice: Choice,
    *,
    top: int = 8,
    trace: Path | None = None,
    save: Path | None = None,
) -> None:
    """Print what a step of the configuration at *path* would take; write a trace, or the timeline,
    if asked.

    Raises what :func:`piper.compile` raises before it starts workers, and what
    :func:`piper.simulate` raises.
    """
    found = simulated(load_config(path), choice.costs())
    timeline = found.timeline
    say_folded(found.plan, console)
    report(timeline, console, top=top)
    if trace is not None:
        save_trace(timeline, trace)
        text = Text(f"trace written to {trace}; open it at https://ui.perfetto.dev")
        console.print(text, soft_wrap=True)
    if save is not None:
        timeline.save(save)
        console.print(Text(f"timeline written to {save}"), soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Simulated:
    """A plan, folded if it is for many devices, and its timeline."""

    plan: Plan
    timeline: Timeline


def simulated(config: RunConfig, costs: Costs) -> Simulated:
    """What a step of *config* would do. Raises what planning and :func:`piper.simulate` raise."""
    plan = make_program(config, make_skeleton(config), fold=True).plan
    timeline = run(
        plan,
        costs,
        optimizer_bytes=optimizer_bytes(OptimizerSpec(config.optimizer.build)),
        frame_bytes=frame_bytes(config.train.backend),
    )
    return Simulated(plan, timeline)


def report(timeline: Timeline, console: Console, *, top: int) -> None:
    """The totals, a line per device, and the critical path by kind of work; times in the timeline's
    unit.
    """
    console.print(_headline(timeline))
    console.print(_devices(timeline))
    console.print(Text("critical path: what to improve first"))
    console.print(_critical(timeline, top))


def _headline(timeline: Timeline) -> Text:
    unit = timeline.unit != SECONDS
    length = time_text(timeline.seconds, timeline.unit) + (" (F: one forward)" if unit else "")
    words = [f"step {length}", f"bubble {timeline.bubble:.1%}"]
    if unit:
        return Text(f"{timeline.source.value}: {', '.join(words)}")
    words.append(f"exposed communication {time_text(timeline.exposed, timeline.unit)}")
    work = [f"{timeline.flops / 1e9:.4g} GFLOP"]
    if timeline.mfu is not None:
        work.append(f"{_share(timeline.mfu)} of the peak (MFU)")
    if timeline.hfu is not None and timeline.recomputed:
        work.append(f"{_share(timeline.hfu)} with recomputation (HFU)")
    return Text(f"{timeline.source.value}: {', '.join(words)}\n{', '.join(work)}")


def _share(share: float) -> str:
    """Per cent, with a digit that says something: tiny models use little of a device."""
    return f"{share:.1%}" if share >= 0.001 else f"{100 * share:.1g}%"


def _devices(timeline: Timeline) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("device", "computes", "bubble", "exposed", "peak memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for device in timeline.devices:
        table.add_row(
            device_name(device.stands_for),
            time_text(device.busy, timeline.unit),
            f"{device.bubble:.1%}",
            time_text(device.exposed, timeline.unit),
            size_text(device.peak),
        )
    return table


def _critical(timeline: Timeline, top: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("work")
    for name in ("time", "share", "times", "devices"):
        table.add_column(name, justify="right", no_wrap=True)
    for share in shares(timeline, top):
        table.add_row(
            share.what,
            time_text(share.seconds, timeline.unit),
            f"{share.seconds / timeline.seconds:.1%}",
            str(share.count),
            ", ".join(map(str, share.devices[:6])) + (" …" if len(share.devices) > 6 else ""),
        )
    return table

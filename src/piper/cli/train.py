"""``piper train``: a training run with its progress and its result on the screen."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from piper.training.config import RunConfig, load_config
from piper.training.curves import VERMILION, Curve, loss_curves
from piper.training.loop import Ending, Outcome
from piper.training.loop import train as run
from piper.training.metrics import HeldOutRecord

LAST_STEPS = 20
"""The training loss in the summary is the mean over this many last steps: one batch's is noisy."""

MARKS = 18
"""Points of the reference's curve that are drawn over the run's."""


def train(path: Path, console: Console, resume: Path | None = None) -> Ending:
    """Run the configuration at *path*, from the checkpoint *resume* on if given; why it ended.

    Raises :class:`~piper.errors.PiperError` for what is wrong with it.
    """
    config = load_config(path)
    if resume is not None:
        config = replace(config, train=replace(config.train, resume=str(resume)))
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as progress:
        outcome = run(config, _Display(progress))
    report(config, outcome, console)
    return outcome.ending


class _Display:
    """Shows a run on a progress bar. Implements :class:`~piper.training.loop.Watcher`."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def begin(self, what: str, steps: int | None = None) -> None:
        """One bar at a time; what has no steps is a line above it."""
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
        self._progress.console.print(Text(f"{what} …", style="dim"))
        if steps is not None:
            self._task = self._progress.add_task(what, total=steps, numbers="")

    def advance(self, steps: int, loss: float, tokens_per_second: float) -> None:
        """Move the bar on."""
        assert self._task is not None
        numbers = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s"
        self._progress.update(self._task, advance=steps, numbers=numbers)

    def evaluated(self, record: HeldOutRecord) -> None:
        """A line above the bar."""
        self._progress.console.print(f"step {record.step}: held-out loss {record.loss:.3f}")

    def saved(self, path: Path) -> None:
        """A line above the bar."""
        self._progress.console.print(Text(f"checkpoint written to {path}"), soft_wrap=True)


def report(config: RunConfig, outcome: Outcome, console: Console) -> None:
    """Print what a run came to."""
    if outcome.sample:
        console.print(_sample(outcome))
    console.print(loss_curves(_curves(config, outcome), width=min(72, console.width - 12)))
    for line in _summary(outcome):
        console.print(Text(line), soft_wrap=True)


def _sample(outcome: Outcome) -> Panel:
    text = Text(_printable(outcome.prompt), style="dim")
    text.append(_printable(outcome.sample), style="not dim")
    return Panel(text, title="held-out text, continued by the model", title_align="left")


def _printable(data: bytes) -> str:
    text = data.decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)


def _curves(config: RunConfig, outcome: Outcome) -> list[Curve]:
    devices = sum(map(len, config.strategy.groups)) if config.strategy.groups else None
    label = f"{devices} devices" if devices else "the strategy"
    curves = [Curve(label=label, points=[(r.step, r.loss) for r in outcome.trained])]
    if outcome.reference:
        points = list(enumerate(outcome.reference, start=1))
        curves.append(
            Curve(label="one process", points=_spread(points, MARKS), style=VERMILION, marks=True)
        )
    return curves


def _spread(points: Sequence[tuple[int, float]], count: int) -> list[tuple[int, float]]:
    """At most *count* of *points*, evenly spread, the first and the last among them."""
    if len(points) <= count:
        return list(points)
    chosen = [round(i * (len(points) - 1) / (count - 1)) for i in range(count)]
    return [points[i] for i in chosen]


def _summary(outcome: Outcome) -> list[str]:
    """The end, the losses, the comparison, the files."""
    steps = outcome.trained[-1].step if outcome.trained else 0
    lines = [f"{outcome.ending.value} after {steps} steps"]
    if outcome.ending is Ending.DIVERGED:
        lines.append(
            "the loss is no finite number any more, nor are the weights, which were not saved; lower lr, or give warmup_steps or max_grad_norm, "
            "and start again or --resume an earlier checkpoint"
        )
    elif outcome.trained:
        last = outcome.trained[-LAST_STEPS:]
        loss = statistics.fmean(record.loss for record in last)
        lines.append(f"train loss {loss:.3f} nats per byte (mean of the last {len(last)} steps)")
    if outcome.held_out:
        lines.append(f"held-out loss {outcome.held_out[-1].loss:.3f} nats per byte")
    difference = outcome.max_difference
    if difference is not None:
        count = len(outcome.reference)
        part = "all steps" if count == steps else f"the first {count} of {steps} steps"
        lines.append(f"one process on the same batches, {part}: max |difference| {difference:.1e}")
    lines.append(f"written to {outcome.out_dir}")
    return lines

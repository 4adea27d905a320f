"""``piper view``: a timeline, or what a configuration's would be, as a picture."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from piper.cli.plan import make_program, optimizer_bytes
from piper.cli.simulate import Choice
from piper.errors import ConfigError, PlanError
from piper.plan.account import gloo_frame
from piper.plan.costs import Costs, UnitCosts
from piper.simulate import simulate
from piper.simulate.timeline import Source, Timeline, load_timeline
from piper.training.config import load_config
from piper.training.model import make_skeleton
from piper.visualize.picture import check_kind, visualize

CONFIG, TIMELINE = ".toml", ".json"


@dataclass(frozen=True)
class _Shown:
    """A timeline and where it comes from."""

    path: Path
    timeline: Timeline

    @property
    def name(self) -> str:
        return self.path.name


def view(
    path: Path, console: Console, choice: Choice, *, output: Path, compare: Path | None = None
) -> None:
    """Draw what *path* (a timeline file or a configuration) says, and *compare* below it, into *output*; say what was written.

    Configurations are simulated with the costs of *choice*. Raises :class:`ConfigError` for a file that is neither or cannot be
    read, and what loading, planning, simulating and drawing raise.
    """
    check_kind(output)
    paths = [path] if compare is None else [path, compare]
    for source in paths:
        _check_source(source)
    costs = choice.costs()
    configured = [source for source in paths if source.suffix == CONFIG]
    shown = [_read(source, costs) for source in paths]
    unit = "forwards" if len(configured) == len(paths) and isinstance(costs, UnitCosts) else "s"
    _check_comparable(shown, costs)
    first, *others = shown
    written = visualize(
        first.timeline,
        output,
        compare=others[0].timeline if others else None,
        names=(first.name, others[0].name if others else ""),
        title=" and ".join(each.path.stem for each in shown),
        unit=unit,
    )
    if len(written) > 1:
        console.print(f"too large for one page: {len(written)} parts, one after the other in time")
    for file in written:
        console.print(Text(f"written: {file}"), soft_wrap=True)


def _check_source(path: Path) -> None:
    if path.suffix not in (CONFIG, TIMELINE):
        raise ConfigError(
            f"{path}: expected a timeline ({TIMELINE}, as `piper simulate --save` writes) or a configuration ({CONFIG})"
        )


def _read(path: Path, costs: Costs) -> _Shown:
    if path.suffix == TIMELINE:
        return _Shown(path, read_timeline(path))
    config = load_config(path)
    timeline = simulate(
        make_program(config, make_skeleton(config)).plan,
        costs,
        optimizer_bytes=optimizer_bytes(config.optimizer),
        frame_bytes=gloo_frame if config.train.backend == "ray" else int,
    )
    return _Shown(path, timeline)


def read_timeline(path: Path) -> Timeline:
    """The timeline in the file *path*. Raises :class:`ConfigError` if it cannot be read, :class:`PlanError` if it holds none."""
    try:
        if path.stat().st_size == 0:
            raise PlanError(f"timeline file {path} is empty; simulate or profile again")
        return load_timeline(path)
    except OSError as error:
        raise ConfigError(f"cannot read timeline {path}: {error.strerror or error}") from error


def _check_comparable(shown: list[_Shown], costs: Costs) -> None:
    measured = [s for s in shown if s.timeline.source is Source.MEASURED]
    configured = [s for s in shown if s.path.suffix == CONFIG]
    if measured and configured and isinstance(costs, UnitCosts):
        raise ConfigError(
            f"{measured[0].path} was measured in seconds, {configured[0].path} would be simulated in forwards;"
            " choose --device or --profile"
        )

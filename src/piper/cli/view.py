"""``piper view``: a timeline, or what a configuration's would be, as a picture."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from piper.cli.plan import say_folded
from piper.cli.simulate import Choice, simulated
from piper.errors import ConfigError, PlanError
from piper.plan.costs import Costs
from piper.simulate.timeline import FORWARDS, SECONDS, Timeline, load_timeline
from piper.training.config import load_config
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
    """Draw what *path* (a timeline file or a configuration) says, and *compare* below it, into
    *output*; say what was written.

    Configurations are simulated with the costs of *choice*. Raises :class:`ConfigError` for a file
    that is neither or cannot be read, and what loading, planning, simulating and drawing raise.
    """
    check_kind(output)
    paths = [path] if compare is None else [path, compare]
    for source in paths:
        _check_source(source)
    costs = choice.costs()
    shown = [_read(source, costs, console) for source in paths]
    _check_comparable(shown)
    first, *others = shown
    written = visualize(
        first.timeline,
        output,
        compare=others[0].timeline if others else None,
        names=(first.name, others[0].name if others else ""),
        title=" and ".join(each.path.stem for each in shown),
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


def _read(path: Path, costs: Costs, console: Console) -> _Shown:
    if path.suffix == TIMELINE:
        return _Shown(path, read_timeline(path))
    found = simulated(load_config(path), costs)
    say_folded(found.plan, console)
    return _Shown(path, found.timeline)


def read_timeline(path: Path) -> Timeline:
    """The timeline in the file *path*. Raises :class:`ConfigError` if it cannot be read,
    :class:`PlanError` if it holds none.
    """
    try:
        if path.stat().st_size == 0:
            raise PlanError(f"timeline file {path} is empty; simulate or profile again")
        return load_timeline(path)
    except OSError as error:
        raise ConfigError(f"cannot read timeline {path}: {error.strerror or error}") from error


def _check_comparable(shown: list[_Shown]) -> None:
    counted = {each.timeline.unit: each.path for each in shown}
    if len(counted) > 1:
        raise ConfigError(
            f"{counted[SECONDS]} is in seconds, {counted[FORWARDS]} in forwards (F = 1); choose --device or --profile"
        )

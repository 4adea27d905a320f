"""``piper convert``: schedule files of torch.distributed.pipelining as strategies, and back."""

from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.text import Text

from piper.directives.order import Order
from piper.directives.place import Place
from piper.directives.split import Split
from piper.directives.strategy import dump_strategy, load_strategy
from piper.errors import ScheduleError, StrategyFileError
from piper.reading import read_file
from piper.schedules.convert import actions_of_strategy, strategy_of_actions


def convert(
    source: Path, target: Path, console: Console, *, stage_tag: str, microbatch_tag: str
) -> None:
    """Write *target* from *source*; which is which their extensions say.

    Raises :class:`StrategyFileError` for other extensions and files that cannot be read or written,
    :class:`ScheduleError` with the place in *source* for what the other form cannot say.
    """
    kinds = (source.suffix.lower(), target.suffix.lower())
    if kinds not in ((".csv", ".json"), (".json", ".csv")):
        raise StrategyFileError(
            f"expected a .csv of actions and a .json strategy, in either direction, found {source.name} and {target.name}"
        )
    try:
        if kinds[0] == ".csv":
            said = _to_strategy(source, target, stage_tag, microbatch_tag)
        else:
            said = _to_actions(source, target, stage_tag)
    except ScheduleError as error:
        raise ScheduleError(f"{source}: {error}") from error
    except OSError as error:
        raise StrategyFileError(
            f"cannot convert {source} to {target}: {error.filename}: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise StrategyFileError(f"cannot convert {source} to {target}: {error}") from error
    console.print(Text(f"{target}: {said}"), soft_wrap=True)


def _to_strategy(source: Path, target: Path, stage_tag: str, microbatch_tag: str) -> str:
    strategy = strategy_of_actions(
        read_file(source, f"cannot convert {source} to {target}", StrategyFileError).decode(),
        stage_tag=stage_tag,
        microbatch_tag=microbatch_tag,
    )
    dump_strategy(strategy, target)
    counts = Counter(type(directive) for directive in strategy)
    return f"{counts[Place]} stages on {counts[Order]} devices, rank r on device r"


def _to_actions(source: Path, target: Path, stage_tag: str) -> str:
    strategy = load_strategy(source)
    text = actions_of_strategy(strategy, stage_tag=stage_tag)
    target.write_text(text)
    others = Counter(type(d).__name__ for d in strategy if not isinstance(d, (Place, Split, Order)))
    lost = ", ".join(f"{count} {name}" for name, count in others.items())
    return f"{len(text.splitlines())} ranks" + (f"; left out: {lost}" if lost else "")

"""``piper explain``: why something runs where and when it does."""

from pathlib import Path

from rich.console import Console

from piper.api.explain import explain as explained
from piper.cli.plan import say_folded
from piper.cli.simulate import Choice, simulated
from piper.training.config import load_config


def explain(what: str, path: Path, console: Console, choice: Choice) -> None:
    """Print why *what* of the configuration's plan runs where and when it does."""
    config = load_config(path)
    found = simulated(config, choice.costs())
    say_folded(found.plan, console)
    text = explained(found.plan, what, config.strategy.directives(), found.timeline)
    console.out(text, highlight=False)

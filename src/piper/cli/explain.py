"""``piper explain``: why something runs where and when it does."""

from pathlib import Path

from rich.console import Console

from piper.api.explain import explain as explained
from piper.cli.plan import make_program
from piper.cli.simulate import Choice
from piper.simulate import simulate
from piper.training.config import load_config
from piper.training.model import make_skeleton


def explain(what: str, path: Path, console: Console, device: str) -> None:
    """Print why *what* of the configuration's plan runs where and when it does."""
    config = load_config(path)
    costs = Choice(device).costs()
    plan = make_program(config, make_skeleton(config)).plan
    text = explained(plan, what, config.strategy.directives(), simulate(plan, costs))
    console.out(text, highlight=False)

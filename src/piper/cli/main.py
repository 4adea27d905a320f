"""The command line. Commands import what they need when they run, so that ``piper --help`` is
quick.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from piper.devices.heap import keep_freed_memory
from piper.errors import PiperError, show_internals

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""

app = typer.Typer(
    name="piper",
    help="Train PyTorch models on many devices under a strategy that you write.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigPath = Annotated[
    Path, typer.Argument(metavar="CONFIG.toml", help="What to train, on what, and how.")
]
Traceback = Annotated[
    bool, typer.Option("--traceback", help="On an error, show where in piper it was found.")
]

UNIT = "unit"
"""The name of unit costs, which are the default."""

# How long things take in what is simulated; the same options wherever something is.
DeviceName = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="NAME",
        help="A100, H100, H200 or CPU; unit counts in forwards: F = 1, a backward is 2.",
    ),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="Durations that `piper profile` measured."),
]
Nodes = Annotated[
    int | None, typer.Option("--nodes", min=1, help="Machines (default: as many as needed).")
]
DevicesPerNode = Annotated[
    int | None, typer.Option("--devices-per-node", min=1, help="Devices per machine.")
]


class Durations(StrEnum):
    """Where ``piper plan`` takes the durations of the chunks from."""

    UNIT = "unit"
    ESTIMATED = "estimated"


@contextmanager
def _reporting(traceback: bool) -> Iterator[None]:
    """One clear message and a failing exit status for what the user can do something about, files
    that cannot be read or written among it; a bug shows its traceback.
    """
    show_internals(traceback)
    try:
        yield
    except KeyboardInterrupt:
        _complain("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except PiperError as error:
        if traceback:
            raise
        _complain(f"error: {error}")
        raise typer.Exit(1) from None
    except OSError as error:
        if traceback or error.filename is None:
            raise
        _complain(f"error: {error.filename}: {error.strerror}")
        raise typer.Exit(1) from None


def _complain(message: str) -> None:
    # soft_wrap: a path in a message must not be broken into two lines.
    Console(stderr=True).print(Text(message, style="red"), soft_wrap=True)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"piper {version('piper-train')}")
        raise typer.Exit


@app.callback()
def _main(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Train PyTorch models on many devices under a strategy that you write."""
    del show_version  # its callback has seen to it
    # Threads that train in this process, and measurements, as in the workers' processes.
    keep_freed_memory()


@app.command()
def train(
    config: ConfigPath,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Go on from this checkpoint, or from the last one of this run's folder.",
        ),
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Train, evaluate, and compare with training in one process.

    Ctrl-C ends the run after the step that is under way and writes what there is.

    A second one ends it at once.
    """
    with _reporting(traceback):
        from piper.cli.train import train as run
        from piper.training.loop import Ending

        statuses = {Ending.INTERRUPTED: INTERRUPTED, Ending.DIVERGED: 1}
        if status := statuses.get(run(config, Console(), resume)):
            raise typer.Exit(status)


@app.command()
def plan(
    config: ConfigPath,
    costs: Annotated[
        Durations,
        typer.Option(
            help="Draw a forward as 1 and a backward as 2 units of time, or chunks by their estimated time."
        ),
    ] = Durations.UNIT,
    text: Annotated[
        bool, typer.Option("--text", help="Print every device's instructions instead.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the plan's files into DIR.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Run two steps in this process, and show the memory that they take."
        ),
    ] = False,
    memory_budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="What any device may need at most, such as 512MiB; in place of the configuration's.",
        ),
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Show what every device will do and how much memory it needs.

    Nothing is run, unless it is to be measured.
    """
    with _reporting(traceback):
        from piper.cli.plan import plan as run

        run(
            config,
            Console(),
            estimated=costs is Durations.ESTIMATED,
            text=text,
            save=save,
            measured=measure,
            memory_budget=memory_budget,
        )


@app.command()
def simulate(
    config: ConfigPath,
    device: DeviceName = UNIT,
    profile: ProfileFile = None,
    nodes: Nodes = None,
    devices_per_node: DevicesPerNode = None,
    top: Annotated[int, typer.Option(min=1, help="Lines of the critical path.")] = 8,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace for Perfetto.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the timeline as JSON.")
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Predict how long a step takes and what to improve first.

    Nothing is run.
    """
    with _reporting(traceback):
        from piper.cli.simulate import Choice
        from piper.cli.simulate import simulate as run

        choice = Choice(device, profile, nodes, devices_per_node)
        run(config, Console(), choice, top=top, trace=trace, save=save)


@app.command()
def view(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="A timeline (TIMELINE.json), or a CONFIG.toml to be simulated."
        ),
    ],
    compare: Annotated[
        Path | None, typer.Option(metavar="SOURCE", help="Another one to draw below it.")
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", metavar="FILE", help="What to write: .html, .svg or .json (a trace)."
        ),
    ] = Path("schedule.html"),
    device: DeviceName = UNIT,
    profile: ProfileFile = None,
    nodes: Nodes = None,
    devices_per_node: DevicesPerNode = None,
    traceback: Traceback = False,
) -> None:
    """Draw a step as a page to look around in, or as a picture.

    The step is one that was recorded, or a configuration's, planned and simulated here.
    """
    with _reporting(traceback):
        from piper.cli.simulate import Choice
        from piper.cli.view import view as run

        choice = Choice(device, profile, nodes, devices_per_node)
        run(source, Console(), choice, output=output, compare=compare)


@app.command()
def profile(
    config: ConfigPath,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Where to write the profile.")
    ] = Path("profile.json"),
    repeats: Annotated[int, typer.Option(min=1, help="Steps that each device runs by itself.")] = 5,
    traceback: Traceback = False,
) -> None:
    """Measure a strategy's chunks and messages on this machine.

    How long they take, alone and at once, for `piper simulate --profile`.
    """
    with _reporting(traceback):
        from piper.cli.profile import profile as run

        run(config, Console(), output, repeats=repeats)


@app.command()
def explain(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help='A node (17, or "F PP=1 MB=0"), a device ("device 1"), a step ("1#17").',
        ),
    ],
    config: ConfigPath,
    device: DeviceName = UNIT,
    profile: ProfileFile = None,
    nodes: Nodes = None,
    devices_per_node: DevicesPerNode = None,
    traceback: Traceback = False,
) -> None:
    """Say why something runs where and when it does.

    Which directive placed it, what it waits for.
    """
    with _reporting(traceback):
        from piper.cli.explain import explain as run
        from piper.cli.simulate import Choice

        run(what, config, Console(), Choice(device, profile, nodes, devices_per_node))


@app.command()
def check(config: ConfigPath, traceback: Traceback = False) -> None:
    """Compare the strategy with training in one process, in float64.

    Losses, gradients, parameters and optimizer state after every step.
    """
    with _reporting(traceback):
        from piper.cli.check import check as run

        if not run(config, Console()):
            raise typer.Exit(1)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="What there is: .csv or .json.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="What to write: .json or .csv.")],
    stage_tag: Annotated[str, typer.Option(help="The tag of the model's stages.")] = "PP",
    microbatch_tag: Annotated[
        str, typer.Option(help="The tag that the split into microbatches gives; from .csv only.")
    ] = "MB",
    traceback: Traceback = False,
) -> None:
    """Turn torch's schedule CSV into a strategy file, or back.

    The CSV is one of actions, as torch.distributed.pipelining reads and writes them.
    """
    with _reporting(traceback):
        from piper.cli.convert import convert as run

        run(source, target, Console(), stage_tag=stage_tag, microbatch_tag=microbatch_tag)


@app.command()
def doctor(traceback: Traceback = False) -> None:
    """Look whether this machine is ready, and say what to do if not."""
    with _reporting(traceback):
        from piper.cli.doctor import doctor as run

        if not run(Console()):
            raise typer.Exit(1)

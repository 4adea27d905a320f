"""Every reader of files, with small files that piper itself wrote: what is damaged, and what is done
with what a damaged file still holds.
"""

import json
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

import piper
from piper.directives.base import Directive
from piper.directives.split import Split
from piper.directives.strategy import dump_strategy
from piper.errors import CheckpointError
from piper.plan.codec import encode_plan, load_plan
from piper.plan.costs import hardware
from piper.plan.model import Plan
from piper.plan.profile import Exchange, Profile, Rate, chunk_key, load_profile
from piper.plan.topology import Link, Topology, alone_seconds, traffic
from piper.schedules.convert import actions_of_strategy, strategy_of_actions
from piper.simulate.timeline import load_timeline
from piper.training.config import load_config
from piper.verify import find_problems
from piper.visualize.html import write_html
from piper.visualize.svg import svg
from piper.visualize.trace import save_trace
from tests.support.synthetic import chain

Files = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Reader:
    """*read* gets a folder with the files, of which one or several are damaged, and may raise
    nothing but a :class:`PiperError`. *strict*: it must raise one for any damage.
    """

    name: str
    originals: tuple[Files, ...]
    read: Callable[[Path], object]
    strict: bool = False


def reader(name: str) -> Reader:
    """The one of this name."""
    made: Reader = globals()[f"_{name}"]()
    return made


NAMES = ("config", "strategy", "schedule", "plan", "profile", "topology", "timeline", "checkpoint")

CONFIG = b"""[model]
width = 8
num_layers = 2
num_heads = 2
dropout = 0.1
[strategy]
schedule = "1f1b"
groups = [[0, 1], [2, 3]]
num_microbatches = 4
zero = 1
bucket_size = 25.0
[optimizer]
name = "adamw"
lr = 0.01
betas = [0.9, 0.95]
[train]
steps = 3
batch_size = 32
seq_len = 16
max_grad_norm = 1.0
precision = "bf16"
backend = "inprocess"
[memory]
budget = "40GiB"
"""


def _config() -> Reader:
    def read(folder: Path) -> None:
        config = load_config(folder / "run.toml")  # makes the directives
        config.transformer()

    return Reader("config", ({"run.toml": CONFIG},), read)


def _pipeline(schedule: str = "1f1b", *, zero: int = 0) -> list[Directive]:
    return piper.strategies.pipeline(
        schedule, [[0, 1], [2, 3]], 4 if schedule == "dualpipev" else 2, zero=zero
    )


def _strategy() -> Reader:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "s.json"
        dump_strategy(
            [*_pipeline(zero=2), piper.Recompute({"PP": 0}), piper.Offload({"PP": 1})], path
        )
        ours = path.read_bytes()
    pairs = b'[{"op": "place", "filter": [["PP", "0"]], "device": [0]}, {"op": "order", "filters": [[["PP", 0], ["PASS", "F"]]]}]'
    dag = chain(2, batch_size=8)

    def read(folder: Path) -> None:
        piper.apply(dag, piper.load_strategy(folder / "s.json"))

    return Reader("strategy", ({"s.json": ours}, {"s.json": pairs}), read)


def _schedule() -> Reader:
    texts = [actions_of_strategy(_pipeline(name)) for name in ("1f1b", "zb_h1", "dualpipev")]

    def read(folder: Path) -> None:
        try:
            text = (folder / "s.csv").read_bytes().decode()
        except UnicodeDecodeError:
            return  # the command line says so
        strategy_of_actions(text)

    return Reader("schedule", tuple({"s.csv": text.encode()} for text in texts), read)


def _planned() -> list[Plan]:
    dag = chain(2, tied=True, buffer=True, weighted=True, whole=True, batch_size=8)
    buffers = {"replicated_buffers": "mean"}
    strategies = (
        [*_pipeline()[:2], piper.Replicate({}, **buffers), *_pipeline()[3:]],
        [*_pipeline()[:2], piper.Replicate({}, shard_params=True, **buffers), *_pipeline()[3:]],
    )
    plans = [piper.plan(piper.apply(dag, strategy)) for strategy in strategies]
    placed = [piper.Place({"PP": s}, devices=[s]) for s in range(2)]
    halves = [*placed, Split({}, num_microbatches=2), *piper.schedules.zb_h1(2, 2)]
    return [*plans, piper.plan(piper.apply(chain(2, batch_size=8), halves))]


def _plan() -> Reader:
    def read(folder: Path) -> None:
        plan = load_plan(folder)
        if not find_problems(plan):
            piper.verify(plan)
        piper.simulate(plan)

    return Reader("plan", tuple(encode_plan(plan) for plan in _planned()), read)


def _profile() -> Reader:
    plan = _planned()[0]
    rate = Rate(1e-6, 1e-9)
    exchange = Exchange(rate, rate)
    chunks = {
        chunk_key(chunk.work.body, plan.bindings): 1e-3
        for chunk in plan.dag.chunks()
        if hasattr(chunk.work, "body")
    }
    profile = Profile(
        version=2,
        machine="here",
        chunks=chunks,
        rates={"accumulate": rate, "update": rate},
        launch=1e-6,
        messages=exchange,
        unpacking={"receive": rate},
        collectives={"all_reduce": {2: exchange}, "all_gather": {2: exchange, 4: exchange}},
    )
    with tempfile.TemporaryDirectory() as name:
        profile.save(Path(name) / "p.json")
        data = (Path(name) / "p.json").read_bytes()

    def read(folder: Path) -> None:
        piper.simulate(plan, load_profile(folder / "p.json"))

    return Reader("profile", ({"p.json": data},), read)


def _topology() -> Reader:
    """Topologies have no file of their own: numbers, as options and Python callers give them."""
    given = {
        "nodes": 2,
        "devices_per_node": 4,
        "intra": [1e-6, 1e9],
        "inter": [1e-5, 1e8],
        "nics": 2,
    }

    def read(folder: Path) -> None:
        try:
            numbers = json.loads((folder / "t.json").read_bytes())
            links = {name: Link(*map(float, numbers[name])) for name in ("intra", "inter")}
            counts = {name: int(numbers[name]) for name in ("nodes", "devices_per_node", "nics")}
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError, AttributeError):
            return  # no numbers
        topology = Topology(**counts, **links)
        topology.check(4)
        for role in ("send", "all_reduce", "all_gather"):
            alone_seconds(topology, traffic(topology, role, (0, 3), 1e6))
        hardware("H100", topology).topology_for(4)

    return Reader("topology", ({"t.json": json.dumps(given).encode()},), read)


def _timeline() -> Reader:
    plans = _planned()
    with tempfile.TemporaryDirectory() as name:
        files = []
        for plan, costs in ((plans[0], None), (plans[2], "H100")):
            timeline = piper.simulate(plan) if costs is None else piper.simulate(plan, costs)
            timeline.save(Path(name) / "t.json")
            files.append({"t.json": (Path(name) / "t.json").read_bytes()})

    def read(folder: Path) -> None:
        timeline = load_timeline(folder / "t.json")
        svg(timeline)
        write_html([timeline], ["one"], folder / "out.html", title="step")
        save_trace(timeline, folder / "out.trace")

    return Reader("timeline", tuple(files), read)


class _Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP", 0):
            x = self.a(x)
        with piper.annotate("PP", 1):
            return self.b(x) + self.seen


def _checkpoint() -> Reader:
    torch.manual_seed(0)
    x, y = torch.randn(4, 2), torch.randn(4, 2)
    trainer = piper.compile(
        _Two(),
        torch.nn.functional.mse_loss,
        piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 2, zero=1),
        (x, y),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.1),
        backend="inprocess",
    )
    trainer.step(x, y)
    with tempfile.TemporaryDirectory() as name:
        trainer.save(Path(name) / "c", metadata={"run": {"lr": (0.1, None)}})
        files = {path.name: path.read_bytes() for path in sorted((Path(name) / "c").iterdir())}
    names = list(trainer.state_dict())

    def read(folder: Path) -> None:
        checkpoint = piper.Checkpoint.open(folder)
        checkpoint.weights(names)
        if (damage := checkpoint.damage(range(len(checkpoint.index.files)))) is not None:
            raise CheckpointError(damage)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.load(folder)

    return Reader("checkpoint", (files,), read, strict=True)

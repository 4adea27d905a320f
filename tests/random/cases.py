"""Random cases as data: a model, a loss, strategies, options, and what is done with them."""

import dataclasses
import random
from dataclasses import dataclass, replace

import msgspec

KINDS = {
    "linear": 8,
    "tied": 3,
    "reused": 2,
    "detached_use": 1,
    "frozen": 2,
    "norm": 3,
    "batch_norm": 1,
    "chunks": 2,
    "views": 2,
    "dropout": 4,
    "noise": 1,
    "in_place": 1,
    "table": 1,
    "detached": 2,
    "bias": 2,
    "scalar": 1,
    "counter": 1,
    "lookup": 1,
    "attention": 1,
    "float32": 1,
    "optional": 1,
    "convolution": 1,
    "capacity": 3,
    "dropless": 3,
}
"""Layers and how often they are drawn."""

EXPERTS = ("capacity", "dropless")
ROUNDED = frozenset(
    {"linear", "tied", "frozen", "norm", "chunks", "views", "detached", "bias", "counter", "scalar"}
)
"""Layers of which the reference can state what a policy of element types means."""

VANISHING = frozenset({"views", "dropout", "optional"})
"""Layers that may leave nothing in a graph: a region of them alone would not be there."""

WRITING = frozenset({"counter", "batch_norm"})
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "zb_h1",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipe",
    "dualpipev",
)
VIRTUAL = frozenset({"interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble"})
IN_A_V = frozenset({"zbv", "dualpipev"})
OPTIMIZERS = (
    "sgd",
    "momentum",
    "nesterov",
    "adam",
    "adamw",
    "rmsprop",
    "adagrad",
    "nadam",
    "radam",
    "adamax",
)


@dataclass(frozen=True, slots=True)
class Layer:
    """``reads``: earlier values (0 is the input), added up or multiplied; ``of``: the layer whose
    weight it uses; ``region`` (``None``: outside all) and ``inner`` are ``PP`` and ``IN``;
    ``variant`` chooses among the kind's forms.
    """

    kind: str
    reads: tuple[int, ...]
    region: int | None
    multiply: bool = False
    inner: int | None = None
    of: int = 0
    variant: int = 0


@dataclass(frozen=True, slots=True)
class Sketch:
    """A model of *width*; ``extra``: values that it returns besides the last; ``ids``: the batch
    has integers too, which are embedded; ``loss``: a form of loss.
    """

    layers: tuple[Layer, ...]
    width: int = 6
    extra: tuple[int, ...] = ()
    ids: bool = False
    loss: str = "mean"
    outside: bool = False

    @property
    def stages(self) -> int:
        return 1 + max((layer.region or 0 for layer in self.layers), default=0)

    def has(self, *kinds: str) -> bool:
        return any(layer.kind in kinds for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Layout:
    """A strategy. ``schedule`` is a registered one, ``"order"`` (a random linear extension, with
    ``overlap`` groups of two), or ``"free"`` (regions placed by ``homes``; under ``parity`` odd
    microbatches on the next group; ``halves`` splits all backwards). ``zero``: levels by stage,
    cyclic; one: a single directive. ``shard``: where experts are.
    """

    schedule: str = "free"
    ranks: int = 1
    virtual: int = 1
    replicas: int = 1
    microbatches: int = 1
    zero: tuple[int, ...] = (0,)
    hybrid: bool = False
    bucket: float | None = None
    buffers: str = "first"
    split_first: bool = False
    homes: tuple[int, ...] = (0,)
    parity: bool = False
    halves: bool = False
    order_seed: int = 0
    overlap: bool = False
    shard: str | None = None
    recompute: tuple[int, ...] | None = None
    save: bool = False
    offload: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """``actions``: ``update``, ``keep``, ``evaluate``, ``reload`` (a checkpoint, on to the next of
    ``layouts``), ``switch`` (the same by ``state_dict``).
    """

    seed: int
    sketch: Sketch
    layouts: tuple[Layout, ...]
    actions: tuple[str, ...] = ("update",)
    rows: int = 2
    optimizer: str = "sgd"
    precision: str | None = None
    scale: float | None = None
    max_norm: float | None = None
    infinite_norm: bool = False
    groups: bool = False
    schedule: bool = False
    named: bool = False
    bounds: tuple[tuple[str, int], ...] = ()
    compiled: bool = False
    ray: bool = False
    delay: float = 0.0

    @property
    def parts(self) -> int:
        return self.layouts[0].replicas * self.layouts[0].microbatches


def to_json(case: Case) -> str:
    """As one line."""
    return msgspec.json.encode(case).decode()


def from_json(text: str) -> Case:
    """The case that :func:`to_json` wrote."""
    return msgspec.json.decode(text, type=Case)


# --- drawing ---------------------------------------------------------------------------------------

PER_MODEL = 8
"""Consecutive seeds share a model: capturing one takes longer than all the rest."""


def draw(seed: int) -> Case:
    """The case number *seed*: a function of it alone."""
    rng = random.Random(f"model {seed // PER_MODEL}")
    precision = _precision(rng)
    sketch = _sketch(rng, rounded=precision is not None)
    rows = rng.choice((2, 3) if sketch.has("batch_norm") else (1, 2, 2, 3))
    named = rng.random() < 0.2 or sketch.has("optional")
    rng = random.Random(f"case {seed}")
    layouts = [_layout(rng, sketch)]
    actions = _actions(rng)
    if rng.random() < 0.2:
        layouts.append(_layout(rng, sketch, layouts[0].replicas * layouts[0].microbatches))
        actions += [rng.choice(("reload", "reload", "switch")), "update", "update"]
    # The optimizer's state is not part of `state_dict`.
    optimizer = "sgd" if "switch" in actions else rng.choice(OPTIMIZERS)
    scales = {"fp16": (None, 1024.0, 2.0**24), "float32": (None, 8.0, 2.0**126)}
    return Case(
        seed=seed,
        sketch=sketch,
        layouts=tuple(layouts),
        actions=tuple(actions),
        rows=rows,
        optimizer=optimizer,
        precision=precision,
        scale=rng.choice(scales.get(precision or "", (None,))),
        max_norm=rng.choice((None, None, None, 0.1, 1.0, 1e9)),
        infinite_norm=rng.random() < 0.3,
        groups=rng.random() < 0.2,
        schedule=rng.random() < 0.2,
        named=named,
        bounds=_bounds(rng),
        delay=0.001 if rng.random() < 0.05 else 0.0,
    )


def _precision(rng: random.Random) -> str | None:
    if rng.random() < 0.8:
        return None
    return rng.choice(("bf16", "bf16", "fp16", "float32", "float64"))


def _sketch(rng: random.Random, *, rounded: bool) -> Sketch:
    """Regions follow each other, as in a pipeline; in some models (``outside``) they are entered
    again, and some layers are outside all.
    """
    outside = rng.random() < 0.2
    stages = rng.choice((1, 2, 2, 2, 3, 4, 4)) if not outside else rng.randint(1, 3)
    kinds = {k: w for k, w in KINDS.items() if not rounded or k in ROUNDED}
    writes = rng.random() < 0.3  # else most replicated or two-way strategies would be refused
    layers: list[Layer] = []
    for stage in range(stages):
        for place in range(rng.choice((1, 1, 2, 3)) if stages < 4 else rng.choice((1, 1, 2))):
            number = len(layers)
            kind = rng.choices(list(kinds), list(kinds.values()))[0]
            vanishing = place == 0 and kind in VANISHING
            if (kind in WRITING and not writes) or vanishing or number == 0:
                kind = "linear"
            region: int | None = stage
            if outside and number and kind not in EXPERTS and rng.random() < 0.4:
                region = rng.choice((None, max(0, stage - 1)))
            linears = [i for i, layer in enumerate(layers) if layer.kind == "linear"]
            reads = {number} | {i for i in (rng.randint(0, number),) if rng.random() < 0.4}
            layers.append(
                Layer(
                    kind,
                    tuple(sorted(reads, reverse=True)),
                    region,
                    multiply=rng.random() < 0.3,
                    inner=rng.choice((None, None, None, 0, 1)) if kind not in EXPERTS else None,
                    of=rng.choice(linears) if linears else 0,
                    variant=rng.randrange(6),
                )
            )
    return Sketch(
        tuple(layers),
        extra=tuple(i for i in range(1, len(layers)) if rng.random() < 0.1),
        ids=rng.random() < 0.15,
        loss=rng.choice(("mean", "mean", "mean", "tokens", "mask", "constant", "classes")),
        outside=outside,
    )


def _layout(rng: random.Random, sketch: Sketch, parts: int | None = None) -> Layout:
    """A strategy for a model; *parts*: replicas times microbatches."""
    schedule = rng.choice((*SCHEDULES, "order", "order", "order", "free", "free", "free", "free"))
    ranks, virtual, replicas = _grid(rng, schedule, sketch)
    if ranks == 0:
        schedule, ranks, virtual = "free", 1, 1
    microbatches = rng.choice((1, 2, 2, 3, 4))
    if schedule.startswith("dualpipe"):
        microbatches = 2 * ranks if schedule == "dualpipev" else 4
    if replicas * microbatches > 8:
        replicas = 2
    if parts is not None:
        if schedule.startswith("dualpipe"):
            schedule, ranks, virtual = "free", 1, 1
        replicas = rng.choice([n for n in (1, 2, 3, 4) if parts % n == 0 and ranks * n <= 6])
        microbatches = parts // replicas
    layout = Layout(
        schedule=schedule,
        ranks=ranks,
        virtual=virtual,
        replicas=replicas,
        microbatches=microbatches,
        zero=tuple(rng.choice((0, 1, 2, 3, 3)) for _ in range(rng.choice((1, 1, 1, 2, 3)))),
        hybrid=replicas == 4 and rng.random() < 0.5,
        bucket=rng.choice((None, None, 1e-4)),
        buffers=rng.choice(("first", "mean", "sum")),
        split_first=rng.random() < 0.4 or schedule == "dualpipe",
        homes=tuple(rng.choice((0, 1, 1, 2)) for _ in range(rng.randint(1, 4))),
        parity=schedule == "free" and rng.random() < 0.25,
        halves=schedule == "free" and rng.random() < 0.3,
        order_seed=rng.randrange(1000),
        overlap=rng.random() < 0.5,
        recompute=_some(rng, 0.3),
        save=rng.random() < 0.3,
        offload=_some(rng, 0.15),
    )
    return _fit(rng, layout, sketch)


def _grid(rng: random.Random, schedule: str, sketch: Sketch) -> tuple[int, int, int]:
    """Ranks, stages of each, replicas; no ranks: the schedule has no such number of stages."""
    stages = sketch.stages
    replicas = rng.choice((1, 1, 2, 2, 2, 3, 4))
    ranks, virtual = stages, 1
    if schedule == "free":
        return 1, 1, replicas
    if sketch.outside:
        return 0, 0, replicas
    if schedule in VIRTUAL:
        ranks = rng.choice([n for n in (1, 2, 3) if stages % n == 0])
        virtual = stages // ranks
    elif schedule in IN_A_V:
        ranks, virtual = (stages // 2, 2) if stages % 2 == 0 else (0, 0)
    elif schedule == "dualpipe":
        ranks, replicas = 2 if stages == 2 else 0, min(replicas, 2)
    elif schedule == "order":
        ranks = rng.randint(1, stages)
    if ranks * replicas > 6:
        replicas = 1 if ranks > 3 else 2
    return ranks, virtual, replicas


def _some(rng: random.Random, probability: float) -> tuple[int, ...] | None:
    """Some stages, all (an empty tuple), or none."""
    if rng.random() > probability:
        return None
    return rng.choice(((), (), (), (0,), (0, 1)))


def _fit(rng: random.Random, layout: Layout, sketch: Sketch) -> Layout:
    """*layout* with what depends on the model."""
    if sketch.has(*WRITING) and layout.parity:
        layout = replace(layout, parity=False)
    if sketch.has("tied", "reused", "detached_use"):  # one directive must claim all uses
        layout = replace(layout, zero=layout.zero[:1])
    if not sketch.has(*EXPERTS):
        return layout
    choices: tuple[str | None, ...] = (None, "placed", "placed", "subset", "superset", "disjoint")
    if layout.parity or layout.schedule == "dualpipe":
        choices = (None, "placed")
    if layout.replicas == 4:
        choices = (*choices, "pairs", "pairs")
    shard = rng.choice(choices)
    if layout.replicas == 3 and shard == "placed":
        shard = None  # four experts
    if layout.hybrid and shard is not None:
        layout = replace(layout, hybrid=False)
    return replace(layout, shard=shard)


def _actions(rng: random.Random) -> list[str]:
    actions: list[str] = []
    keeps = rng.random() < 0.2
    for _ in range(rng.choice((2, 2, 3))):
        if keeps:
            actions += ["keep"] * rng.choice((0, 1, 1, 2))
        actions.append("update")
        if rng.random() < 0.1:
            actions.append("evaluate")
    return actions


def _bounds(rng: random.Random) -> tuple[tuple[str, int], ...]:
    if rng.random() < 0.8:
        return ()
    names = ("receive_bytes", "gather_bytes", "fetch_bytes", "reduce_bytes")
    return tuple((n, rng.choice((0, 1, 200, 2000))) for n in names if rng.random() < 0.5)


# --- smaller cases ------------------------------------------------------------------------------------

PLAIN = {
    "optimizer": "sgd",
    "precision": None,
    "scale": None,
    "max_norm": None,
    "groups": False,
    "schedule": False,
    "bounds": (),
    "compiled": False,
    "ray": False,
    "delay": 0.0,
    "rows": 2,
}
SIMPLE = {
    "offload": None,
    "recompute": None,
    "save": False,
    "bucket": None,
    "hybrid": False,
    "parity": False,
    "halves": False,
    "overlap": False,
    "shard": None,
    "zero": (0,),
    "split_first": False,
    "buffers": "first",
    "homes": (0,),
}


def smaller(case: Case) -> list[Case]:
    """Simpler cases near *case*, the most promising first."""
    found: list[Case] = []
    if len(case.layouts) > 1:
        where = next(i for i, a in enumerate(case.actions) if a in ("reload", "switch"))
        found.append(replace(case, layouts=case.layouts[:1], actions=case.actions[:where]))
        found.append(replace(case, layouts=case.layouts[1:], actions=case.actions[where + 1 :]))
    found += [
        replace(case, actions=case.actions[:i] + case.actions[i + 1 :])
        for i, action in enumerate(case.actions)
        if len(case.actions) > 1 and action not in ("reload", "switch")
    ]
    found += [
        replace(case, **{name: value})
        for name, value in PLAIN.items()
        if getattr(case, name) != value
    ]
    found += [replace(case, sketch=sketch) for sketch in _smaller_sketches(case.sketch)]
    for number, layout in enumerate(case.layouts):
        options = [
            replace(layout, **{name: value})
            for name, value in SIMPLE.items()
            if getattr(layout, name) != value
        ]
        if len(case.layouts) == 1:
            options += [
                replace(layout, **{name: value})
                for name in ("replicas", "microbatches")
                for value in range(1, getattr(layout, name))
            ]
        if layout.schedule not in ("free", "gpipe"):
            options += [replace(layout, schedule="gpipe", ranks=case.sketch.stages, virtual=1)]
        if layout.schedule != "free":
            options += [replace(layout, schedule="free")]
        found += [
            replace(case, layouts=(*case.layouts[:number], option, *case.layouts[number + 1 :]))
            for option in options
        ]
    return found


def _smaller_sketches(sketch: Sketch) -> list[Sketch]:
    found = []
    for i in range(len(sketch.layers) - 1, 0, -1):
        layers = [
            replace(
                layer,
                reads=tuple(dict.fromkeys(r - (r > i) for r in layer.reads)),
                of=layer.of - (layer.of > i),
            )
            for j, layer in enumerate(sketch.layers)
            if j != i
        ]
        if any(layer.of == i and layer.kind in ("tied", "reused") for layer in sketch.layers):
            continue
        if {layer.region for layer in layers} == {layer.region for layer in sketch.layers}:
            extra = tuple(e - (e > i) for e in sketch.extra if e != i + 1)
            found.append(replace(sketch, layers=tuple(layers), extra=extra))
    for i, layer in enumerate(sketch.layers):
        for change in (
            {"kind": "linear"},
            {"reads": (i,)},
            {"inner": None},
            {"multiply": False},
        ):
            if any(getattr(layer, k) != v for k, v in change.items()):
                new = replace(layer, **change)
                found.append(
                    replace(sketch, layers=(*sketch.layers[:i], new, *sketch.layers[i + 1 :]))
                )
    if sketch.extra:
        found.append(replace(sketch, extra=()))
    if sketch.ids:
        found.append(replace(sketch, ids=False))
    if sketch.loss != "mean":
        found.append(replace(sketch, loss="mean"))
    return found


def size(case: Case) -> int:
    """How much there is to read in a case."""
    return len(repr(dataclasses.asdict(case)))

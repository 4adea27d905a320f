"""Random small models, as data that Hypothesis can draw, print and shrink."""

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import piper

WIDTH = 3
KINDS = (
    "linear",
    "frozen",
    "tied",
    "norm",
    "parts",
    "dropout",
    "in_place",
    "table",
    "detached",
    "bias",
    "counter",
)


@dataclass(frozen=True)
class Layer:
    """One layer: its kind; which earlier values it reads (0 is the input); its region (``PP``, and
    ``IN`` inside), if any.
    """

    kind: str
    reads: tuple[int, ...]
    multiply: bool
    region: int | None
    inner: int | None


@dataclass(frozen=True)
class Sketch:
    """A model: a DAG of layers. ``extra`` is a value that the loss reads besides the last one."""

    layers: tuple[Layer, ...]
    extra: int | None
    weighted: bool

    @property
    def regions(self) -> frozenset[int | None]:
        return frozenset(layer.region for layer in self.layers)


@st.composite
def sketches(draw: st.DrawFn, max_layers: int = 6, kinds: tuple[str, ...] = KINDS) -> Sketch:
    """Regions mostly follow each other, as in a pipeline; some are entered again, some layers are
    outside all.
    """
    layers: list[Layer] = []
    region = 0
    for number in range(draw(st.integers(1, max_layers))):
        move = draw(st.sampled_from(("stay", "next", "next", "back", "outside")))
        region = {"next": region + 1, "back": max(0, region - 1)}.get(move, region)
        reads = draw(st.lists(st.integers(0, number), max_size=2, unique=True))
        layers.append(
            Layer(
                kind=draw(st.sampled_from(kinds)) if number else "linear",
                reads=tuple(dict.fromkeys((number, *reads))),
                multiply=draw(st.booleans()),
                region=None if move == "outside" else region,
                inner=draw(st.sampled_from((None, None, 0, 1))),
            )
        )
    extra = draw(st.none() | st.integers(1, len(layers)))
    return Sketch(tuple(layers), extra, draw(st.booleans()))


class Model(nn.Module):
    """The model that a sketch describes, in float64."""

    def __init__(self, sketch: Sketch) -> None:
        super().__init__()
        self.sketch = sketch
        self.parts = nn.ModuleList()
        linears: list[nn.Linear] = []
        for layer in sketch.layers:
            part = self._part(layer.kind, linears)
            if isinstance(part, nn.Linear):
                linears.append(part)
            self.parts.append(part)
        self.double()

    def _part(self, kind: str, linears: list[nn.Linear]) -> nn.Module:
        if kind == "linear":
            return nn.Linear(WIDTH, WIDTH)
        if kind == "frozen":
            return nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        if kind == "tied":
            tied = nn.Linear(WIDTH, WIDTH)
            tied.weight = linears[0].weight
            return tied
        if kind == "norm":
            return nn.LayerNorm(WIDTH)
        if kind == "parts":
            return nn.Linear(WIDTH, 2 * WIDTH)
        part = nn.Module()
        if kind == "table":
            part.register_buffer("table", torch.rand(WIDTH), persistent=False)
        if kind == "counter":
            part.register_buffer("seen", torch.zeros(WIDTH))
        if kind == "bias":
            part.bias = nn.Parameter(torch.rand(WIDTH))
        return part

    def forward(self, x):
        values = [x]
        for layer, part in zip(self.sketch.layers, self.parts, strict=True):
            with ExitStack() as stack:
                if layer.region is not None:
                    stack.enter_context(piper.annotate("PP", layer.region))
                if layer.inner is not None:
                    stack.enter_context(piper.annotate("IN", layer.inner))
                read = [values[i] for i in layer.reads]
                h = read[0]
                for other in read[1:]:
                    h = h * other if layer.multiply else h + other
                values.append(self._layer(layer.kind, part, h))
        return values[-1] if self.sketch.extra is None else (values[-1], values[self.sketch.extra])

    def _layer(self, kind, part, h):
        if kind in ("linear", "frozen", "tied"):
            return part(h).tanh()
        if kind == "norm":
            return part(h)
        if kind == "parts":
            gate, value = part(h).chunk(2, dim=-1)
            return gate.sigmoid() * value
        if kind == "dropout":
            return functional.dropout(h, 0.3, training=True)
        if kind == "in_place":
            return (h * 1.5).relu_()
        if kind == "table":
            return h * part.table
        if kind == "detached":
            return h + h.detach().sin() * (h > 0)
        if kind == "bias":
            return h + part.bias
        part.seen.add_(h.detach().sum(0))
        return h * 0.5

    def loss(self, outputs, targets):
        last, extra = (outputs, None) if self.sketch.extra is None else outputs
        error = (last - targets).square().sum(-1)
        if extra is not None:
            error = error + 0.1 * extra.sin().sum(-1)
        if not self.sketch.weighted:
            return error.mean()
        valid = targets[:, 0] > -0.5
        return (error * valid).sum(), valid.sum()

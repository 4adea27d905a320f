"""Training DAGs made without a model and without torch, for tests of everything from filters to the
planner.

Bodies are opaque: they have the right inputs and outputs, and no meaning. :func:`chain` is a
pipeline with the features that real models have; :func:`network` is any graph of regions, for
property tests.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from piper.dtypes import DType
from piper.ids import BodyId, NodeId, ValueId
from piper.ir.body import Body, Call, Ref, TensorSpec, body_id
from piper.ir.dag import (
    BatchLeaf,
    Buffer,
    Chunk,
    Dag,
    LossKind,
    Node,
    Parameter,
    Pass,
    Role,
    Tags,
    Value,
)
from piper.ir.symbols import Expr
from piper.ops.compute import Call as CallWork

WIDTH = 8
HIDDEN = TensorSpec((Expr("s0"), WIDTH), DType.FLOAT64)
WEIGHT = TensorSpec((WIDTH, WIDTH), DType.FLOAT64)
STATISTIC = TensorSpec((WIDTH,), DType.FLOAT64)
SCALAR = TensorSpec((), DType.FLOAT64)


OPAQUE = ("aten.block_diag", "aten.cartesian_prod", "aten.chain_matmul", "aten.linalg_multi_dot")
"""Operators by output of which no part of piper knows anything but that bodies may call them."""


def opaque(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Body:
    """A body with these inputs and outputs: one call per output, reading all inputs."""
    refs = tuple(Ref(i) for i in range(len(inputs)))
    calls = tuple(
        Call(f"{OPAQUE[i % len(OPAQUE)]}.default", refs, (), (spec,))
        for i, spec in enumerate(outputs)
    )
    return Body(tuple(inputs), calls, tuple(range(len(inputs), len(inputs) + len(outputs))))


def refitted(dag: Dag) -> Dag:
    """*dag*, each of whose chunks calls a body that has the inputs and outputs that it has now."""
    nodes, bodies = dict(dag.nodes), dict(dag.bodies)
    for chunk in dag.chunks():
        if isinstance(chunk.work, CallWork):
            sides = chunk.inputs, chunk.outputs
            body = opaque(*([dag.values[v].spec for v in side] for side in sides))
            bodies[body_id(body)] = body
            nodes[chunk.id] = msgspec.structs.replace(chunk, work=CallWork(body_id(body)))
    return replace(dag, nodes=nodes, bodies=bodies)


@dataclass
class Builder:
    """Makes a DAG node by node, in the order in which capture would."""

    batch_size: int
    values: dict[ValueId, Value] = field(default_factory=dict)
    nodes: dict[NodeId, Node] = field(default_factory=dict)
    bodies: dict[BodyId, Body] = field(default_factory=dict)
    contributions: dict[str, tuple[ValueId, ...]] = field(default_factory=dict)
    buffer_updates: dict[str, ValueId] = field(default_factory=dict)
    losses: tuple[ValueId, ...] = ()
    weights: tuple[ValueId, ...] = ()

    def value(self, spec: TensorSpec, role: Role = Role.ACTIVATION, name: str = "") -> ValueId:
        """A new value."""
        value = ValueId(len(self.values))
        self.values[value] = Value(value, spec, role, name)
        return value

    def chunk(
        self, tags: Tags, pass_: Pass, inputs: Iterable[ValueId], outputs: Iterable[ValueId]
    ) -> NodeId:
        """A new chunk."""
        inputs, outputs, node = tuple(inputs), tuple(outputs), NodeId(len(self.nodes))
        body = opaque([self.values[v].spec for v in inputs], [self.values[v].spec for v in outputs])
        self.bodies[body_id(body)] = body
        self.nodes[node] = Chunk(node, tags, pass_, inputs, outputs, CallWork(body_id(body)))
        return node

    def contribution(self, parameter: str) -> ValueId:
        """A new contribution to the gradient of *parameter*."""
        value = self.value(WEIGHT, Role.CONTRIBUTION, parameter)
        self.contributions[parameter] = (*self.contributions.get(parameter, ()), value)
        return value

    def build(self, leaves: Mapping[str, int | None] | None = None) -> Dag:
        """The DAG; *leaves* are the batch leaves with their batch dimensions."""
        names = {
            role: dict.fromkeys(v.name for v in self.values.values() if v.role is role)
            for role in (Role.PARAMETER, Role.BUFFER, Role.INPUT)
        }
        dims: Mapping[str, int | None] = leaves or dict.fromkeys(names[Role.INPUT], 0)
        return Dag(
            nodes=self.nodes,
            values=self.values,
            bodies=self.bodies,
            parameters={n: Parameter(n, WEIGHT, True) for n in names[Role.PARAMETER]},
            buffers={n: Buffer(n, STATISTIC, True) for n in names[Role.BUFFER]},
            batch=tuple(BatchLeaf(n, i, HIDDEN, d) for i, (n, d) in enumerate(dims.items())),
            batch_size=self.batch_size,
            batch_symbol="s0",
            captured_size=2,
            guards=("s0 >= 2",),
            loss_kind=LossKind.WEIGHTED if self.weights else LossKind.MEAN,
            losses=self.losses,
            weights=self.weights,
            contributions=self.contributions,
            buffer_updates=self.buffer_updates,
        )


def chain(
    num_stages: int,
    *,
    batch_size: int = 1024,
    tied: bool = False,
    detached: bool = False,
    skip: bool = False,
    multi: bool = False,
    buffer: bool = False,
    weighted: bool = False,
    whole: bool = False,
) -> Dag:
    """``num_stages`` ≥ 2 regions tagged PP, each with a weight, a forward chunk and a backward
    chunk.

    ``tied``: the last stage uses the first one's weight. ``detached``: the last stage reads the
    first one's weight without giving it a gradient. ``skip``: the first stage's result is read by
    every later one. ``multi``: each forward has, as the last one always has, a second result, which
    its backward reads. ``buffer``: the first forward reads and writes a buffer. ``weighted``: the
    loss comes with a weight. ``whole``: a second batch leaf, read by all forwards, is not divided.
    """
    assert num_stages >= 2
    b = Builder(batch_size)
    last = num_stages - 1
    x = b.value(HIDDEN, Role.INPUT, "inputs")
    mask = b.value(STATISTIC, Role.INPUT, "mask") if whole else None
    names = [f"w{s}" for s in range(num_stages)]
    if tied:
        names[last] = "w0"
    weights = {n: b.value(WEIGHT, Role.PARAMETER, n) for n in dict.fromkeys(names)}
    state = b.value(STATISTIC, Role.BUFFER, "count") if buffer else None
    seed = b.value(SCALAR, Role.SEED)
    hidden = [x]
    saved: list[list[ValueId]] = []
    for s in range(num_stages):
        reads = [hidden[s], weights[names[s]]]
        reads += [hidden[1]] if skip and s >= 2 else []
        reads += [weights["w0"]] if detached and s == last else []
        saved.append(list(reads))
        reads += [mask] if mask is not None else []
        writes = [b.value(SCALAR if s == last else HIDDEN)]
        if multi or s == last:  # the gradient of the loss needs something that its forward made
            writes.append(b.value(HIDDEN))
            saved[s].append(writes[-1])
        if weighted and s == last:
            b.weights = (b.value(SCALAR),)
            writes += b.weights
        if state is not None and s == 0:
            reads.append(state)
            b.buffer_updates["count"] = b.value(STATISTIC)
            writes.append(b.buffer_updates["count"])
        b.chunk((("PP", s),), Pass.FORWARD, reads, writes)
        hidden.append(writes[0])
    b.losses = (hidden[-1],)
    gradient, skipped = seed, list[ValueId]()
    for s in reversed(range(num_stages)):
        reads = [*saved[s], gradient] + (skipped if s == 0 else [])
        writes = [b.contribution(names[s])]
        if s:
            gradient = b.value(HIDDEN)
            writes.append(gradient)
        if skip and s >= 2:
            skipped.append(b.value(HIDDEN))
            writes.append(skipped[-1])
        b.chunk((("PP", s),), Pass.BACKWARD, reads, writes)
    return b.build({"inputs": 0} | ({"mask": None} if whole else {}))


@dataclass(frozen=True)
class Region:
    """One region of :func:`network`: the regions whose results it reads (none: the batch), and the
    weight it uses.
    """

    reads: tuple[int, ...]
    weight: int


def network(regions: Sequence[Region], *, batch_size: int, weighted: bool = False) -> Dag:
    """Regions tagged R, each with one forward and one backward chunk; all results that no region
    reads go to the last one, which makes the loss.
    """
    b = Builder(batch_size)
    x = b.value(HIDDEN, Role.INPUT, "inputs")
    weights = {
        w: b.value(WEIGHT, Role.PARAMETER, f"w{w}") for w in sorted({r.weight for r in regions})
    }
    seed = b.value(SCALAR, Role.SEED)
    last = len(regions) - 1
    used = {i for region in regions[:-1] for i in region.reads}
    reads = [set(region.reads) for region in regions]
    reads[last] |= set(range(last)) - used
    results: list[ValueId] = []
    for r, region in enumerate(regions):
        sources = [results[i] for i in sorted(reads[r])] or [x]
        outputs = [b.value(SCALAR if r == last else HIDDEN)]
        if weighted and r == last:
            b.weights = (b.value(SCALAR),)
            outputs += b.weights
        b.chunk((("R", r),), Pass.FORWARD, [*sources, weights[region.weight]], outputs)
        results.append(outputs[0])
    b.losses = (results[last],)
    gradients: dict[int, list[ValueId]] = {last: [seed]}
    for r in reversed(range(len(regions))):
        sources = [results[i] for i in sorted(reads[r])] or [x]
        outputs = [b.contribution(f"w{regions[r].weight}")]
        for i in sorted(reads[r]):
            gradients.setdefault(i, []).append(b.value(HIDDEN))
            outputs.append(gradients[i][-1])
        inputs = [*sources, weights[regions[r].weight], *gradients[r]]
        b.chunk((("R", r),), Pass.BACKWARD, inputs, outputs)
    return b.build()

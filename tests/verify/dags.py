"""Training DAGs made by hand: a chain of matrix products, small enough to read and real enough to
run.
"""

from piper.ids import NodeId, ValueId
from piper.ir.body import Body, Call, DType, Ref, Sequence, TensorSpec, body_id
from piper.ir.dag import (
    BatchLeaf,
    Buffer,
    Chunk,
    Dag,
    LossKind,
    Parameter,
    Pass,
    Role,
    Value,
)
from piper.ir.symbols import Expr
from piper.ops.compute import Call as CallWork

WIDTH = 3
ROWS = TensorSpec((Expr("s0"), WIDTH), DType.FLOAT64)
MATRIX = TensorSpec((WIDTH, WIDTH), DType.FLOAT64)
VECTOR = TensorSpec((WIDTH,), DType.FLOAT64)
SCALAR = TensorSpec((), DType.FLOAT64)


def _call(target: str, *args: object, result: TensorSpec) -> Call:
    refs = tuple(Ref(a) if isinstance(a, int) and not isinstance(a, bool) else a for a in args)
    return Call(target, refs, (), (result,))  # type: ignore[arg-type]


def _transposed(ref: int) -> Call:
    return Call("aten.permute.default", (Ref(ref), Sequence((1, 0))), (), (MATRIX,))


def _forward() -> Body:
    """(w, h) → h @ w"""
    return Body((MATRIX, ROWS), (_call("aten.mm.default", 1, 0, result=ROWS),), (2,))


def _forward_buffer() -> Body:
    """(w, h, b) → h @ w + b, 2 b: the buffer changes with each microbatch."""
    calls = (
        _call("aten.mm.default", 1, 0, result=ROWS),
        _call("aten.add.Tensor", 3, 2, result=ROWS),
        _call("aten.add.Tensor", 2, 2, result=VECTOR),
    )
    return Body((MATRIX, ROWS, VECTOR), calls, (4, 5))


def _loss() -> Body:
    """(w, h, t) → sum(h @ w * t), sum(t * t)"""
    calls = (
        _call("aten.mm.default", 1, 0, result=ROWS),
        _call("aten.mul.Tensor", 3, 2, result=ROWS),
        _call("aten.sum.default", 4, result=SCALAR),
        _call("aten.mul.Tensor", 2, 2, result=ROWS),
        _call("aten.sum.default", 6, result=SCALAR),
    )
    return Body((MATRIX, ROWS, ROWS), calls, (5, 7))


def _backward(*, last: bool, first: bool) -> Body:
    """(w, h, dy) → dw, dh; the last stage's dy is t * seed, given as (w, h, t, seed)."""
    inputs = (MATRIX, ROWS, ROWS, SCALAR) if last else (MATRIX, ROWS, ROWS)
    calls: list[Call] = []
    gradient = 2
    if last:
        calls.append(_call("aten.mul.Tensor", 2, 3, result=ROWS))
        gradient = 4
    base = len(inputs) + len(calls)
    calls.append(_transposed(1))
    calls.append(_call("aten.mm.default", base, gradient, result=MATRIX))
    outputs = [base + 1]
    if not first:
        calls.append(_transposed(0))
        calls.append(_call("aten.mm.default", gradient, base + 2, result=ROWS))
        outputs.append(base + 3)
    return Body(inputs, tuple(calls), tuple(outputs))


class _Maker:
    def __init__(self) -> None:
        self.values: dict[ValueId, Value] = {}
        self.nodes: dict[NodeId, Chunk] = {}
        self.bodies: dict[str, Body] = {}

    def value(self, spec: TensorSpec, role: Role = Role.ACTIVATION, name: str = "") -> ValueId:
        identity = ValueId(len(self.values))
        self.values[identity] = Value(identity, spec, role, name)
        return identity

    def chunk(self, tags, pass_: Pass, body: Body, inputs, outputs) -> None:
        identity = NodeId(len(self.nodes))
        self.bodies[body_id(body)] = body
        self.nodes[identity] = Chunk(
            identity, tags, pass_, tuple(inputs), tuple(outputs), CallWork(body_id(body))
        )


def chain(
    stages: int,
    batch: int,
    *,
    tied: bool = False,
    weighted: bool = False,
    skip: bool = False,
    buffer: bool = False,
) -> Dag:
    """``loss = sum(x @ w0 @ w1 … * t)`` with one region ``PP`` per matrix.

    ``tied``: the last stage uses ``w0``. ``weighted``: a weighted loss, weight ``sum(t * t)``.
    ``skip``: each middle stage multiplies the first stage's output instead of its predecessor's
    (the last one follows its predecessor), so that one value goes to several stages. ``buffer``:
    stage 0 adds and doubles a buffer.
    """
    make = _Maker()
    names = [f"w{s}" for s in range(stages)]
    if tied:
        names[-1] = names[0]
    weights = {name: make.value(MATRIX, Role.PARAMETER, name) for name in dict.fromkeys(names)}
    x, target = make.value(ROWS, Role.INPUT, "inputs"), make.value(ROWS, Role.INPUT, "targets")
    seed = make.value(SCALAR, Role.SEED)
    state = make.value(VECTOR, Role.BUFFER, "b") if buffer else None
    source = [x]
    updates: dict[str, ValueId] = {}
    for s in range(stages - 1):
        tags = (("PP", s),)
        h = make.value(ROWS)
        inputs, outputs, body = [weights[names[s]], source[s]], [h], _forward()
        if state is not None and s == 0:
            inputs.append(state)
            updates["b"] = make.value(VECTOR)
            outputs.append(updates["b"])
            body = _forward_buffer()
        make.chunk(tags, Pass.FORWARD, body, inputs, outputs)
        first_output = source[1] if len(source) > 1 else h
        source.append(first_output if skip and 0 < s < stages - 2 else h)
    last = stages - 1
    loss, weight = make.value(SCALAR), make.value(SCALAR)
    tags = (("PP", last),)
    make.chunk(
        tags, Pass.FORWARD, _loss(), [weights[names[last]], source[last], target], [loss, weight]
    )
    contributions: dict[str, list[ValueId]] = {name: [] for name in weights}
    gradient = None
    for s in reversed(range(stages)):
        dw = make.value(MATRIX, Role.CONTRIBUTION, names[s])
        contributions[names[s]].append(dw)
        inputs = [weights[names[s]], source[s]]
        inputs += [target, seed] if gradient is None else [gradient]
        outputs = [dw]
        if s:
            gradient = make.value(ROWS)
            outputs.append(gradient)
        body = _backward(last=s == last, first=s == 0)
        make.chunk((("PP", s),), Pass.BACKWARD, body, inputs, outputs)
    return Dag(
        nodes=make.nodes,
        values=make.values,
        bodies=make.bodies,
        parameters={n: Parameter(n, MATRIX, requires_grad=True) for n in weights},
        buffers={"b": Buffer("b", VECTOR, persistent=True)} if buffer else {},
        batch=(BatchLeaf("inputs", 0, ROWS, 0), BatchLeaf("targets", 1, ROWS, 0)),
        batch_size=batch,
        batch_symbol="s0",
        captured_size=2,
        guards=(),
        loss_kind=LossKind.WEIGHTED if weighted else LossKind.MEAN,
        losses=(loss,),
        weights=(weight,) if weighted else (),
        contributions={n: tuple(vs) for n, vs in contributions.items()},
        buffer_updates=updates,
    )


def handed_out_view() -> Dag:
    """``loss = sum(x @ w0 @ w1 * t)``, whose first forward also hands out the transpose of ``w0``,
    a view. A late chunk uses it for a second contribution to ``w1``.
    """
    make = _Maker()
    w0, w1 = (make.value(MATRIX, Role.PARAMETER, name) for name in ("w0", "w1"))
    x, target = make.value(ROWS, Role.INPUT, "inputs"), make.value(ROWS, Role.INPUT, "targets")
    seed = make.value(SCALAR, Role.SEED)
    h, view = make.value(ROWS), make.value(MATRIX)
    body = Body(
        (MATRIX, ROWS), (_call("aten.mm.default", 1, 0, result=ROWS), _transposed(0)), (2, 3)
    )
    make.chunk((("PP", 0),), Pass.FORWARD, body, [w0, x], [h, view])
    loss, weight, gradient = make.value(SCALAR), make.value(SCALAR), make.value(ROWS)
    dw0, dw1, late = (make.value(MATRIX, Role.CONTRIBUTION, name) for name in ("w0", "w1", "w1"))
    make.chunk((("PP", 1),), Pass.FORWARD, _loss(), [w1, h, target], [loss, weight])
    backward = _backward(last=True, first=False)
    make.chunk((("PP", 1),), Pass.BACKWARD, backward, [w1, h, target, seed], [dw1, gradient])
    backward = _backward(last=False, first=True)
    make.chunk((("PP", 0),), Pass.BACKWARD, backward, [w0, x, gradient], [dw0])
    scaled = Body((MATRIX, SCALAR), (_call("aten.mul.Tensor", 0, 1, result=MATRIX),), (2,))
    make.chunk((("PP", 2),), Pass.BACKWARD, scaled, [view, seed], [late])
    return Dag(
        nodes=make.nodes,
        values=make.values,
        bodies=make.bodies,
        parameters={n: Parameter(n, MATRIX, requires_grad=True) for n in ("w0", "w1")},
        buffers={},
        batch=(BatchLeaf("inputs", 0, ROWS, 0), BatchLeaf("targets", 1, ROWS, 0)),
        batch_size=4,
        batch_symbol="s0",
        captured_size=2,
        guards=(),
        loss_kind=LossKind.MEAN,
        losses=(loss,),
        weights=(),
        contributions={"w0": (dw0,), "w1": (dw1, late)},
        buffer_updates={},
    )

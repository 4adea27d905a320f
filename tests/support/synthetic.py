"""Training DAGs made without a model: a chain of stages, each with one weight. For planner and verifier tests."""

from piper.dtypes import DType
from piper.ids import BodyId, NodeId, ValueId
from piper.ir.body import Body, Call, Ref, TensorSpec, body_id
from piper.ir.dag import (
    BatchLeaf,
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

WIDTH = 8
HIDDEN = TensorSpec((Expr("s0"), WIDTH), DType.FLOAT64)
WEIGHT = TensorSpec((WIDTH, WIDTH), DType.FLOAT64)
SCALAR = TensorSpec((), DType.FLOAT64)


def _body(inputs: tuple[TensorSpec, ...], *calls: Call, outputs: tuple[int, ...]) -> Body:
    return Body(inputs, calls, outputs)


def _mm(a: int, b: int, result: TensorSpec) -> Call:
    return Call("aten.mm.default", (Ref(a), Ref(b)), (), (result,))


def _t(a: int, result: TensorSpec) -> Call:
    return Call("aten.t.default", (Ref(a),), (), (result,))


HIDDEN_T = TensorSpec((WIDTH, Expr("s0")), DType.FLOAT64)
FORWARD = _body((HIDDEN, WEIGHT), _mm(0, 1, HIDDEN), outputs=(2,))
# loss = sum(h @ W), so the gradient of h @ W is a full tensor of the seed
LAST_FORWARD = _body(
    (HIDDEN, WEIGHT),
    _mm(0, 1, HIDDEN),
    Call("aten.sum.default", (Ref(2),), (), (SCALAR,)),
    outputs=(3,),
)
_BACKWARD = (_t(0, HIDDEN_T), _t(1, WEIGHT))
BACKWARD = _body(
    (HIDDEN, WEIGHT, HIDDEN), *_BACKWARD, _mm(3, 2, WEIGHT), _mm(2, 4, HIDDEN), outputs=(5, 6)
)
FIRST_BACKWARD = _body((HIDDEN, HIDDEN), _t(0, HIDDEN_T), _mm(2, 1, WEIGHT), outputs=(3,))
LAST_BACKWARD = _body(
    (HIDDEN, WEIGHT, SCALAR),
    Call("aten.expand_as.default", (Ref(2), Ref(0)), (), (HIDDEN,)),
    _t(0, HIDDEN_T),
    _t(1, WEIGHT),
    _mm(4, 3, WEIGHT),
    _mm(3, 5, HIDDEN),
    outputs=(6, 7),
)


def chain(num_stages: int, *, batch_size: int = 1024) -> Dag:
    """``loss = sum(x W0 W1 … )`` over ``num_stages`` ≥ 2 regions tagged PP; one forward and one backward chunk each."""
    builder = _Chain(num_stages, batch_size)
    return builder.build()


class _Chain:
    def __init__(self, num_stages: int, batch_size: int) -> None:
        assert num_stages >= 2
        self.num_stages, self.batch_size = num_stages, batch_size
        self.values: dict[ValueId, Value] = {}
        self.nodes: dict[NodeId, Chunk] = {}
        self.bodies: dict[BodyId, Body] = {}

    def value(self, spec: TensorSpec, role: Role, name: str = "") -> ValueId:
        value = ValueId(len(self.values))
        self.values[value] = Value(value, spec, role, name)
        return value

    def chunk(
        self,
        stage: int,
        pass_: Pass,
        body: Body,
        inputs: tuple[ValueId, ...],
        outputs: tuple[ValueId, ...],
    ) -> None:
        node = NodeId(len(self.nodes))
        self.bodies[body_id(body)] = body
        self.nodes[node] = Chunk(
            node, (("PP", stage),), pass_, inputs, outputs, CallWork(body_id(body))
        )

    def build(self) -> Dag:
        last = self.num_stages - 1
        hidden = [self.value(HIDDEN, Role.INPUT, "inputs")]
        weights = [self.value(WEIGHT, Role.PARAMETER, f"w{s}") for s in range(self.num_stages)]
        seed = self.value(SCALAR, Role.SEED)
        for s in range(last):
            hidden.append(self.value(HIDDEN, Role.ACTIVATION))
            self.chunk(s, Pass.FORWARD, FORWARD, (hidden[s], weights[s]), (hidden[s + 1],))
        loss = self.value(SCALAR, Role.ACTIVATION)
        self.chunk(last, Pass.FORWARD, LAST_FORWARD, (hidden[last], weights[last]), (loss,))
        contributions: dict[str, tuple[ValueId, ...]] = {}
        gradient = seed
        for s in reversed(range(self.num_stages)):
            dw = self.value(WEIGHT, Role.CONTRIBUTION, f"w{s}")
            contributions[f"w{s}"] = (dw,)
            if s == 0:
                self.chunk(s, Pass.BACKWARD, FIRST_BACKWARD, (hidden[0], gradient), (dw,))
                continue
            dh = self.value(HIDDEN, Role.ACTIVATION)
            body = LAST_BACKWARD if s == last else BACKWARD
            self.chunk(s, Pass.BACKWARD, body, (hidden[s], weights[s], gradient), (dw, dh))
            gradient = dh
        return Dag(
            nodes=dict(self.nodes),
            values=self.values,
            bodies=self.bodies,
            parameters={f"w{s}": Parameter(f"w{s}", WEIGHT, True) for s in range(self.num_stages)},
            buffers={},
            batch=(BatchLeaf("inputs", 0, HIDDEN, 0),),
            batch_size=self.batch_size,
            batch_symbol="s0",
            captured_size=2,
            guards=("s0 >= 2",),
            loss_kind=LossKind.MEAN,
            losses=(loss,),
            weights=(),
            contributions=contributions,
            buffer_updates={},
        )

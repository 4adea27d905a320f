"""Plans written by hand: two layers with a squared loss, as a pipeline over two devices and as two
replicas.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from msgspec.structs import replace as replace_struct

from piper.dtypes import DType
from piper.ids import COMPUTE, BodyId, DeviceId, EventId, NodeId, Slot, Stream, ValueId
from piper.ir.body import Body, Call, Ref, TensorSpec, body_id
from piper.ir.body import Sequence as Items
from piper.ir.dag import (
    BatchLeaf,
    Chunk,
    Comm,
    Dag,
    LossKind,
    Node,
    Parameter,
    Pass,
    Role,
    SplitDim,
    Value,
)
from piper.ir.symbols import Expr
from piper.ops.accumulate import Accumulate, Sum
from piper.ops.all_reduce import AllReduce, AllReduceBucket
from piper.ops.base import Instruction, Message
from piper.ops.compute import Call as CallWork
from piper.ops.compute import Compute
from piper.ops.free import Free
from piper.ops.load_input import LoadInput
from piper.ops.p2p import PostReceive, Send, Transfer
from piper.ops.report import Report
from piper.ops.update import OptimizerStep, Update
from piper.ops.wait import Wait
from piper.plan.model import CommunicatorInfo, DevicePlan, Plan, SlotInfo

ROWS, WIDTH = 3, 4
MICROBATCHES = 2


def _spec(*shape: int | Expr) -> TensorSpec:
    return TensorSpec(shape, DType.FLOAT64)


N = Expr("n")
ACT, WEIGHT, SCALAR = _spec(N, WIDTH), _spec(WIDTH, WIDTH), _spec()


def _call(target: str, result: TensorSpec, *args: object) -> Call:
    return Call(f"aten.{target}", args, (), (result,))


FORWARD_0 = Body(
    (ACT, WEIGHT),
    (_call("mm.default", ACT, Ref(0), Ref(1)), _call("tanh.default", ACT, Ref(2))),
    (3,),
)
FORWARD_1 = Body(
    (ACT, WEIGHT, ACT),
    (
        _call("mm.default", ACT, Ref(0), Ref(1)),
        _call("sub.Tensor", ACT, Ref(3), Ref(2)),
        _call("mul.Tensor", ACT, Ref(4), Ref(4)),
        _call("mean.default", SCALAR, Ref(5)),
    ),
    (6, 4),
)
BACKWARD_1 = Body(
    (ACT, WEIGHT, ACT, SCALAR),
    (
        _call("mul.Tensor", ACT, Ref(2), Expr(f"2 / ({WIDTH}*n)")),
        _call("mul.Tensor", ACT, Ref(4), Ref(3)),
        _call("t.default", ACT, Ref(0)),
        _call("mm.default", WEIGHT, Ref(6), Ref(5)),
        _call("t.default", WEIGHT, Ref(1)),
        _call("mm.default", ACT, Ref(5), Ref(8)),
    ),
    (7, 9),
)
BACKWARD_0 = Body(
    (ACT, ACT, ACT),
    (
        _call("tanh_backward.default", ACT, Ref(2), Ref(1)),
        _call("t.default", ACT, Ref(0)),
        _call("mm.default", WEIGHT, Ref(4), Ref(3)),
    ),
    (5,),
)
BODIES = {body_id(b): b for b in (FORWARD_0, FORWARD_1, BACKWARD_1, BACKWARD_0)}


@dataclass
class Builder:
    """One device's instructions; slots by name."""

    device: int
    slots: dict[str, SlotInfo] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)

    def slot(self, name: str, shape: Sequence[int], role: Role = Role.ACTIVATION) -> Slot:
        known = name.partition("/")[0] if role is not Role.ACTIVATION else name
        info = SlotInfo(ValueId(len(self.slots)), role, known, Message(tuple(shape), "float64"))
        self.slots.setdefault(name, info)
        return Slot(list(self.slots).index(name))

    def __getitem__(self, name: str) -> Slot:
        return Slot(list(self.slots).index(name))

    def add(
        self, cls: type[Instruction], node: int, stream: str = COMPUTE, **fields: object
    ) -> None:
        self.instructions.append(cls(node=NodeId(node), stream=Stream(stream), **fields))

    def load(self, name: str, leaf: int, microbatch: int) -> None:
        slot = self.slot(name, (ROWS, WIDTH))
        message = Message((ROWS, WIDTH), "float64")
        self.add(LoadInput, -1, slot=slot, leaf=leaf, microbatch=microbatch, message=message)

    def compute(
        self, node: int, body: Body, inputs: str, outputs: dict[str, Sequence[int]], microbatch: int
    ) -> None:
        self.add(
            Compute,
            node,
            body=body_id(body),
            inputs=tuple(self[name] for name in inputs.split()),
            outputs=tuple(self.slot(name, shape) for name, shape in outputs.items()),
            microbatch=microbatch,
        )

    def free(self, *names: str, stream: str = COMPUTE) -> None:
        self.add(Free, -1, stream, slots=tuple(self[name] for name in names))

    def plan(self) -> DevicePlan:
        return DevicePlan(
            DeviceId(self.device), tuple(self.slots.values()), tuple(self.instructions)
        )


H, W = (ROWS, WIDTH), (WIDTH, WIDTH)


def _nodes() -> dict[NodeId, Node]:
    """Labels for errors: F and B of each stage and microbatch, ids 0–7; then transfers, sums,
    updates.
    """
    nodes: dict[NodeId, Node] = {}
    work = CallWork(BodyId("0"))
    for stage in range(2):
        for number, pass_ in enumerate((Pass.FORWARD, Pass.BACKWARD)):
            for m in range(MICROBATCHES):
                node = NodeId(4 * stage + 2 * number + m)
                tags = (("PP", stage), ("MB", m))
                nodes[node] = Chunk(node, tags, pass_, (), (), work)
    for m in range(MICROBATCHES):
        tags = (("PP", 0), ("MB", m))
        stream = Stream("p2p")
        for number, pass_ in ((8, Pass.FORWARD), (10, Pass.BACKWARD)):
            node = NodeId(number + m)
            nodes[node] = Comm(node, tags, pass_, (), (), Transfer(), (), stream)
    for stage in range(2):
        sums, reduce, update = NodeId(12 + stage), NodeId(14 + stage), NodeId(16 + stage)
        tags = (("PP", stage),)
        nodes[sums] = Chunk(sums, tags, Pass.BACKWARD, (), (), Sum())
        nodes[reduce] = Comm(reduce, tags, Pass.UPDATE, (), (), AllReduce(), (), Stream("reduce"))
        nodes[update] = Chunk(update, tags, Pass.UPDATE, (), (), Update(()))
    return nodes


def _plan(
    devices: Sequence[DevicePlan], communicators: dict[str, tuple[int, ...]], replicas: int
) -> Plan:
    dag = Dag(
        nodes=_nodes(),
        values={ValueId(0): Value(ValueId(0), WEIGHT, Role.PARAMETER, "w0")},
        bodies=BODIES,
        parameters={n: Parameter(n, WEIGHT, True) for n in ("w0", "w1")},
        buffers={},
        batch=(BatchLeaf("inputs", 0, ACT, 0), BatchLeaf("targets", 1, ACT, 0)),
        batch_size=ROWS,
        captured_size=ROWS,
        batch_symbol="n",
        guards=(),
        loss_kind=LossKind.MEAN,
        losses=(),
        weights=(),
        contributions={},
        buffer_updates={},
        splits=(SplitDim("MB", MICROBATCHES),),
    )
    infos = tuple(
        CommunicatorInfo(name, tuple(DeviceId(d) for d in members))
        for name, members in communicators.items()
    )
    return Plan(
        num_devices=len(devices),
        dag=dag,
        bindings={"n": ROWS},
        microbatch_size=ROWS,
        num_microbatches=MICROBATCHES,
        num_replicas=replicas,
        seed_value=1.0 / (replicas * MICROBATCHES),
        communicators=infos,
        devices=tuple(devices),
    )


def _accumulate(b: Builder, node: int, weight: str, m: int) -> None:
    """Sum microbatch m's contribution ``g{m}`` of *weight*; the first total is the first
    contribution.
    """
    if m == 0:
        return
    b.slot(f"total_{weight}", W)
    b.add(
        Accumulate,
        node,
        totals=(b[f"total_{weight}"],),
        left=(b[f"g_{weight}_0"],),
        right=(b[f"g_{weight}_{m}"],),
    )
    b.free(f"g_{weight}_0", f"g_{weight}_{m}")


def _update(b: Builder, node: int, weight: str, gradient: str) -> None:
    b.add(
        OptimizerStep,
        node,
        names=(weight,),
        parameters=(b[weight],),
        gradients=(b[gradient],),
    )
    b.free(gradient)


def pipeline() -> Plan:
    """Layer 0 on device 0, layer 1 on device 1, two microbatches, all forwards first."""
    first, second = Builder(0), Builder(1)
    first.slot("w0", W, Role.PARAMETER)
    second.slot("w1", W, Role.PARAMETER)
    second.slot("seed", (), Role.SEED)
    message = Message(H, "float64")
    forth, back = {"communicator": "p2p:0>1"}, {"communicator": "p2p:1>0"}
    pair = {"sender": DeviceId(0), "receiver": DeviceId(1), "message": message}
    riap = {"sender": DeviceId(1), "receiver": DeviceId(0), "message": message}
    for m in range(MICROBATCHES):
        first.load(f"x{m}", 0, m)
        first.compute(m, FORWARD_0, f"x{m} w0", {f"h{m}": H}, m)
        first.add(Send, 8 + m, "p2p:0>1", slot=first[f"h{m}"], **forth, **pair)
    for m in range(MICROBATCHES):
        slot, event = first.slot(f"gh{m}", H), EventId(m)
        first.add(PostReceive, 10 + m, "p2p:1>0", slot=slot, record=event, **back, **riap)
    for m in range(MICROBATCHES):
        first.add(Wait, 10 + m, event=EventId(m))
        first.compute(2 + m, BACKWARD_0, f"x{m} h{m} gh{m}", {f"g_w0_{m}": W}, m)
        first.free(f"x{m}", f"h{m}", f"gh{m}")
        _accumulate(first, 12, "w0", m)
    _update(first, 16, "w0", "total_w0")

    for m in range(MICROBATCHES):
        slot, event = second.slot(f"h{m}", H), EventId(m)
        second.add(PostReceive, 8 + m, "p2p:0>1", slot=slot, record=event, **forth, **pair)
    for m in range(MICROBATCHES):
        second.load(f"t{m}", 1, m)
        second.add(Wait, 8 + m, event=EventId(m))
        second.compute(4 + m, FORWARD_1, f"h{m} w1 t{m}", {f"loss{m}": (), f"d{m}": H}, m)
        second.add(Report, 4 + m, name="loss", slot=second[f"loss{m}"], microbatch=m)
        second.free(f"loss{m}", f"t{m}")
    for m in range(MICROBATCHES):
        outputs = {f"g_w1_{m}": W, f"gh{m}": H}
        second.compute(6 + m, BACKWARD_1, f"h{m} w1 d{m} seed", outputs, m)
        second.add(Send, 10 + m, "p2p:1>0", slot=second[f"gh{m}"], **back, **riap)
        second.free(f"gh{m}", stream="p2p:1>0")
        second.free(f"h{m}", f"d{m}")
        _accumulate(second, 13, "w1", m)
    _update(second, 17, "w1", "total_w1")
    members = {"p2p:0>1": (0, 1), "p2p:1>0": (1, 0)}
    return _plan([first.plan(), second.plan()], members, replicas=1)


def replicas() -> Plan:
    """Both layers on two devices, two microbatches each; gradients summed in one bucket."""
    return _plan([_replica(0), _replica(1)], {"reduce": (0, 1)}, replicas=2)


def _replica(device: int) -> DevicePlan:
    b = Builder(device)
    for name in ("w0", "w1"):
        b.slot(name, W, Role.PARAMETER)
    b.slot("seed", (), Role.SEED)
    for local in range(MICROBATCHES):
        m = device * MICROBATCHES + local
        b.load(f"x{local}", 0, m)
        b.load(f"t{local}", 1, m)
        b.compute(local, FORWARD_0, f"x{local} w0", {f"h{local}": H}, m)
        outputs = {f"loss{local}": (), f"d{local}": H}
        b.compute(4 + local, FORWARD_1, f"h{local} w1 t{local}", outputs, m)
        b.add(Report, 4 + local, name="loss", slot=b[f"loss{local}"], microbatch=m)
        outputs = {f"g_w1_{local}": W, f"gh{local}": H}
        b.compute(6 + local, BACKWARD_1, f"h{local} w1 d{local} seed", outputs, m)
        b.compute(2 + local, BACKWARD_0, f"x{local} h{local} gh{local}", {f"g_w0_{local}": W}, m)
        b.free(*(f"{n}{local}" for n in ("x", "t", "h", "loss", "d", "gh")))
        _accumulate(b, 12, "w0", local)
        _accumulate(b, 13, "w1", local)
    b.add(
        AllReduceBucket,
        14,
        "reduce",
        communicator="reduce",
        members=(DeviceId(0), DeviceId(1)),
        inputs=(b["total_w0"], b["total_w1"]),
        outputs=(b.slot("sum_w0", W), b.slot("sum_w1", W)),
        messages=(Message(W, "float64"), Message(W, "float64")),
        record=EventId(0),
    )
    b.add(Wait, 14, event=EventId(0))
    b.free("total_w0", "total_w1")
    _update(b, 16, "w0", "sum_w0")
    _update(b, 17, "w1", "sum_w1")
    return b.plan()


def with_body(plan: Plan, device: int, node: int, body: Body) -> Plan:
    """*plan* with the compute of *node* on *device* calling *body* instead."""
    mine = plan.devices[device]
    instructions = tuple(
        replace_struct(i, body=body_id(body)) if isinstance(i, Compute) and i.node == node else i
        for i in mine.instructions
    )
    assert instructions != mine.instructions
    devices = list(plan.devices)
    devices[device] = replace_struct(mine, instructions=instructions)
    bodies = {**plan.dag.bodies, body_id(body): body}
    return replace(plan, devices=tuple(devices), dag=replace(plan.dag, bodies=bodies))


BAD_BODY = replace_struct(
    BACKWARD_1,
    calls=(
        _call("view.default", ACT, Ref(2), Items((WIDTH * 1000,))),
        *BACKWARD_1.calls[1:],
    ),
)
"""BACKWARD_1 with a call that fails when it runs."""


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        n: torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=generator) for n in ("w0", "w1")
    }


def batch(step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x, t = torch.randn(2, rows, WIDTH, dtype=torch.float64, generator=generator)
    return x, t


def eager(steps: int, rows: int, optimizer: object) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of plain PyTorch on the whole batch."""
    own = {n: w.clone().requires_grad_() for n, w in weights().items()}
    stepper = optimizer(list(own.values()))
    losses = []
    for step in range(steps):
        x, t = batch(step, rows)
        loss = ((torch.tanh(x @ own["w0"]) @ own["w1"] - t) ** 2).mean()
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        losses.append(loss.item())
    return losses, {n: w.detach() for n, w in own.items()}

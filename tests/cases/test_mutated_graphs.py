"""A captured graph with one operator or constant changed is refused, naming where it parts; rounding
is not.
"""

import dataclasses

import msgspec
import pytest
import torch
from tests.cases.equal import mse, randn
from torch import nn

import piper
from piper.api.programs import Programs, model_tensors
from piper.api.trial import Trial
from piper.api.trial.graph import allowed_error
from piper.capture.partition import Captured
from piper.errors import CaptureError
from piper.ir.body import Call, body_id

F = nn.functional
STRATEGY = piper.strategies.pipeline("1f1b", [[0], [1]], 2)


class Attention(nn.Module):
    """The bias of the keys has no gradient but rounding; the softmax is in float32."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        with piper.annotate("PP", 0):
            h = F.gelu(self.v(x)) * 0.5 + x
        with piper.annotate("PP", 1):
            scores = self.q(h) @ self.k(h).transpose(-1, -2) / 3.0
            return torch.softmax(scores, -1, dtype=torch.float32).to(h.dtype) @ h


def batch(dtype):
    return randn(8, 5, 8).to(dtype), randn(8, 5, 8, seed=1).to(dtype)


def compared(model, dtype, mutate=None):
    model = model.to(dtype)
    programs = Programs(model, mse, STRATEGY)
    program = programs.training(batch(dtype))
    if mutate is not None:
        captured = program.captured
        dag = with_bodies(captured.dag, mutate)
        program = dataclasses.replace(program, captured=Captured(dag, captured.constants))
    Trial(programs, batch(dtype), 0).after_capture(program)
    return program


def with_bodies(dag, mutate):
    """*dag* with the first call that *mutate* changes changed, in one chunk."""
    for chunk in dag.chunks():
        body = dag.bodies[chunk.work.body]
        for number, call in enumerate(body.calls):
            if (other := mutate(call)) is None:
                continue
            calls = (*body.calls[:number], other, *body.calls[number + 1 :])
            changed = msgspec.structs.replace(body, calls=calls)
            work = msgspec.structs.replace(chunk.work, body=body_id(changed))
            node = msgspec.structs.replace(chunk, work=work)
            return dataclasses.replace(
                dag,
                bodies={**dag.bodies, body_id(changed): changed},
                nodes={**dag.nodes, chunk.id: node},
            )
    raise AssertionError("nothing was changed")


def constant(old, new):
    def mutate(call):
        args = tuple(new if a == old and isinstance(a, float) else a for a in call.args)
        return msgspec.structs.replace(call, args=args) if args != call.args else None

    return mutate


def operator(old, new):
    def mutate(call: Call):
        return msgspec.structs.replace(call, target=new) if call.target == old else None

    return mutate


MUTATIONS = {
    "a constant": (constant(0.5, 0.52), "region {'PP': 0}"),
    "another constant": (constant(3.0, 3.1), "region {'PP': 1}"),
    "an operator": (operator("aten.gelu.default", "aten.silu.default"), "region {'PP': 0}"),
    "of the backward": (
        operator("aten.gelu_backward.default", "aten.mul.Tensor"),
        "it is the backward",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_changed_graph_is_refused_where_it_parts(name, dtype):
    mutate, where = MUTATIONS[name]
    with pytest.raises(CaptureError, match="does not compute what the model computes") as raised:
        compared(Attention(), dtype, mutate)
    assert where in str(raised.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_rounding_is_not(dtype):
    model = Attention()
    program = compared(model, dtype)
    allowed = allowed_error(program.captured.dag, model_tensors(model), None)
    assert allowed <= {torch.float64: 1e-5, torch.float32: 2e-3}[dtype]


def test_casts_inside_autocast_are_roundings_of_their_type():
    class Casting(Attention):
        def forward(self, x):
            with piper.annotate("PP", 0):
                h = self.v(x)
            with piper.annotate("PP", 1), torch.autocast("cpu", torch.bfloat16):
                return self.q(self.q(h)).float()

    compared(Casting(), torch.float32)
    with pytest.raises(CaptureError):
        compared(Casting(), torch.float32, operator("aten.t.default", "aten.neg.default"))

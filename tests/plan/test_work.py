import pytest

from piper.dtypes import DType
from piper.ir.body import Body, Call, Ref, TensorSpec
from piper.ir.symbols import Expr
from piper.plan.work import body_work

F32 = DType.FLOAT32


def spec(*shape):
    return TensorSpec(tuple(Expr(d) if isinstance(d, str) else d for d in shape), F32)


def work(target, inputs, result):
    call = Call(target, tuple(Ref(i) for i in range(len(inputs))), (), (result,))
    return body_work(Body(tuple(inputs), (call,), (len(inputs),)), {"s0": 4})


@pytest.mark.parametrize(
    ("target", "inputs", "result", "flops"),
    [
        ("aten.mm.default", [spec("s0", 8), spec(8, 16)], spec("s0", 16), 2 * 4 * 8 * 16),
        (
            "aten.addmm.default",
            [spec(16), spec("s0", 8), spec(8, 16)],
            spec("s0", 16),
            2 * 4 * 8 * 16,
        ),
        ("aten.bmm.default", [spec(3, 4, 5), spec(3, 5, 6)], spec(3, 4, 6), 2 * 3 * 4 * 5 * 6),
        (
            "aten.convolution.default",
            [spec("s0", 3, 8, 8), spec(5, 3, 3, 3)],
            spec("s0", 5, 6, 6),
            2 * 4 * 5 * 36 * 27,
        ),
        ("aten.add.Tensor", [spec("s0", 8), spec("s0", 8)], spec("s0", 8), 0),
    ],
)
def test_work_of_one_call(target, inputs, result, flops):
    found = work(target, inputs, result)
    assert found.flops == flops
    touched = [*inputs, result]
    assert found.nbytes == sum(s.nbytes({"s0": 4}) for s in touched)


def test_views_are_no_work():
    assert work("aten.view.default", [spec("s0", 8)], spec(8, "s0")).calls == ()


def test_results_are_picked_without_work():
    """A call with two results, of which the second is multiplied."""
    body = Body(
        (spec(2, 8), spec(8, 4)),
        (
            Call("aten.split_like.default", (Ref(0),), (), (spec(1, 8), spec(2, 8))),
            Call("operator.getitem", (Ref(2), 1), (), (spec(2, 8),)),
            Call("aten.mm.default", (Ref(3), Ref(1)), (), (spec(2, 4),)),
        ),
        (4,),
    )
    found = body_work(body, {})
    assert [call.flops for call in found.calls] == [0, 2 * 2 * 8 * 4]

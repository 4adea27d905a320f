"""Bodies as code, against the same operators called by hand."""

import gc
import weakref

import pytest
import torch

from piper.dtypes import DType
from piper.errors import CaptureError, PlanError
from piper.ir.body import Body, Call, Const, Literal, Ref, Sequence, TensorSpec
from piper.ir.symbols import Expr
from piper.ops.base import RandomKey
from piper.runtime.code import adding_function, chunk_function, chunk_source

CPU = torch.device("cpu")
ROWS = TensorSpec((Expr("s0"), 4), DType.FLOAT64)
SCALAR = TensorSpec((), DType.FLOAT64)
KEY = RandomKey(seed=1, step=2, microbatch=3, ordinals=(5, 6))


def call(target: str, *args: object, rng: int | None = None, **kwargs: object) -> Call:
    return Call(target, args, tuple(kwargs.items()), (ROWS,), rng)


def body(*calls: Call, outputs: tuple[int, ...], inputs: int = 1, rngs: int = 0) -> Body:
    return Body((ROWS,) * inputs, calls, outputs, rngs)


def run(made: Body, *inputs: torch.Tensor, s0: int = 3, key: RandomKey | None = None):
    with torch.no_grad():
        return chunk_function(made, {"s0": s0}, CPU)(list(inputs), key)


X = torch.arange(12, dtype=torch.float64).reshape(3, 4)


def test_arguments_of_every_form():
    literal = Literal(TensorSpec((2, 2), DType.FLOAT64), (1.0, 2.0, 3.0, 4.0))
    made = body(
        call("aten.view.default", Ref(0), Sequence((Expr("2*s0"), 2))),
        call("aten.mm.default", Ref(1), literal),
        call("aten.clamp.default", Ref(2), None, Const("float", "inf")),
        call("aten.full.default", Sequence((Expr("s0"),)), -1.5, dtype=Const("dtype", "float32")),
        call("aten.sum.dim_IntList", Ref(3), Sequence((1,)), True),
        outputs=(3, 4, 5),
    )
    clamped, filled, summed = run(made, X)
    expected = X.view(6, 2) @ torch.tensor([[1.0, 2], [3, 4]], dtype=torch.float64)
    assert torch.equal(clamped, expected)
    assert torch.equal(filled, torch.full((3,), -1.5))
    assert filled.dtype == torch.float32
    assert torch.equal(summed, expected.sum(1, keepdim=True))


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_one_body_serves_every_size(rows):
    made = body(call("aten.new_zeros.default", Ref(0), Sequence((Expr("s0 + 1"), 4))), outputs=(1,))
    x = torch.zeros(rows, 4, dtype=torch.float64)
    assert run(made, x, s0=rows)[0].shape == (rows + 1, 4)


@pytest.mark.parametrize(
    ("const", "check"),
    [
        (Const("dtype", "bfloat16"), lambda t: t.dtype == torch.bfloat16),
        (Const("dtype", "bool"), lambda t: t.dtype == torch.bool),
    ],
)
def test_element_types(const, check):
    made = body(call("aten._to_copy.default", Ref(0), dtype=const), outputs=(1,))
    assert check(run(made, X)[0])


def test_here_is_the_device_that_runs_the_body():
    made = body(
        call("aten.empty.memory_format", Sequence((2,)), device=Const("device", "here")),
        outputs=(1,),
    )
    assert chunk_function(made, {}, torch.device("meta"))([X], None)[0].device.type == "meta"
    assert run(made, X)[0].device.type == "cpu"


def test_results_of_multi_result_calls():
    made = body(
        call("aten.split.Tensor", Ref(0), 2, 1),
        call("operator.getitem", Ref(1), 1),
        call("operator.getitem", Ref(1), 0),
        outputs=(2, 3),
    )
    second, first = run(made, X)
    assert torch.equal(second, X[:, 2:])
    assert torch.equal(first, X[:, :2])


def test_an_input_may_be_an_output_and_unused_inputs_are_ignored():
    second_input = X + 1
    results = run(body(outputs=(1, 1), inputs=3), X, second_input, X)
    assert all(result is second_input for result in results)
    assert len(results) == 2


def test_values_are_given_up_after_their_last_use():
    alive: list[int] = []
    references: list[weakref.ref[torch.Tensor]] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            gc.collect()
            alive.append(sum(r() is not None for r in references))
            references.append(weakref.ref(result))
            return result

    chain = [call("aten.add.Tensor", Ref(i), 1.0) for i in range(6)]
    with Watch():
        run(body(*chain, outputs=(6,)), X)
    # before each call at most its own argument is left
    assert alive == [0, 1, 1, 1, 1, 1]


def test_outputs_that_are_added_are_added_and_given_up():
    """To one total each, as soon as they are made; the same value to two, one that later calls
    read, and one that is an input.
    """
    made = body(
        call("aten.add.Tensor", Ref(0), 1.0),
        call("aten.mul.Tensor", Ref(1), 2.0),
        call("aten.neg.default", Ref(2)),
        outputs=(1, 3, 2, 2, 0),
    )
    totals = [torch.full_like(X, 10.0) for _ in range(4)]
    function = adding_function(made, {"s0": 3}, CPU, (0, 2, 3, 4))
    (kept,) = function([X], None, totals)
    twice = (X + 1) * 2
    assert torch.equal(kept, -twice)
    for total, added in zip(totals, (X + 1, twice, twice, X), strict=True):
        assert torch.equal(total, 10 + added)


def test_one_output_that_is_added_is_alive_at_a_time():
    alive: list[int] = []
    references: list[weakref.ref[torch.Tensor]] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mul.Tensor:
                alive.append(sum(r() is not None for r in references))
                references.append(weakref.ref(result))
            return result

    made = body(*(call("aten.mul.Tensor", Ref(0), float(i)) for i in range(3)), outputs=(1, 2, 3))
    totals = [torch.zeros_like(X) for _ in range(3)]
    with Watch():
        assert adding_function(made, {"s0": 3}, CPU, (0, 1, 2))([X], None, totals) == ()
    assert alive == [0, 0, 0]
    assert [torch.equal(t, X * i) for i, t in enumerate(totals)] == [True] * 3


def test_calls_that_nothing_reads_are_left_out():
    made = body(
        call("aten.add.Tensor", Ref(0), 1.0), call("aten.mul.Tensor", Ref(0), 2.0), outputs=(1,)
    )
    assert "mul" not in chunk_source(made, {"s0": 3}, CPU)
    assert torch.equal(run(made, X)[0], X + 1)


def test_equal_bodies_share_their_code():
    first = body(call("aten.neg.default", Ref(0)), outputs=(1,))
    second = body(call("aten.neg.default", Ref(0)), outputs=(1,))
    made = chunk_function(first, {"s0": 3}, CPU)
    assert made is chunk_function(second, {"s0": 3}, CPU)
    assert made is not chunk_function(second, {"s0": 4}, CPU)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("aten.mn.default", r"'aten.mn.default' does not exist .*did you mean 'm"),
        ("aten.mm.defalt", r"'aten.mm.defalt' does not exist .*did you mean 'default'"),
        ("nonsense", "does not exist"),
        ("nowhere.op.default", "does not exist"),
    ],
)
def test_unknown_operators_are_named(target, message):
    with pytest.raises(PlanError, match=message):
        chunk_function(body(call(target, Ref(0)), outputs=(1,)), {"s0": 3}, CPU)


def test_random_calls_draw_from_their_own_streams():
    made = body(
        call("aten.bernoulli.p", Ref(0), 0.5, rng=0),
        call("aten.bernoulli.p", Ref(0), 0.5, rng=1),
        outputs=(1, 2),
        rngs=2,
    )
    big = torch.zeros(40, 40, dtype=torch.float64)
    first, second = run(made, big, key=KEY)
    again = run(made, big, key=KEY)
    other = run(made, big, key=RandomKey(1, 2, 4, (5, 6)))
    swapped = run(made, big, key=RandomKey(1, 2, 3, (6, 5)))
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])
    assert torch.equal(first, swapped[1])
    assert not torch.equal(first, second)
    assert not torch.equal(first, other[0])


def test_random_calls_leave_the_global_state_alone():
    made = body(call("aten.bernoulli.p", Ref(0), 0.5, rng=0), outputs=(1,), rngs=1)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    run(made, X, key=KEY)
    assert torch.equal(torch.rand(3), expected)


def test_a_random_operator_that_takes_no_generator_is_refused_by_name():
    dropout = 0.5
    made = body(
        call(
            "aten._scaled_dot_product_flash_attention_for_cpu.default",
            Ref(0),
            Ref(0),
            Ref(0),
            dropout,
            rng=0,
        ),
        call("operator.getitem", Ref(1), 0),
        outputs=(2,),
        rngs=1,
    )
    q = torch.zeros(1, 1, 3, 4, dtype=torch.float64)
    with pytest.raises(CaptureError, match=r"flash_attention_for_cpu.*dropout_p"):
        run(made, q, key=KEY)

"""Bodies cut at their random calls."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.test_code import CPU, ROWS, body, call

from piper.dtypes import DType
from piper.ir.body import Body, Call, Ref, TensorSpec
from piper.ir.pieces import cut_at_random_calls
from piper.ops.base import RandomKey
from piper.runtime.code import chunk_function


def dropout(ref: int, rng: int) -> Call:
    mask = TensorSpec(ROWS.shape, DType.BOOL)
    return Call("aten.native_dropout.default", (Ref(ref), 0.5, True), (), (ROWS, mask), rng)


def first(ref: int) -> Call:
    return call("operator.getitem", Ref(ref), 0)


def run_pieces(whole: Body, inputs: list[torch.Tensor], key: RandomKey) -> tuple[torch.Tensor, ...]:
    values = dict(enumerate(inputs))
    for piece in cut_at_random_calls(whole):
        function = chunk_function(piece.body, {"s0": 3}, CPU)
        results = function([values[ref] for ref in piece.inputs], key)
        values.update(zip(piece.outputs, results, strict=True))
    return tuple(values[ref] for ref in whole.outputs)


def test_without_random_calls_it_stays_whole():
    made = body(
        call("aten.sin.default", Ref(0)), call("aten.mul.Tensor", Ref(1), Ref(0)), outputs=(2, 0)
    )
    (piece,) = cut_at_random_calls(made)
    assert piece.body.calls == made.calls
    assert (piece.inputs, piece.outputs, piece.random) == ((0,), (2,), False)


def test_two_layers_with_dropout_are_five_pieces():
    made = body(
        call("aten.sin.default", Ref(0)),
        dropout(1, 0),
        first(2),
        call("aten.cos.default", Ref(3)),
        dropout(4, 1),
        first(5),
        call("aten.exp.default", Ref(6)),
        call("aten.cos.default", Ref(0)),  # needs no draw: computed with the first
        outputs=(7, 8, 0),
        rngs=2,
    )
    pieces = cut_at_random_calls(made)
    assert [piece.random for piece in pieces] == [False, True, False, True, False]
    assert [[c.target.split(".")[1] for c in p.body.calls] for p in pieces] == [
        ["sin", "cos"],
        ["native_dropout", "getitem"],
        ["cos"],
        ["native_dropout", "getitem"],
        ["exp"],
    ]
    assert [p.body.calls[0].rng for p in pieces if p.random] == [0, 1]


def test_a_draw_from_what_was_drawn_is_a_phase_of_its_own():
    made = body(dropout(0, 0), first(1), dropout(2, 1), first(3), outputs=(4,), rngs=2)
    assert [len(piece.body.calls) for piece in cut_at_random_calls(made)] == [2, 2]


def test_calls_that_nothing_needs_are_left_out():
    made = body(call("aten.sin.default", Ref(0)), call("aten.cos.default", Ref(0)), outputs=(2,))
    (piece,) = cut_at_random_calls(made)
    assert [c.target for c in piece.body.calls] == ["aten.cos.default"]


def test_pieces_of_views_do_not_compute():
    made = body(call("aten.t.default", Ref(0)), call("aten.alias.default", Ref(1)), outputs=(2,))
    assert [piece.computes for piece in cut_at_random_calls(made)] == [False]


@st.composite
def bodies(draw):
    calls, refs = [], [0, 1]
    rngs = 0
    for _ in range(draw(st.integers(1, 12))):
        position = 2 + len(calls)
        kind = draw(st.sampled_from(["sin", "add", "dropout"]))
        if kind == "sin":
            calls.append(call("aten.sin.default", Ref(draw(st.sampled_from(refs)))))
        elif kind == "add":
            arguments = [Ref(draw(st.sampled_from(refs))) for _ in range(2)]
            calls.append(call("aten.add.Tensor", *arguments))
        else:
            calls += [dropout(draw(st.sampled_from(refs)), rngs), first(position)]
            rngs, position = rngs + 1, position + 1
        refs.append(position)
    outputs = draw(st.lists(st.sampled_from(refs), min_size=1, max_size=4))
    return body(*calls, outputs=tuple(outputs), inputs=2, rngs=rngs)


@settings(deadline=None, max_examples=60)
@given(made=bodies())
def test_pieces_compute_what_the_whole_does(made):
    inputs = [torch.randn(3, 4, dtype=torch.float64) for _ in range(2)]
    key = RandomKey(
        seed=1, step=2, microbatch=3, ordinals=tuple(10 + i for i in range(made.num_rngs))
    )
    with torch.no_grad():
        expected = chunk_function(made, {"s0": 3}, CPU)(list(inputs), key)
        found = run_pieces(made, inputs, key)
    assert all(map(torch.equal, found, expected))
    pieces = cut_at_random_calls(made)
    for piece in pieces:
        assert {c.rng is not None for c in piece.body.calls if c.target != "operator.getitem"} == {
            piece.random
        }

"""Compiled bodies, against the same bodies that are not."""

import threading
import warnings

import pytest
import torch
from tests.ir.test_pieces import dropout, first
from tests.runtime.test_code import CPU, KEY, body, call

from piper.dtypes import DType
from piper.errors import CompileError
from piper.ir.body import Body, Literal, Ref, Sequence, TensorSpec
from piper.runtime import compiled
from piper.runtime.code import chunk_function
from piper.runtime.compiled import compiled_function

BINDINGS = {"s0": 3}


def both(made: Body, *inputs: torch.Tensor):
    """Results of the compiled body and of the other."""
    function = compiled_function(made, BINDINGS, CPU, "F")
    with torch.no_grad():
        given = list(inputs)
        found = function(given, KEY)
        assert given == []
        return found, chunk_function(made, BINDINGS, CPU)(list(inputs), KEY)


@pytest.fixture
def compiler(monkeypatch):
    """Counts what is compiled; ``compiler.change`` may change the results of the code."""

    class Compiler:
        count = 0

        @staticmethod
        def change(values, results):
            return results

    real = compiled.compile_body

    def compile_body(made, bindings, device, inputs):
        Compiler.count += 1
        code = real(made, bindings, device, inputs)
        return lambda values: Compiler.change(values, code(values))

    compiled._of_body.cache_clear()
    monkeypatch.setattr(compiled, "compile_body", compile_body)
    yield Compiler
    compiled._of_body.cache_clear()


def fake(monkeypatch, code):
    """Let *code* stand for what the compiler makes."""
    compiled._of_body.cache_clear()
    monkeypatch.setattr(compiled, "compile_body", lambda *_: code)


X = torch.arange(12, dtype=torch.float64).reshape(3, 4) / 7
SIN = body(call("aten.sin.default", Ref(0)), outputs=(1,))


@pytest.mark.timeout(400)
def test_the_compiler_makes_the_same_of_it(compiler):
    """Draws bitwise equal, literals, several results, views; each layout of the inputs is compiled
    once, for all threads.
    """
    literal = Literal(TensorSpec((4,), DType.FLOAT64), (1.0, 2.0, 3.0, 4.0))
    made = body(
        dropout(0, 0),
        first(1),
        call("aten.mul.Tensor", Ref(2), literal),
        call("aten.sin.default", Ref(3)),
        call("aten.t.default", Ref(4)),
        call("aten.split.Tensor", Ref(4), 2, -1),
        call("operator.getitem", Ref(6), 1),
        call("aten.sum.dim_IntList", Ref(7), Sequence((0,)), True),
        outputs=(2, 4, 5, 8, 0),
        rngs=1,
    )
    found, expected = both(made, X)
    assert torch.equal(found[0], expected[0])
    assert found[4] is X
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-14, atol=1e-14)
        assert mine.stride() == theirs.stride()
    results = []
    threads = [threading.Thread(target=lambda: results.append(both(made, X)[0])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    assert all(torch.equal(r[1], found[1]) for r in results)
    assert compiler.count == 1


def test_results_get_the_strides_that_the_plan_was_verified_for(monkeypatch):
    fake(monkeypatch, lambda values: [values[0].sin().T.contiguous().T])
    found, expected = both(SIN, X)
    assert torch.equal(found[0], expected[0])
    assert found[0].stride() == expected[0].stride() == (4, 1)


def test_results_get_memory_of_their_own_where_they_have_it_uncompiled(monkeypatch):
    two = body(
        call("aten.clone.default", Ref(0)), call("aten.clone.default", Ref(0)), outputs=(1, 2)
    )
    fake(monkeypatch, lambda values: [values[0], values[0]])
    (first_copy, second_copy), _ = both(two, X)
    memory = {t.untyped_storage().data_ptr() for t in (first_copy, second_copy, X)}
    assert len(memory) == 3
    assert torch.equal(first_copy, X)


def test_views_stay_views(monkeypatch):
    made = body(call("aten.sin.default", Ref(0)), call("aten.t.default", Ref(1)), outputs=(1, 2))

    def code(values):
        result = values[0].sin()
        return [result, result.T]

    fake(monkeypatch, code)
    found, _ = both(made, X)
    assert found[0].data_ptr() == found[1].data_ptr()


def test_results_of_another_type_are_an_error(monkeypatch):
    fake(monkeypatch, lambda values: [values[0].sin().float()])
    with pytest.raises(
        CompileError, match=r"'F' cannot be compiled: expected a result torch.float64"
    ):
        both(SIN, X)


def test_another_layout_is_compiled_for_itself(monkeypatch):
    layouts = []

    def compile_body(_body, _bindings, _device, inputs):
        layouts.append(inputs[0].stride())
        return lambda values: [values[0].sin()]

    compiled._of_body.cache_clear()
    monkeypatch.setattr(compiled, "compile_body", compile_body)
    other = X.T.contiguous().T
    for x in (X, other, X, other):
        both(SIN, x)
    assert layouts == [(4, 1), (1, 3)]


def broken(*_):
    raise CompileError("RuntimeError: no registers left")


def test_a_failure_names_the_chunk(monkeypatch):
    compiled._of_body.cache_clear()
    monkeypatch.setattr(compiled, "compile_body", broken)
    with pytest.raises(
        CompileError, match=r"^chunk 'F' cannot be compiled: RuntimeError: no reg.*fallback"
    ):
        both(SIN, X)


def test_a_failure_falls_back_only_when_asked(monkeypatch):
    compiled._of_body.cache_clear()
    monkeypatch.setattr(compiled, "compile_body", broken)
    function = compiled_function(SIN, BINDINGS, CPU, "B PP=1", fallback=True)
    with pytest.warns(UserWarning, match=r"chunk 'B PP=1' cannot be compiled: .*; it runs uncompi"):
        assert torch.equal(function([X], None)[0], X.sin())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(function([X], None)[0], X.sin())


def test_a_compiler_that_is_missing_is_named(monkeypatch):
    monkeypatch.delattr("torch._inductor.standalone_compile")
    with pytest.raises(CompileError, match=r"torch .* has no torch._inductor.standalone_compile"):
        compiled.compile_body(SIN, BINDINGS, CPU, [X])


def test_what_the_compiler_says_is_kept(monkeypatch):
    def fail(*_args, **_options):
        raise ValueError("line 1\n\nline 2\nline 3\nline 4")

    monkeypatch.setattr("torch._inductor.standalone_compile", fail)
    with pytest.raises(CompileError, match=r"^ValueError: line 1 line 2 line 3$"):
        compiled.compile_body(SIN, BINDINGS, CPU, [X])

import subprocess
import sys

from piper.dtypes import DType
from piper.ir.body import Body, Call, Ref, Sequence, TensorSpec, body_id, call_refs
from piper.ir.symbols import Expr

ROWS = TensorSpec((Expr("s0"), 3), DType.FLOAT32)


def scaled(factor: object) -> Body:
    return Body((ROWS,), (Call("aten.mul.Scalar", (Ref(0), factor), (), (ROWS,)),), (1,))


def test_equal_bodies_have_equal_ids():
    assert body_id(scaled(2)) == body_id(scaled(2))
    assert body_id(scaled(2)) != body_id(scaled(3))


def test_numbers_that_python_calls_equal_differ():
    # 1 == 1.0 == True and they hash alike: an id that is remembered by equality depends on which
    # came first.
    ids = [body_id(scaled(factor)) for factor in (1, 1.0, True, 0.0, -0.0)]
    assert len(set(ids)) == len(ids)


def test_ids_do_not_depend_on_what_was_hashed_before():
    program = "from tests.ir.test_body import *; {}print(body_id(scaled(1.0)))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program.format(before)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for before in ("", "body_id(scaled(1)); ")
    }
    assert outputs == {f"{body_id(scaled(1.0))}\n"}


def test_sizes_follow_the_symbol():
    assert ROWS.sizes({"s0": 5}) == (5, 3)
    assert ROWS.numel({"s0": 5}) == 15
    assert ROWS.nbytes({"s0": 5}) == 60
    assert ROWS.bound({"s0": 5}) == TensorSpec((5, 3), DType.FLOAT32)
    assert str(ROWS) == "float32[s0, 3]"


def test_references_of_a_call_include_nested_and_keyword_ones():
    nested = Sequence((Ref(1), Sequence((Ref(2),)), 7))
    call = Call("aten.cat.default", (nested, 0), (("out", Ref(0)),), (ROWS,))
    assert call_refs(call) == (1, 2, 0)

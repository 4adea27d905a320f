import pytest

from piper.errors import CaptureError
from piper.ir.symbols import Expr, bind, evaluate


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("6*s0", 24),
        ("s0 - 1 + 2**3", 11),
        ("s0 // 3", 1),
        ("s0 % 3", 1),
        ("-s0", -4),
        ("s0 >= 2", True),
        ("2 <= s0 < 4", False),
        ("s0 == 4 and not s1 != 5", True),
        ("s0 < 2 or s1 > 4", True),
        ("max(s0, s1) + min(s0, s1, 2) + abs(0 - s0)", 11),
        ("int(s0 / 3)", 1),
    ],
)
def test_expressions(text, expected):
    assert evaluate(text, {"s0": 4, "s1": 5}) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("s7 + 1", "'s7', which is not bound; bound: s0"),
        ("s0.real", "unsupported"),
        ("__import__('os')", "unsupported"),
        ("[s0]", "unsupported"),
        ("s0 +", "not an expression"),
        ("s0 // (s0 - 4)", "divides by zero"),
    ],
)
def test_refusals_quote_the_expression(text, complaint):
    with pytest.raises(CaptureError) as caught:
        evaluate(text, {"s0": 4})
    assert complaint in str(caught.value)
    assert text in str(caught.value)


def test_a_size_is_a_whole_number():
    assert bind(7, {}) == 7
    assert bind(Expr("s0 / 2"), {"s0": 4}) == 2
    assert isinstance(bind(Expr("s0 / 2"), {"s0": 4}), int)
    with pytest.raises(CaptureError, match=r"is 1.5 .* whole number"):
        bind(Expr("s0 / 2"), {"s0": 3})

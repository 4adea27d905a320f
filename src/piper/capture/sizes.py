"""The symbolic batch size: its symbol, its expressions as data, the conditions on it. Uses private
torch.
"""

from functools import lru_cache

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._sympy.printers import PythonPrinter

from piper.ir.symbols import Dim, Expr, evaluate

SYMBOL = "B"
"""Name of the batch size's symbol in every expression."""


def batch_symbol(fake: FakeTensorMode, hint: int) -> torch.SymInt:
    """A symbolic size that is *hint* where torch has to guess."""
    context: StatelessSymbolicContext[..., object] = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC]
    )
    seed = fake.from_tensor(torch.empty(hint), symbolic_context=context)
    size = seed.shape[0]
    assert isinstance(size, torch.SymInt)
    return size


def size_argument(value: object) -> int | float | bool | Expr:
    """A number of the graph as data: a constant, or an expression over :data:`SYMBOL`."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        expression = value.node.expr
        if isinstance(value, torch.SymInt):
            return dim(value)
        return Expr(_print(expression))
    assert isinstance(value, (int, float, bool))
    return value


def dim(size: int | torch.SymInt) -> Dim:
    """A size as data: an integer, or an expression over :data:`SYMBOL`."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_number else Expr(_print(expression))


@lru_cache(maxsize=4096)
def _print(expression: sympy.Basic) -> str:
    symbols = {
        s: sympy.Symbol(SYMBOL, integer=True, positive=True) for s in expression.free_symbols
    }
    text: str = _Printer().doprint(expression.xreplace(symbols))
    evaluate(text, {SYMBOL: 2})  # raises for what the expression language does not have
    return text


class _Printer(PythonPrinter):
    """Python syntax that :func:`piper.ir.symbols.evaluate` understands."""

    def _print_Max(self, expr: sympy.Expr) -> str:  # noqa: N802 (sympy's naming)
        return f"max({', '.join(self._print(a) for a in expr.args)})"

    def _print_Min(self, expr: sympy.Expr) -> str:  # noqa: N802 (sympy's naming)
        return f"min({', '.join(self._print(a) for a in expr.args)})"

    def _print_ToFloat(self, expr: sympy.Expr) -> str:  # noqa: N802 (sympy's naming)
        return f"float({self._print(expr.args[0])})"

    def _helper_sqrt(self, expr: sympy.Expr) -> str:
        return f"({self._print(expr)}) ** 0.5"


def size_guards(shape_env: ShapeEnv) -> tuple[str, ...]:
    """Conditions on the batch size under which the graph holds.

    torch treats 0 and 1 specially, so a symbolic size is at least 2.
    """
    texts = [f"{SYMBOL} >= 2", *(_print(g.expr) for g in shape_env.guards)]
    return tuple(text for text in dict.fromkeys(texts) if text != "True")

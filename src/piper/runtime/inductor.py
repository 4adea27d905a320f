"""TorchInductor, behind one function: the only place that touches its private names."""

import importlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

from piper.errors import CompileError
from piper.ir import body as ir
from piper.ir.symbols import Expr, evaluate
from piper.runtime.code import constant, literal, resolve

PATCHES: Mapping[str, object] = {
    "compile_threads": 1,  # no pool of processes beside every worker
}
"""Settings of Inductor, while it compiles."""


def compile_body(
    body: ir.Body,
    bindings: Mapping[str, int],
    device: torch.device,
    inputs: Sequence[torch.Tensor],
) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """*body*, which has no random call, as machine code for inputs of these shapes and strides.

    Results are found in Inductor's cache on disk, if another process compiled the same before.
    Raises :class:`~piper.errors.CompileError` with the compiler's reason.
    """
    graph, literals = _graph(body, bindings, device)
    compile_graph = _compiler()
    examples = [*inputs, *literals]
    try:
        with torch.no_grad():
            code = compile_graph(
                graph,
                examples,
                dynamic_shapes="from_example_inputs",
                options={"config_patches": dict(PATCHES)},
            )
    except Exception as error:  # a compiler may raise anything; the cause is kept
        raise CompileError(f"{type(error).__name__}: {_reason(error)}") from error

    def run(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(code(*values, *literals))

    return run


def _compiler() -> Callable[..., Callable[..., Sequence[torch.Tensor]]]:
    # Not `from ... import`: where the function is missing, that may find a module of its name.
    found: object = getattr(importlib.import_module("torch._inductor"), "standalone_compile", None)
    if not callable(found):
        raise CompileError(
            f"torch {torch.__version__} has no torch._inductor.standalone_compile, which torch 2.13 has"
        )
    return found


def _reason(error: Exception) -> str:
    """The first lines: compilers append pages of their input."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    reason = " ".join(lines[:3])
    if "compiler" in reason.lower() and "found" in reason.lower():
        reason += " (on a CPU, a C++ compiler is needed: install g++)"
    return reason


def _graph(
    body: ir.Body, bindings: Mapping[str, int], device: torch.device
) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """*body* as a graph; its literal tensors are further inputs, after its own."""
    graph = fx.Graph()
    literals: dict[ir.Literal, fx.Node] = {}
    values: list[fx.Node] = [graph.placeholder(f"x{i}") for i in range(len(body.inputs))]
    tensors: list[torch.Tensor] = []
    for call in body.calls:
        for arg in (*call.args, *(arg for _, arg in call.kwargs)):
            for found in _literals(arg):
                if found not in literals:
                    literals[found] = graph.placeholder(f"literal{len(tensors)}")
                    tensors.append(literal(found, bindings, device))

    def value(arg: ir.Arg) -> object:
        match arg:
            case ir.Ref(index=index):
                return values[index]
            case Expr(text=text):
                return evaluate(text, bindings)
            case ir.Const():
                return constant(arg, device)
            case ir.Literal():
                return literals[arg]
            case ir.Sequence(items=items):
                return [value(item) for item in items]
            case _:
                return arg

    for call in body.calls:
        assert call.rng is None, "random calls are not compiled"
        args = tuple(value(arg) for arg in call.args)
        kwargs = {name: value(arg) for name, arg in call.kwargs}
        values.append(graph.call_function(resolve(call.target), args, kwargs))  # type: ignore[arg-type]
    graph.output(tuple(values[ref] for ref in body.outputs))
    return fx.GraphModule({}, graph), tensors


def _literals(arg: ir.Arg) -> list[ir.Literal]:
    if isinstance(arg, ir.Literal):
        return [arg]
    if isinstance(arg, ir.Sequence):
        return [found for item in arg.items for found in _literals(item)]
    return []

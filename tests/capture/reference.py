"""A tiny evaluator of captured DAGs, and the comparison of one step with eager PyTorch in
float64.
"""

import copy
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from piper.capture import Captured, capture_with_constants
from piper.capture.batch import as_arguments, flatten_batch
from piper.ir.body import Arg, Body, Const, Literal, Ref, TensorSpec
from piper.ir.body import Sequence as Items
from piper.ir.check import topological_order
from piper.ir.dag import Chunk, Dag, LossKind, Pass, Role
from piper.ir.symbols import Expr, bind, evaluate
from piper.ops.compute import Call

Batch = tuple[object, object]
SEED = 1000
TOLERANCE = 1e-12


@dataclass
class Step:
    """What one step computes."""

    loss: torch.Tensor
    weight: torch.Tensor | None
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


class SeededByOrdinal(TorchDispatchMode):
    """Reseeds before each random operator with its ordinal."""

    def __init__(self) -> None:
        super().__init__()
        self.ordinal = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.manual_seed(SEED + self.ordinal)
            self.ordinal += 1
        return func(*args, **(kwargs or {}))


def resolve(target: str) -> Callable[..., object]:
    """The operator of that name."""
    if target == "operator.getitem":
        return operator.getitem
    namespace, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def run_body(
    body: Body,
    inputs: Sequence[torch.Tensor],
    bindings: Mapping[str, int],
    ordinals: Sequence[int],
) -> list[torch.Tensor]:
    """The outputs of *body*; checks shape and type of every result."""
    values: list[object] = list(inputs)

    for spec, value in zip(body.inputs, inputs, strict=True):
        _check(value, spec, bindings, "input")
    for call in body.calls:
        if call.rng is not None:
            torch.manual_seed(SEED + ordinals[call.rng])
        kwargs = {key: _argument(arg, values, bindings) for key, arg in call.kwargs}
        args = [_argument(arg, values, bindings) for arg in call.args]
        result = resolve(call.target)(*args, **kwargs)
        results = result if isinstance(result, (tuple, list)) else (result,)
        for expected, made in zip(call.results, results, strict=True):
            if expected is not None:
                _check(made, expected, bindings, call)
        values.append(result)
    return [values[ref] for ref in body.outputs]  # type: ignore[misc]


def _argument(arg: Arg, values: Sequence[object], bindings: Mapping[str, int]) -> object:
    match arg:
        case Ref(index):
            return values[index]
        case Expr(text):
            return evaluate(text, bindings)
        case Items(items):
            return [_argument(item, values, bindings) for item in items]
        case Literal(spec, elements):
            flat = torch.tensor(elements, dtype=getattr(torch, spec.dtype))
            return flat.reshape([bind(size, bindings) for size in spec.shape])
        case Const("device", _):
            return torch.device("cpu")
        case Const("float" | "complex" as kind, text):
            return {"float": float, "complex": complex}[kind](text)
        case Const(_, text):
            return getattr(torch, text)
        case _:
            return arg


def _check(value: object, spec: TensorSpec, bindings: Mapping[str, int], where: object) -> None:
    assert isinstance(value, torch.Tensor), where
    assert list(value.shape) == [bind(size, bindings) for size in spec.shape], where
    assert str(value.dtype) == f"torch.{spec.dtype}", where


@torch.no_grad()
def run_dag(
    captured: Captured, model: nn.Module, batch: Batch, batch_dims: Mapping[str, int | None] | None
) -> Step:
    """Walk the chunks of an unsplit DAG in topological order."""
    dag = captured.dag
    flat = flatten_batch(model.forward, batch, batch_dims)
    leaves = {leaf.name: leaf.value for leaf in flat.leaves}
    bindings = {dag.batch_symbol: flat.size} if dag.batch_symbol and flat.size else {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = {**dict(model.named_buffers(remove_duplicate=False)), **captured.constants}
    values: dict[int, torch.Tensor] = {}
    for identity, value in dag.values.items():
        match value.role:
            case Role.PARAMETER:
                values[identity] = parameters[value.name].detach()
            case Role.BUFFER:
                values[identity] = buffers[value.name].clone()
            case Role.INPUT:
                leaf = leaves[value.name]
                assert isinstance(leaf, torch.Tensor)
                values[identity] = leaf.contiguous()
            case Role.SEED:
                values[identity] = torch.ones((), dtype=getattr(torch, value.spec.dtype))
    for node in topological_order(dag):
        chunk = dag.nodes[node]
        assert isinstance(chunk, Chunk)
        work = chunk.work
        assert isinstance(work, Call)
        inputs = [values[v] for v in chunk.inputs]
        outputs = run_body(dag.bodies[work.body], inputs, bindings, work.rng)
        # A value that goes to another device arrives contiguous.
        values.update(zip(chunk.outputs, [o.contiguous() for o in outputs], strict=True))
    gradients = {
        name: torch.stack([values[v] for v in parts]).sum(0)
        for name, parts in dag.contributions.items()
    }
    return Step(
        loss=values[dag.losses[0]],
        weight=values[dag.weights[0]] if dag.weights else None,
        gradients=gradients,
        buffers={name: values[v] for name, v in dag.buffer_updates.items()},
    )


def run_eager(model: nn.Module, loss_fn: Callable[..., object], batch: Batch) -> Step:
    """The same step by autograd on a copy of the model."""
    model = copy.deepcopy(model)
    args, kwargs = as_arguments(batch[0])
    with SeededByOrdinal():
        result = loss_fn(model(*args, **kwargs), batch[1])
        loss, weight = result if isinstance(result, tuple) else (result, None)
        if loss.requires_grad:
            loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Step(
        loss.detach(),
        None if weight is None else torch.as_tensor(weight),
        gradients,
        dict(model.named_buffers()),
    )


def difference(a: torch.Tensor, b: torch.Tensor, scale: float) -> float:
    """Largest error relative to *b*, or to *scale* where *b* is tiny."""
    if a.numel() == 0:
        return 0.0
    error = (a.double() - b.double()).abs().max().item()
    assert not math.isnan(error)
    return error / max(b.double().abs().max().item(), 1e-6 * scale, 1e-300)


def compare(found: Step, expected: Step, model: nn.Module, tolerance: float = TOLERANCE) -> None:
    """Assert that two steps are equal."""
    assert difference(found.loss, expected.loss, 0.0) <= tolerance
    assert (found.weight is None) == (expected.weight is None)
    if found.weight is not None and expected.weight is not None:
        assert found.weight.item() == expected.weight.item()
    assert found.gradients.keys() == expected.gradients.keys()
    scale = max((g.abs().max().item() for g in expected.gradients.values()), default=0.0)
    for name, gradient in expected.gradients.items():
        assert found.gradients[name].shape == gradient.shape
        assert difference(found.gradients[name], gradient, scale) <= tolerance, name
    for name, before in model.named_buffers():
        now = found.buffers.get(name, before)
        assert now.dtype == before.dtype
        assert difference(now, expected.buffers[name], 0.0) <= tolerance, name


def labels(dag: Dag) -> list[str]:
    """The chunks' names, in topological order."""
    return [dag.nodes[n].label for n in topological_order(dag)]


def pipeline(count: int, name: str = "PP") -> list[str]:
    """The chunks of a pipeline of *count* stages."""
    forward = [f"F {name}={i}" for i in range(count)]
    return forward + [f"B {name}={i}" for i in reversed(range(count))]


def check(
    model: nn.Module,
    loss_fn: Callable[..., object],
    make_batch: Callable[[int], Batch],
    *,
    chunks: Sequence[str] | None = None,
    sizes: Sequence[int] = (4, 2, 7),
    batch_dims: Mapping[str, int | None] | None = None,
    grad: bool = True,
    tolerance: float = TOLERANCE,
) -> Dag:
    """Capture once at the first size, run at all, compare with eager; returns the DAG.

    *chunks* are the expected names of the chunks.
    """
    before = {n: (id(t), t.clone()) for n, t in (*model.named_parameters(), *model.named_buffers())}
    captured = capture_with_constants(
        model, loss_fn, make_batch(sizes[0]), batch_dims=batch_dims, grad=grad
    )
    after = dict((*model.named_parameters(), *model.named_buffers()))
    assert {n: id(t) for n, t in after.items()} == {n: i for n, (i, _) in before.items()}
    assert all(torch.equal(after[n], t) for n, (_, t) in before.items())
    dag = captured.dag
    if chunks is not None:
        assert labels(dag) == list(chunks)
    check_shape(dag, grad=grad)
    assert dag.batch_symbol is not None
    for size in sizes:
        batch = make_batch(size)
        assert all(evaluate(guard, {dag.batch_symbol: size}) for guard in dag.guards), dag.guards
        expected = run_eager(model, loss_fn, copy.deepcopy(batch))
        if not grad:
            expected.gradients = {}
        compare(run_dag(captured, model, batch, batch_dims), expected, model, tolerance)
    return dag


def check_shape(dag: Dag, *, grad: bool) -> None:
    """What holds for every captured DAG."""
    assert (dag.loss_kind is LossKind.WEIGHTED) == bool(dag.weights)
    owners: dict[int, str] = {}
    for name, parts in dag.contributions.items():
        producers = [dag.producers[v] for v in parts]
        assert len(set(producers)) == len(producers), f"{name}: two contributions from one chunk"
        for part in parts:
            assert owners.setdefault(part, name) == name
            assert dag.values[part].role is Role.CONTRIBUTION
            assert dag.values[part].name == name
    seeds = {v for v, info in dag.values.items() if info.role is Role.SEED}
    reached: set[int] = set(seeds)
    for node in topological_order(dag):
        chunk = dag.nodes[node]
        assert chunk.outputs, f"{chunk.label} makes nothing"
        gradient = bool(reached & set(chunk.inputs))
        assert gradient == (chunk.pass_ is Pass.BACKWARD), chunk.label
        if gradient:
            reached |= set(chunk.outputs)
    assert grad == bool(dag.contributions)

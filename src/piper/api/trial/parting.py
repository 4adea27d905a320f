"""Where graph and model part: the first operator of the graph's forward whose result is none of
those that eager PyTorch makes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from piper.api.trial.graph import GraphCheck
from piper.capture.explain import line_of_call
from piper.devices.tensors import torch_dtype
from piper.ids import ValueId
from piper.ir.body import Body, call_refs
from piper.ir.dag import Pass, Role
from piper.ops.base import RandomKey
from piper.ops.compute import Call
from piper.runtime.batch import Batch, flatten
from piper.runtime.code import chunk_function


@dataclass(slots=True)
class Made:
    """A floating-point result of an operator: of the graph in a region, of PyTorch at a line."""

    operator: str
    where: str
    value: torch.Tensor
    readers: list["Made"] = field(default_factory=list)
    known: bool = False


def first_parting(check: GraphCheck, seed: int, run: Callable[[TorchDispatchMode], object]) -> str:
    """For people: the first operator of the graph's forward whose result PyTorch does not make (nor
    those of the operators that read it), and the first line of the model whose result the graph does
    not make. *run* runs the model on the same microbatch under a mode. Empty if the forwards make
    the same.
    """
    recorder = _Recorder()
    run(recorder)
    graph = _graph_values(check, seed)
    _match(graph, recorder.made)
    _match(recorder.made, graph)
    for made in reversed(graph):
        if any(reader.known for reader in made.readers):
            made.known = True  # a piece of what PyTorch does in one operator
    ours = next((made for made in graph if not made.known), None)
    if ours is None:
        return ""
    theirs = next((made for made in recorder.made if not made.known and made.where), None)
    at = (
        f"; in PyTorch the first other result is that of {theirs.operator}, {theirs.where}"
        if theirs
        else ""
    )
    return f"they part at {ours.operator} in {ours.where}{at}"


def _match(made: Sequence[Made], others: Sequence[Made]) -> None:
    """Mark what of *made* is among *others*."""
    by_form: dict[tuple[object, ...], list[torch.Tensor]] = {}
    for other in others:
        by_form.setdefault(_form(other.value), []).append(other.value)
    for one in made:
        alike = by_form.get(_form(one.value), ())
        one.known = any(_is_close(one.value, value) for value in alike)


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return (tensor.dtype, *tensor.shape)


def _is_close(one: torch.Tensor, two: torch.Tensor) -> bool:
    if torch.equal(one, two):
        return True
    eps = torch.finfo(one.dtype).eps
    return torch.allclose(one, two, rtol=64 * eps, atol=64 * eps, equal_nan=True)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Keeps what operators make, and at which line."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.made: list[Made] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run *func* and note it."""
        del types
        result: object = func(*args, **(kwargs or {}))
        where = line_of_call()
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self.made.append(Made(str(func), where, value.detach().clone()))
        return result


def _graph_values(check: GraphCheck, seed: int) -> list[Made]:
    """What the operators of the graph's forward make, without those that read nothing."""
    dag, made = check.dag, list[Made]()
    assert check.part is not None
    bindings = {} if dag.batch_symbol is None else {dag.batch_symbol: dag.batch_size}
    values = _sources(check, check.part)
    for chunk in dag.chunks():
        if chunk.pass_ is not Pass.FORWARD or not isinstance(chunk.work, Call):
            continue
        body = dag.bodies[chunk.work.body]
        count = len(body.inputs)
        whole = replace(body, outputs=tuple(range(count, count + len(body.calls))))
        key = RandomKey(seed, 0, 0, chunk.work.rng)
        with torch.no_grad():
            code = chunk_function(whole, bindings, torch.device("cpu"))
            results = code([values[v] for v in chunk.inputs], key)
        where = f"region {dict(chunk.tags)}" if chunk.tags else "no region"
        made += _noted(body, results, where)
        values.update(
            {
                v: results[ref - count]
                for v, ref in zip(chunk.outputs, body.outputs, strict=True)
                if ref >= count
            }
        )
    return made


def _noted(body: Body, results: Sequence[object], where: str) -> list[Made]:
    count, noted = len(body.inputs), dict[int, Made]()
    for number, (call, value) in enumerate(zip(body.calls, results, strict=True)):
        reads = call_refs(call)
        if not reads or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        made = noted[count + number] = Made(call.target, where, value)
        for ref in reads:
            if ref in noted:
                noted[ref].readers.append(made)
    return list(noted.values())


def _sources(check: GraphCheck, part: Batch) -> dict[ValueId, torch.Tensor]:
    """The values that the step begins with."""
    dag = check.dag
    leaves, found = flatten(part), dict[ValueId, torch.Tensor]()
    for value in dag.values.values():
        if value.role is Role.INPUT:
            leaf = leaves[value.name]
            assert isinstance(leaf, torch.Tensor)
            found[value.id] = leaf
        elif value.role is Role.PARAMETER:
            found[value.id] = check.tensors[value.name].to(torch_dtype(value.spec.dtype))
        elif value.role is Role.BUFFER:
            found[value.id] = {**check.tensors, **check.constants}[value.name]
    return found

"""Bodies as code: one Python function of straight-line operator calls per (body, sizes, device)."""

import linecache
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import CodeType
from typing import TypeAlias

import torch
from torch._ops import OpOverload

import piper.runtime.grouped  # noqa: F401 (registers operators that bodies may name)
from piper.devices.tensors import torch_dtype
from piper.errors import PlanError, nearest
from piper.ir import body as ir
from piper.ir.check_body import is_keyword_name
from piper.ir.operators import ALL, is_operator_name, refusal
from piper.ir.symbols import Expr, bind, evaluate
from piper.ops.base import RandomKey
from piper.runtime.random import draw, generator_for

ChunkCode: TypeAlias = Callable[[list[torch.Tensor], RandomKey | None], tuple[torch.Tensor, ...]]
"""``(inputs, random key) -> outputs``. Pure, but empties the list of inputs; to be called under
``torch.no_grad()``.
"""

AddingCode: TypeAlias = Callable[
    [list[torch.Tensor], RandomKey | None, Sequence[torch.Tensor]], Sequence[torch.Tensor]
]
"""``(inputs, random key, totals) -> outputs``: see :func:`adding_function`."""


def chunk_function(body: ir.Body, bindings: Mapping[str, int], device: torch.device) -> ChunkCode:
    """The code of *body* with every symbol bound, for tensors on *device*. Cached.

    Raises :class:`PlanError` for an operator that this torch does not have, and
    :class:`CaptureError` for a random operator that takes no generator.
    """
    return _compiled(body, tuple(sorted(bindings.items())), device)


def adding_function(
    body: ir.Body, bindings: Mapping[str, int], device: torch.device, added: tuple[int, ...]
) -> AddingCode:
    """Like :func:`chunk_function`, but the outputs at the positions *added* are not returned: each
    is added to its own of as many *totals*, in place, as soon as it is made, and given up after its
    last use.
    """
    return _compiled(body, tuple(sorted(bindings.items())), device, added)


@lru_cache(maxsize=4096)
def _compiled(
    body: ir.Body,
    bindings: tuple[tuple[str, int], ...],
    device: torch.device,
    added: tuple[int, ...] = (),
) -> Callable[..., tuple[torch.Tensor, ...]]:
    writer = _Writer(body, dict(bindings), device, added)
    source = writer.source()
    adding = f" adding {', '.join(map(str, added))}" if added else ""
    name = f"<piper body {ir.body_id(body)[:12]}{adding}>"
    # So that a traceback shows the failing line.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    code: CodeType = compile(source, name, "exec")
    namespace = dict(writer.constants)
    exec(code, namespace)  # noqa: S102 (our own text: operator names resolved, literals by repr)
    function: Callable[..., tuple[torch.Tensor, ...]] = namespace["chunk"]  # type: ignore[assignment]  # defined by the source
    return function


def chunk_source(body: ir.Body, bindings: Mapping[str, int], device: torch.device) -> str:
    """The Python text of :func:`chunk_function`, for people."""
    return _Writer(body, bindings, device).source()


def resolve(target: str) -> Callable[..., object]:
    """The operator that ``namespace.name.overload`` (or ``operator.getitem``) names.

    Raises :class:`PlanError` when there is none.
    """
    if target == ir.GETITEM:
        return operator.getitem
    namespace, _, rest = target.partition(".")
    name, _, overload = rest.rpartition(".")
    packet = None
    if is_operator_name(target):
        packet = getattr(getattr(torch.ops, namespace), name, None)
    found = getattr(packet, overload, None) if packet is not None else None
    if isinstance(found, OpOverload):
        if (text := refusal(target, ALL)) is not None:
            raise PlanError(text)
        if found._schema.is_mutable:  # noqa: SLF001 (torch has no public name for it)
            raise PlanError(
                f"operator {target!r} writes its arguments; a body calls pure ones only"
            )
        return found
    known = packet.overloads() if packet is not None else dir(torch.ops.aten)
    raise PlanError(
        f"operator {target!r} does not exist in torch {torch.__version__}"
        f"{nearest(overload if packet is not None else name, known)}; capture the model again with this torch"
    )


class _Writer:
    """Writes one body; ``constants`` are the names that its text refers to. The outputs at the
    positions *added* are added to totals.
    """

    def __init__(
        self,
        body: ir.Body,
        bindings: Mapping[str, int],
        device: torch.device,
        added: tuple[int, ...] = (),
    ) -> None:
        self._body = body
        self._kept = [ref for i, ref in enumerate(body.outputs) if i not in added]
        self._totals: dict[int, list[int]] = {}  # of each reference, the totals that it is added to
        for total, position in enumerate(added):
            self._totals.setdefault(body.outputs[position], []).append(total)
        self._bindings = bindings
        self._device = device
        self._names: dict[object, str] = {}
        self.constants: dict[str, object] = {}

    def source(self) -> str:
        """The function ``chunk(inputs, key)``, or ``chunk(inputs, key, totals)``."""
        body = self._body
        last = self._last_uses()
        count = len(body.inputs)
        lines = [f"def chunk(inputs, key{', totals' if self._totals else ''}):"]
        if any(i in last for i in range(count)):
            unpack = ", ".join(f"v{i}" if i in last else "_" for i in range(count))
            lines.append(f"    {unpack}, = inputs")
            if any(i not in last for i in range(count)):
                lines.append("    del _")
        lines.append("    inputs.clear()")
        lines += [line for ref in range(count) for line in self._additions(ref)]
        dying: dict[int, list[int]] = {}
        for ref, position in last.items():
            dying.setdefault(position, []).append(ref)
        for position, call in enumerate(body.calls):
            if count + position not in last:
                continue  # calls are pure: one that nothing reads does nothing
            lines.append(f"    v{count + position} = {self._call(call)}")
            lines += self._additions(count + position)
            if dead := dying.get(position):
                lines.append(f"    del {', '.join(f'v{ref}' for ref in sorted(dead))}")
        outputs = "".join(f"v{ref}, " for ref in self._kept)
        lines.append(f"    return ({outputs})")
        return "\n".join(lines) + "\n"

    def _additions(self, ref: int) -> list[str]:
        """Statements that add what was just made to its totals."""
        return [f"    totals[{total}].add_(v{ref})" for total in self._totals.get(ref, ())]

    def _last_uses(self) -> dict[int, int]:
        """For every reference that an output needs: the position of the call that reads it last (of
        one that is only added to a total, and that no call reads, its own).
        """
        count, calls = len(self._body.inputs), self._body.calls
        last = dict.fromkeys((*self._kept, *(r for r in self._totals if r < count)), len(calls))
        for position in range(len(calls) - 1, -1, -1):
            if count + position in self._totals:
                last.setdefault(count + position, position)
            if count + position not in last:
                continue
            for ref in ir.call_refs(calls[position]):
                last.setdefault(ref, position)
        return last

    def _call(self, call: ir.Call) -> str:
        arguments = [self._argument(arg) for arg in call.args]
        if call.target == ir.GETITEM:
            return f"{arguments[0]}[{arguments[1]}]"
        for name, arg in call.kwargs:
            if not is_keyword_name(name):
                raise PlanError(
                    f"{name!r:.80} is not the name of an argument of {call.target!r:.80}"
                )
            arguments.append(f"{name}={self._argument(arg)}")
        function = self._function(call)
        if call.rng is None:
            return f"{function}({', '.join(arguments)})"
        generator = (
            f"{self._hoist('generator_for', generator_for)}(key, {call.rng}, {self._here()})"
        )
        return f"{function}({', '.join([generator, *arguments])})"

    def _function(self, call: ir.Call) -> str:
        overload = resolve(call.target)
        assert isinstance(overload, OpOverload)
        name, key = call.target.replace(".", "_"), (call.target, call.rng is None)
        if call.target in KEEPS_FOR_BACKWARD:
            return self._hoist(name, _kept_for_backward(overload), key)
        if call.rng is not None:
            return self._hoist(name, draw(overload), key)
        # The bound builtin: what OpOverload.__call__ forwards to, 0.2 µs sooner.
        return self._hoist(name, overload._op, key)  # noqa: SLF001

    def _argument(self, arg: ir.Arg) -> str:
        match arg:
            case ir.Ref(index=int(index)):
                return f"v{index}"
            case Expr(text=text):
                return repr(evaluate(text, self._bindings))
            case ir.Const():
                return self._hoist(f"{arg.kind}_{arg.text}", constant(arg, self._device), arg)
            case ir.Literal():
                return self._hoist("literal", literal(arg, self._bindings, self._device), arg)
            case ir.Sequence(items=items):
                return f"[{', '.join(self._argument(item) for item in items)}]"
            case None | bool() | int() | float() | str():
                return repr(arg)
            case _:
                raise PlanError(f"an argument of a chunk body is a {type(arg).__name__}")

    def _here(self) -> str:
        return self._hoist("here", self._device)

    def _hoist(self, stem: str, value: object, key: object = None) -> str:
        """A global name for *value*; equal keys (by default: stems) share one."""
        key = stem if key is None else key
        if key not in self._names:
            safe = "".join(c if c.isascii() and c.isalnum() else "_" for c in f"f_{stem[:60]}")
            name = f"{safe}_{len(self._names)}"
            self._names[key] = name
            self.constants[name] = value
        return self._names[key]


KEEPS_FOR_BACKWARD = frozenset({"aten.mkldnn_rnn_layer.default"})
"""Operators that make what their backward reads (a workspace) only while gradients are recorded."""


def _kept_for_backward(overload: OpOverload) -> Callable[..., object]:
    """*overload* as it computes while gradients are recorded; of nothing here one is."""

    def call(*args: object) -> object:
        with torch.enable_grad():
            return overload(*(a.detach() if isinstance(a, torch.Tensor) else a for a in args))

    return call


def constant(const: ir.Const, device: torch.device) -> object:
    """The value of *const* on *device*."""
    match const.kind:
        case "dtype":
            return torch_dtype(const.text)
        case "memory_format" | "layout":
            found = getattr(torch, const.text, None)
            if isinstance(found, (torch.memory_format, torch.layout)):
                return found
            raise PlanError(f"unknown constant {const.kind} {const.text!r:.80} in a chunk body")
        case "device":
            return device if const.text == "here" else torch.device(const.text)
        case "float":
            return float(const.text)
        case "complex":
            return complex(const.text)
        case _:
            raise PlanError(f"unknown constant {const.kind} {const.text!r} in a chunk body")


def literal(literal: ir.Literal, bindings: Mapping[str, int], device: torch.device) -> torch.Tensor:
    """The tensor that *literal* is."""
    shape = [bind(d, bindings) for d in literal.spec.shape]
    dtype = torch_dtype(literal.spec.dtype)
    return torch.tensor(literal.values, dtype=dtype, device=device).reshape(shape)

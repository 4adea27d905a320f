"""Capture of model + loss as one joint forward-and-backward graph.

The only module that touches private functions of torch: ``aot_export_joint_with_descriptors`` and its
descriptors, fake tensors with a symbolic batch size, node annotations. The tested releases are in
:data:`TESTED_TORCH`.
"""

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

import sympy
import torch
import torch.fx
import torch.fx.traceback as fx_traceback
import torch.utils._pytree as pytree
from torch import nn
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._sympy.printers import PythonPrinter

from piper.capture.annotate import RegionPath, RegionTrace, recording
from piper.capture.batch import Batch
from piper.capture.hooks import refuse_parameter_hooks, watched_hooks
from piper.capture.simplify import simplify
from piper.errors import CaptureError, PiperError
from piper.ir.symbols import Dim, Expr

TESTED_TORCH = ("2.13",)
"""Releases whose private functions are known to behave as this module expects."""

SYMBOL = "B"
"""Name of the batch size's symbol in every expression."""

_KEY = "piper.region"
_CAPTURE_DEVICE = torch.device("cpu")

LossFn: TypeAlias = Callable[[object, object], object]
_Step: TypeAlias = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class ParameterInput:
    """Placeholder of a parameter, under one of its names."""

    name: str


@dataclass(frozen=True, slots=True)
class BufferInput:
    """Placeholder of a buffer, under one of its names."""

    name: str


@dataclass(frozen=True, slots=True)
class BatchInput:
    """Placeholder of a batch leaf; *index* counts all leaves."""

    index: int


@dataclass(frozen=True, slots=True)
class SeedInput:
    """Placeholder of the gradient of the step's loss with respect to this loss."""


Input: TypeAlias = ParameterInput | BufferInput | BatchInput | SeedInput


@dataclass(frozen=True, slots=True)
class TensorState:
    """A parameter or buffer of the model: shape, type and every name under which it is registered."""

    tensor: torch.Tensor
    names: tuple[str, ...]
    requires_grad: bool
    persistent: bool = True


@dataclass(frozen=True, slots=True)
class Joint:
    """One captured step.

    ``gradients`` has one entry per name of a trained parameter (a tied parameter has several), with
    ``None`` where the loss does not depend on it. ``leaves`` are stand-ins of the batch's tensors by leaf
    number. ``size_guards`` are conditions on :data:`SYMBOL`,
    ``symbolic`` is false when the batch size is the constant ``captured_size``.
    """

    module: torch.fx.GraphModule
    inputs: Mapping[torch.fx.Node, Input]
    loss: torch.fx.Node
    weight: torch.fx.Node | None
    gradients: tuple[tuple[str, torch.fx.Node | None], ...]
    buffer_updates: tuple[tuple[str, torch.fx.Node], ...]
    parameters: tuple[TensorState, ...]
    buffers: tuple[TensorState, ...]
    leaves: Mapping[int, torch.Tensor]
    captured_size: int
    symbolic: bool
    size_guards: tuple[str, ...]


def region(node: torch.fx.Node) -> RegionPath | None:
    """The region path of *node*, ``None`` outside all regions."""
    custom = node.meta.get("custom") or {}
    path: RegionPath | None = custom.get(_KEY)
    return path


def is_backward(node: torch.fx.Node) -> bool:
    """Whether *node* was recorded by the backward (or only serves it)."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def is_accumulation(node: torch.fx.Node) -> bool:
    """Whether *node* adds up the gradients of the uses of one value."""
    return bool(node.meta.get("is_gradient_acc", False))


def sequence_number(node: torch.fx.Node) -> int | None:
    """Number of the autograd node: equal for a forward operation and those that compute its gradient."""
    number: int | None = node.meta.get("seq_nr")
    return number


def size_argument(value: object) -> int | float | bool | Expr:
    """A number of the graph as data: a constant, or an expression over :data:`SYMBOL`."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        expression = value.node.expr
        if isinstance(value, torch.SymInt):
            return dim(value)
        return Expr(_print(expression))
    assert isinstance(value, (int, float, bool))
    return value


def constant_value(module: torch.fx.GraphModule, node: torch.fx.Node) -> torch.Tensor:
    """The data of a constant of the graph; :class:`CaptureError` if there is none."""
    value = getattr(module, str(node.target))
    if isinstance(value, FakeTensor):
        value = value.constant
    if not isinstance(value, torch.Tensor) or value.is_meta:
        raise CaptureError(
            f"the model uses a tensor without data that is neither parameter nor buffer (in the graph: "
            f"{node.name}); register it with register_buffer, or build it in the forward"
        )
    return value


def dim(size: int | torch.SymInt) -> Dim:
    """A size as data: an integer, or an expression over :data:`SYMBOL`."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_number else Expr(_print(expression))


def _print(expression: sympy.Expr) -> str:
    symbols = {
        s: sympy.Symbol(SYMBOL, integer=True, positive=True) for s in expression.free_symbols
    }
    text: str = _Printer().doprint(expression.xreplace(symbols))
    return text


class _Printer(PythonPrinter):
    """Python syntax of sizes; ``min`` and ``max`` as functions."""

    def _print_Max(self, expr: sympy.Expr) -> str:  # noqa: N802 (sympy's naming)
        return f"max({', '.join(self._print(a) for a in expr.args)})"

    def _print_Min(self, expr: sympy.Expr) -> str:  # noqa: N802 (sympy's naming)
        return f"min({', '.join(self._print(a) for a in expr.args)})"


def capture_joint(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    *,
    batch_size: int | None,
    grad: bool,
) -> Joint:
    """Record one step of *model* and *loss_fn* on the shapes of *batch*; no data is computed.

    *batch_size* ``None`` keeps the batch size symbolic, a number fixes it. With *grad* false only the
    forward is recorded. The model may be on ``meta``; it is left exactly as it was.

    Raises :class:`piper.errors.CaptureError` for whatever one graph cannot express.
    """
    check_torch_version(torch.__version__)
    refuse_parameter_hooks(model)
    size = batch.size if batch_size is None else batch_size
    hint = max(size or 2, 2) if batch_size is None else batch_size
    shape_env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    fake = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    rows = _symbol(fake, hint) if batch_size is None and batch.size is not None else hint
    leaves = _fake_leaves(fake, batch, rows)
    parameters, buffers = _states(model)
    with _fake_model(model, fake, grad=grad):
        step = _StepModule(model, loss_fn, batch)
        graph_module = _trace(step, list(leaves.values()), fake)
        weighted = step.weighted
    symbol = rows.node.expr if isinstance(rows, torch.SymInt) else None
    symbolic = symbol is not None and symbol not in shape_env.replacements
    _refuse_foreign_parameters(graph_module)
    simplify(graph_module.graph)
    joint = _describe(
        graph_module,
        parameters,
        buffers,
        leaves=leaves,
        weighted=weighted,
        captured_size=hint,
        symbolic=symbolic,
        size_guards=_guards(shape_env) if symbolic else (),
    )
    _refuse_random_backward(joint)
    if grad and not any(isinstance(i, SeedInput) for i in joint.inputs.values()):
        raise CaptureError(
            "the loss does not depend on any parameter that requires a gradient: nothing can be trained. "
            "Check requires_grad, torch.no_grad() and .detach() in the model and the loss"
        )
    return joint


def check_torch_version(version: str) -> None:
    """Raise :class:`CaptureError` for a release of torch that capture does not know."""
    release = ".".join(version.split(".")[:2])
    if release in TESTED_TORCH:
        return
    raise CaptureError(
        f"piper captures models through private functions of torch and knows how they behave in torch "
        f"{', '.join(TESTED_TORCH)}; found torch {version}. Install a tested release"
    )


def _symbol(fake: FakeTensorMode, hint: int) -> torch.SymInt:
    context: StatelessSymbolicContext[..., object] = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC]
    )
    seed = fake.from_tensor(torch.empty(hint), symbolic_context=context)
    size = seed.shape[0]
    assert isinstance(size, torch.SymInt)
    return size


def _fake_leaves(
    fake: FakeTensorMode, batch: Batch, rows: int | torch.SymInt
) -> dict[int, torch.Tensor]:
    """Stand-ins for the tensor leaves by number, contiguous, the batch dimension *rows* long."""
    made = {}
    for index, leaf in enumerate(batch.leaves):
        if not isinstance(leaf.value, torch.Tensor):
            continue
        sizes = list(leaf.value.shape)
        if leaf.split:
            sizes[0] = rows
        with fake:
            made[index] = torch.empty(sizes, dtype=leaf.value.dtype, device=_CAPTURE_DEVICE)
    return made


def _states(model: nn.Module) -> tuple[tuple[TensorState, ...], tuple[TensorState, ...]]:
    """Parameters and buffers, each once, with all their names."""
    transient = {
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules(remove_duplicate=False)
        for key in module._non_persistent_buffers_set
    }
    parameters = _by_identity(model.named_parameters(remove_duplicate=False))
    buffers = _by_identity(model.named_buffers(remove_duplicate=False))
    for tensor, names in (*parameters, *buffers):
        _refuse_exotic(tensor, names[0])
    return (
        tuple(TensorState(t, names, t.requires_grad) for t, names in parameters),
        tuple(
            TensorState(t, names, False, persistent=not transient.issuperset(names))
            for t, names in buffers
        ),
    )


def _by_identity(
    named: Iterator[tuple[str, torch.Tensor]],
) -> list[tuple[torch.Tensor, tuple[str, ...]]]:
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in named:
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return [(tensor, tuple(names)) for tensor, names in found.values()]


def _refuse_exotic(tensor: torch.Tensor, name: str) -> None:
    if nn.parameter.is_lazy(tensor):
        raise CaptureError(
            f"{name!r} is not initialised yet: run the model once on an example, then capture it"
        )
    if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
        raise CaptureError(
            f"{name!r} is a {type(tensor).__name__} with layout {tensor.layout}; piper places plain "
            f"dense tensors itself: pass the model without sharding, quantisation or sparse weights"
        )


@contextmanager
def _fake_model(model: nn.Module, fake: FakeTensorMode, *, grad: bool) -> Iterator[None]:
    """Give *model* stand-ins for its parameters and buffers; afterwards restore everything.

    Whatever the forward assigns to attributes of a module during the capture is undone too.
    """
    memo: dict[int, torch.Tensor] = {}
    modules = list(model.modules())
    saved = [(module, _snapshot(module)) for module in modules]
    try:
        for module in modules:
            module._parameters = {
                key: None if p is None else _stand_in(p, fake, memo, trained=grad)
                for key, p in module._parameters.items()
            }
            module._buffers = {
                key: None if b is None else _stand_in(b, fake, memo, trained=False)
                for key, b in module._buffers.items()
            }
        with watched_hooks(modules):
            yield
    finally:
        for module, attributes in saved:
            vars(module).clear()
            vars(module).update(attributes)


def _snapshot(module: nn.Module) -> dict[str, object]:
    """The attributes of *module*; dictionaries (parameters, hooks, …) copied one level deep."""
    return {
        key: value.copy() if isinstance(value, dict) and key.startswith("_") else value
        for key, value in vars(module).items()
    }


def _stand_in(
    tensor: torch.Tensor, fake: FakeTensorMode, memo: dict[int, torch.Tensor], *, trained: bool
) -> torch.Tensor:
    if id(tensor) in memo:
        return memo[id(tensor)]
    with fake:
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_CAPTURE_DEVICE
        )
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad and trained)
    memo[id(tensor)] = made
    return made


class _StepModule(nn.Module):
    """Model and loss as one module over the tensor leaves of the batch, returning plain scalars."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, batch: Batch) -> None:
        super().__init__()
        self.model = model
        # Kept out of the module tree: what a loss module registers is not part of the model.
        self._hidden = (loss_fn, batch)
        self.weighted = False
        self.trace = RegionTrace(lambda path: fx_traceback.annotate({_KEY: path}))
        self.training = model.training

    def forward(self, *tensors: torch.Tensor) -> _Step:
        loss_fn, batch = self._hidden
        self.trace.begin()
        buffers = dict(self.model.named_buffers())
        stream = iter(tensors)
        args, kwargs, targets = batch.rebuild(
            [next(stream) if leaf.is_tensor else leaf.value for leaf in batch.leaves]
        )
        with recording(self.trace):
            outputs = self.model(*args, **kwargs)
            self._write_back(buffers)
            result = self._checked(loss_fn(outputs, targets))
        self.trace.begin_backward()
        with _disable_current_modes():
            # Operations of tensor hooks carry the sequence number of the youngest autograd node.
            # Make that a node outside the graph, so that they are not taken for the loss's.
            torch.ones((), requires_grad=True).clone()
        return result

    def _write_back(self, before: dict[str, torch.Tensor]) -> None:
        """Turn ``self.buffer = new`` into an update of the buffer in place, which capture follows."""
        for name, new in self.model.named_buffers():
            old = before.get(name)
            if new is old:
                continue
            if old is None or new.shape != old.shape or new.dtype != old.dtype:
                raise CaptureError(
                    f"the forward replaces buffer {name!r} by a tensor of another shape or type; "
                    f"buffers keep their shape and dtype through training: register it as it is used"
                )
            old.copy_(new)

    def _checked(self, result: object) -> _Step:
        if isinstance(result, torch.Tensor):
            return (_scalar(result, "loss"),)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise CaptureError(
                f"loss_fn must return a scalar tensor or a pair (sum, weight), found "
                f"{type(result).__name__}"
            )
        loss, weight = result
        self.weighted = True
        if not isinstance(loss, torch.Tensor):
            raise CaptureError(f"the loss sum must be a tensor, found {type(loss).__name__}")
        if isinstance(weight, (int, float, torch.SymInt)):
            weight = torch.full((), weight, dtype=loss.dtype, device=loss.device)
        if not isinstance(weight, torch.Tensor):
            raise CaptureError(
                f"the loss weight must be a number or scalar tensor, found {weight!r}"
            )
        return _scalar(loss, "loss"), _scalar(weight.detach(), "loss weight").clone()


def _scalar(tensor: torch.Tensor, what: str) -> torch.Tensor:
    if tensor.dim() != 0:
        raise CaptureError(
            f"the {what} must be a scalar (no dimensions), found shape {tuple(tensor.shape)}; reduce "
            f"it, for instance with .mean(), or return (sum, weight)"
        )
    if what == "loss" and not tensor.is_floating_point():
        raise CaptureError(f"the loss must be a floating-point tensor, found {tensor.dtype}")
    # An output that is a view would be described through its base.
    return tensor.clone() if tensor._is_view() else tensor


def _trace(
    step: _StepModule, leaves: Sequence[torch.Tensor], fake: FakeTensorMode
) -> torch.fx.GraphModule:
    with ExitStack() as stack:
        stack.enter_context(_exporting())
        stack.enter_context(functorch_config.patch(backward_pass_autocast="off"))
        stack.enter_context(fx_traceback.preserve_node_meta())
        stack.enter_context(tracing(TracingContext(fake)))
        stack.enter_context(fake)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        try:
            exported = aot_export_joint_with_descriptors(stack, step, tuple(leaves))
        except PiperError:
            raise
        except Exception as error:
            raise _explained(error) from error
        return exported.graph_module


@contextmanager
def _exporting() -> Iterator[None]:
    """Set torch's exporting flag: libraries then take their traceable paths."""
    compiler = torch.compiler
    before = (compiler._is_compiling_flag, compiler._is_exporting_flag)
    compiler._is_compiling_flag = compiler._is_exporting_flag = True
    try:
        yield
    finally:
        compiler._is_compiling_flag, compiler._is_exporting_flag = before


def _explained(error: Exception) -> CaptureError:
    """*error* as a capture error that names the user's line and a remedy."""
    where = _user_line(error.__traceback__)
    if isinstance(error, DataDependentOutputException):
        return CaptureError(
            f"{where}: the model turns a tensor's value into a Python number ({error.func}: .item(), "
            f"bool(tensor), int(tensor) or control flow on it), but one graph serves every batch. "
            f"Compute with tensors instead (torch.where, masks), or pass the number as a non-tensor input"
        )
    if isinstance(error, DynamicOutputShapeException):
        return CaptureError(
            f"{where}: {error.func} makes a tensor whose shape depends on the data. Use an operation "
            f"with a fixed shape (torch.where with three arguments, masks, top-k, padding)"
        )
    if isinstance(error, GuardOnDataDependentSymNode):
        return CaptureError(
            f"{where}: a size depends on the data: {error}. Use fixed sizes and masks"
        )
    text = str(error)
    if "use_reentrant" in text or "is incompatible with .grad()" in text:
        return CaptureError(
            f"{where}: re-entrant checkpointing cannot be captured. Call "
            f"torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or leave checkpointing out "
            f"and use piper.Recompute"
        )
    if "does not require grad" in text:
        return CaptureError(f"the loss does not depend on any trained parameter ({text.strip()})")
    first = text.strip().splitlines()[0] if text.strip() else ""
    return CaptureError(f"{where}: capturing the model failed: {type(error).__name__}: {first}")


def _user_line(trace: TracebackType | None) -> str:
    """``file:line (code)`` of the innermost frame that belongs neither to torch nor to piper."""
    own = (torch.__path__[0], __file__.rsplit("/", 1)[0], "<")
    frames = [f for f in traceback.extract_tb(trace) if not f.filename.startswith(own)]
    if not frames:
        return "in the model"
    frame = frames[-1]
    return f"{frame.filename}:{frame.lineno} ({(frame.line or '').strip()})"


def _guards(shape_env: ShapeEnv) -> tuple[str, ...]:
    """Conditions on the batch size under which the graph holds.

    torch treats 0 and 1 specially, so a symbolic size is at least 2.
    """
    texts = [f"{SYMBOL} >= 2", *(_print(g.expr) for g in shape_env.guards)]
    return tuple(text for text in dict.fromkeys(texts) if text != "True")


def _refuse_foreign_parameters(module: torch.fx.GraphModule) -> None:
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target), None)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise CaptureError(
                f"the step uses a trained tensor of shape {tuple(value.shape)} that is not a registered "
                f"parameter of the model; register it (self.x = nn.Parameter(...), nn.ParameterList, "
                f"nn.ModuleList), also when it belongs to the loss"
            )


def _describe(
    module: torch.fx.GraphModule,
    parameters: tuple[TensorState, ...],
    buffers: tuple[TensorState, ...],
    *,
    leaves: Mapping[int, torch.Tensor],
    weighted: bool,
    captured_size: int,
    symbolic: bool,
    size_guards: tuple[str, ...],
) -> Joint:
    """Read the descriptors of inputs and outputs."""
    inputs = {
        node: _input(node.meta["desc"], list(leaves))
        for node in module.graph.find_nodes(op="placeholder")
    }
    output = module.graph.output_node()
    results = pytree.tree_leaves(output.args[0], is_leaf=lambda leaf: leaf is None)
    plain: dict[int, torch.fx.Node] = {}
    gradients: list[tuple[str, torch.fx.Node | None]] = []
    updates: list[tuple[str, torch.fx.Node]] = []
    for result, descriptor in zip(results, output.meta["desc"], strict=True):
        match descriptor:
            case PlainAOTOutput(idx=idx):
                plain[idx] = result
            case GradAOTOutput(grad_of=ParamAOTInput(target=name)):
                gradients.append((_model_name(name), result))
            case None:
                pass  # an input that requires no gradient
            case InputMutationAOTOutput(mutated_input=BufferAOTInput(target=name)):
                updates.append((_model_name(name), result))
            case InputMutationAOTOutput(mutated_input=PlainAOTInput()):
                pass  # the caller's batch is not written back
            case InputMutationAOTOutput(mutated_input=ParamAOTInput(target=name)):
                raise CaptureError(
                    f"the forward writes parameter {_model_name(name)!r}; only the optimizer may. "
                    f"Make it a buffer, or compute the changed weight without writing it back"
                )
            case _:
                raise CaptureError(f"the step returns something piper does not know: {descriptor}")
    return Joint(
        module=module,
        inputs=inputs,
        loss=plain[0],
        weight=plain[1] if weighted else None,
        gradients=tuple(gradients),
        buffer_updates=tuple(updates),
        parameters=parameters,
        buffers=buffers,
        leaves=leaves,
        captured_size=captured_size,
        symbolic=symbolic,
        size_guards=size_guards,
    )


def _input(descriptor: AOTInput, leaf_indices: Sequence[int]) -> Input:
    match descriptor:
        case ParamAOTInput(target=name):
            return ParameterInput(_model_name(name))
        case BufferAOTInput(target=name):
            return BufferInput(_model_name(name))
        case PlainAOTInput(idx=index):
            return BatchInput(leaf_indices[index])
        case TangentAOTInput(output=PlainAOTOutput(idx=0)):
            return SeedInput()
        case _:
            raise CaptureError(
                f"the step has an input that piper does not know: {descriptor}; a buffer that requires "
                f"a gradient, or an output that aliases an input, can cause it"
            )


def _model_name(name: str) -> str:
    return name.removeprefix("model.")


def _refuse_random_backward(joint: Joint) -> None:
    for node in joint.module.graph.nodes:
        if is_backward(node) and is_random(node):
            raise CaptureError(
                f"the backward draws random numbers again ({node.target}, region "
                f"{dict(region(node) or ())}): dropout inside a checkpoint would use another mask than "
                f"in the forward. Move the dropout out of torch.utils.checkpoint, or leave the "
                f"checkpoint out and use piper.Recompute, which repeats the same mask"
            )


def is_random(node: torch.fx.Node) -> bool:
    """Whether *node* draws random numbers."""
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in target.tags
    )

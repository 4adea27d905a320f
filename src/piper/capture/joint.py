"""Capture of model + loss as one joint forward-and-backward graph.

With its helpers ``states``, ``sizes`` and ``explain``, the only place that touches private
functions of torch: ``aot_export_joint_with_descriptors`` and its descriptors, fake tensors with a
symbolic batch size, node annotations. The tested releases are in :data:`TESTED_TORCH`.
"""
# ruff: noqa: SLF001 (private state of modules and tensors has no public accessor)

import logging
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import torch.fx
import torch.fx.traceback as fx_traceback
import torch.utils._pytree as pytree
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
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
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,
)
from torch.utils._python_dispatch import _disable_current_modes

from piper.capture.annotate import RegionPath, RegionTrace, recording
from piper.capture.batch import Batch
from piper.capture.effects import Watch, find_effect, line_of
from piper.capture.explain import explained
from piper.capture.hooks import refuse_parameter_hooks
from piper.capture.loss import read_loss
from piper.capture.precision import Precision, cast
from piper.capture.simplify import simplify
from piper.capture.sizes import batch_symbol, dim, size_guards
from piper.capture.states import TensorState, fake_leaves, fake_model, model_states
from piper.capture.surroundings import InThisThread
from piper.errors import CaptureError, PiperError

TESTED_TORCH = ("2.13",)
"""Releases whose private functions are known to behave as this module expects."""

_KEY = "piper.region"
_FUNCTORCH_CONFIG = {"backward_pass_autocast": "off"}  # as .backward() outside of autocast

LossFn: TypeAlias = Callable[..., object]
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
class Joint:
    """One captured step.

    ``gradients`` has one entry per name of a trained parameter (a tied parameter has several), with
    ``None`` where the loss does not depend on it. ``leaves`` are stand-ins of the batch's tensors
    by leaf number. ``size_guards`` are conditions on :data:`~piper.capture.sizes.SYMBOL`,
    ``symbolic`` is false when the batch size is the constant ``captured_size``. Under a
    ``precision`` the graph reads floating-point parameters, and makes their gradients, in its
    compute type; ``parameters`` are as the model has them.
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
    precision: Precision | None = None


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
    """Number of the autograd node: equal for a forward operation and those that compute its
    gradient.
    """
    number: int | None = node.meta.get("seq_nr")
    return number


def constant_value(module: torch.fx.GraphModule, node: torch.fx.Node) -> torch.Tensor:
    """The data of a constant of the graph; :class:`CaptureError` if there is none."""
    value = getattr(module, str(node.target))
    if isinstance(value, FakeTensor):
        value = value.constant
    if str(node.target).startswith("_opaque_obj"):
        raise CaptureError(
            "the model gives an operator a torch.Generator of its own, whose numbers would be the same in every step: leave generator= out; "
            "random numbers are then new in every step, and the same under every strategy"
        )
    if not isinstance(value, torch.Tensor) or value.is_meta:
        raise CaptureError(
            f"the model uses a tensor without data that is neither parameter nor buffer (in the graph: "
            f"{node.name}); register it with register_buffer, or build it in the forward"
        )
    return value


def capture_joint(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    *,
    batch_size: int | None,
    grad: bool,
    precision: Precision | None = None,
) -> Joint:
    """Record one step of *model* and *loss_fn* on the shapes of *batch*; no data is computed.

    *batch_size* ``None`` keeps the batch size symbolic, a number fixes it. With *grad* false only
    the forward is recorded. The model may be on ``meta``; it is left exactly as it was. *precision*
    says in which types is computed.

    Raises :class:`piper.errors.CaptureError` for whatever one graph cannot express.
    """
    check_torch_version(torch.__version__)
    refuse_parameter_hooks(model)
    size = batch.size if batch_size is None else batch_size
    hint = max(size or 2, 2) if batch_size is None else batch_size
    shape_env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    fake = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    rows = batch_symbol(fake, hint) if batch_size is None and batch.size is not None else hint
    leaves = fake_leaves(fake, batch, rows)
    parameters, buffers = model_states(model)
    compute = None if precision is None else precision.compute
    with fake_model(model, fake, grad=grad, compute=compute) as rewind:
        step = _StepModule(model, loss_fn, batch, precision, rewind)
        with kernels_of_this_machine({p.dtype for p in model.parameters()}):
            graph_module = _trace(step, list(leaves.values()), fake)
        _refuse_effects(graph_module, step, list(leaves.values()), fake)
        weighted = step.weighted
    symbolic = isinstance(rows, torch.SymInt) and not isinstance(dim(rows), int)
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
        size_guards=size_guards(shape_env) if symbolic else (),
    )
    joint = replace(joint, precision=precision)
    _refuse_random_backward(joint)
    if grad and not any(isinstance(i, SeedInput) for i in joint.inputs.values()):
        raise CaptureError(
            "the loss does not depend on any parameter that requires a gradient: nothing can be trained. "
            "Check requires_grad, torch.no_grad() and .detach() in the model and the loss"
        )
    return joint


def _refuse_effects(
    module: torch.fx.GraphModule,
    step: "_StepModule",
    leaves: Sequence[torch.Tensor],
    fake: FakeTensorMode,
) -> None:
    """Raise :class:`CaptureError` if the graph of *step* has an effect; another trace says where."""
    effect = find_effect(module.graph)
    if effect is None:
        return
    step.watching = Watch(effect.operator)
    try:
        _trace(step, leaves, fake)
    except PiperError as error:
        raise effect.refused(line_of(error)) from None
    raise effect.refused("")


def check_torch_version(version: str) -> None:
    """Raise :class:`CaptureError` for a release of torch that capture does not know."""
    release = ".".join(version.split(".")[:2])
    if release in TESTED_TORCH:
        return
    raise CaptureError(
        f"piper captures models through private functions of torch and knows how they behave in torch "
        f"{', '.join(TESTED_TORCH)}; found torch {version}. Install a tested release"
    )


class _StepModule(nn.Module):
    """Model and loss as one module over the tensor leaves of the batch, returning plain scalars."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        batch: Batch,
        precision: Precision | None,
        rewind: Callable[[], None],
    ) -> None:
        super().__init__()
        self.model = model
        self._rewind = rewind
        self._precision = precision
        # Kept out of the module tree: what a loss module registers is not part of the model.
        self._hidden = (loss_fn, batch)
        self.weighted = False
        self.watching: Watch | None = None
        self.trace = RegionTrace(lambda path: fx_traceback.annotate({_KEY: path}))
        self.training = model.training

    def forward(self, *tensors: torch.Tensor) -> _Step:
        loss_fn, batch = self._hidden
        self._rewind()
        self.trace.begin()
        buffers = dict(self.model.named_buffers())
        stream = iter(tensors)
        args, kwargs, targets = batch.rebuild(
            [next(stream) if leaf.is_tensor else leaf.value for leaf in batch.leaves]
        )
        with recording(self.trace), self.watching or nullcontext():
            if self._precision is not None:
                args, kwargs = cast((args, kwargs), self._precision.compute)
            outputs = self.model(*args, **kwargs)
            self._write_back(buffers)
            if self._precision is not None:
                outputs = cast(outputs, self._precision.output)
            loss = read_loss(loss_fn(outputs, targets))
            self.weighted = loss.weight is not None
            result = tuple(_own(t) for t in (loss.value, loss.weight) if t is not None)
        self.trace.begin_backward()
        with _disable_current_modes():
            # Operations of tensor hooks carry the sequence number of the youngest autograd node.
            # Make that a node outside the graph, so that they are not taken for the loss's.
            torch.ones((), requires_grad=True).clone()
        return result

    def _write_back(self, before: dict[str, torch.Tensor]) -> None:
        """Turn ``self.buffer = new`` into an update of the buffer in place, which capture
        follows.
        """
        after = dict(self.model.named_buffers())
        if lost := [name for name in before if name not in after]:
            raise CaptureError(
                f"the forward removes buffer {lost[0]!r}; buffers stay through training: write another value into it"
            )
        for name, new in after.items():
            old = before.get(name)
            if new is old:
                continue
            if old is None:
                raise CaptureError(
                    f"the forward registers a new buffer {name!r}; register it in __init__, so that its value is kept from step to step"
                )
            if new.shape != old.shape or new.dtype != old.dtype:
                raise CaptureError(
                    f"the forward replaces buffer {name!r} by a tensor of another shape or type; "
                    f"buffers keep their shape and dtype through training: register it as it is used"
                )
            old.copy_(new)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A result of the graph: one that is a view, or an input, would be described through that."""
    return tensor.clone() if tensor._is_view() or tensor.grad_fn is None else tensor


def _trace(
    step: _StepModule, leaves: Sequence[torch.Tensor], fake: FakeTensorMode
) -> torch.fx.GraphModule:
    with ExitStack() as stack:
        stack.enter_context(traceable_paths())
        stack.enter_context(functorch_config.patch(_FUNCTORCH_CONFIG))
        stack.enter_context(fx_traceback.preserve_node_meta())
        stack.enter_context(tracing(TracingContext(fake)))
        stack.enter_context(fake)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_quiet())
        try:
            exported = aot_export_joint_with_descriptors(stack, step, tuple(leaves))
        except PiperError:
            raise
        except Exception as error:
            raise explained(error) from error
        return exported.graph_module


@contextmanager
def kernels_of_this_machine(types: Container[torch.dtype]) -> Iterator[None]:
    """What is traced takes oneDNN's recurrent layers for bfloat16, if that is among the *types*,
    even where the processor does not have them; PyTorch itself does not.
    """
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    with (
        nullcontext()
        if supported or torch.bfloat16 not in types
        else torch.backends.mkldnn.flags(enabled=False)
    ):
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's own reports of a failing trace off the terminal: the error says it better."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def traceable_paths() -> Iterator[None]:
    """Set torch's exporting flag: libraries then take the paths that they take when captured (of
    two kernels that compute the same, perhaps another one).
    """
    compiler = torch.compiler
    before = (compiler._is_compiling_flag, compiler._is_exporting_flag)
    # Optimizers and models that other threads run meanwhile ask too.
    compiler._is_compiling_flag = compiler._is_exporting_flag = InThisThread()  # type: ignore[assignment]
    try:
        yield
    finally:
        compiler._is_compiling_flag, compiler._is_exporting_flag = before


@contextmanager
def captured_kernels() -> Iterator[None]:
    """Eager PyTorch inside calls the kernels that a capture records: libraries take the paths that
    they take when captured, and torch takes composite operators (dropout, also that of attention)
    apart as its tracer does.
    """
    with traceable_paths(), enable_python_dispatcher():
        yield


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
                _refuse_sparse(_model_name(name), result)
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
    inputs = {
        node: _input(node.meta["desc"], list(leaves))
        for node in module.graph.find_nodes(op="placeholder")
    }
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


def _refuse_sparse(name: str, gradient: torch.fx.Node | None) -> None:
    value = None if gradient is None else gradient.meta.get("val")
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        raise CaptureError(sparse_gradient(name))


def sparse_gradient(name: str) -> str:
    """What is wrong with a parameter whose gradient is sparse."""
    return (
        f"the gradient of parameter {name!r} is sparse; gradients are added up, reduced and sharded as dense tensors: "
        "make the embedding with sparse=False (F.embedding and EmbeddingBag alike), and use an optimizer for dense gradients"
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
        case TangentAOTInput(
            output=InputMutationAOTOutput(mutated_input=BufferAOTInput(target=name))
        ):
            raise CaptureError(
                f"the forward writes a value with a gradient into buffer {_model_name(name)!r}: the next microbatch's backward would have "
                "to go through this one's graph. Write it detached: self.buffer.copy_(value.detach())"
            )
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
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags

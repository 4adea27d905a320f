"""Single-process training, the measure of every strategy: eager PyTorch, microbatch after
microbatch.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from piper.api.loss_scaler import LossScaler, is_skipped
from piper.api.rows import Rows
from piper.api.separate_uses import SeparateUses
from piper.api.swapped import with_tensors
from piper.capture.batch import as_arguments
from piper.capture.joint import LossFn, captured_kernels, kernels_of_this_machine
from piper.capture.loss import check_weight, read_loss
from piper.capture.precision import Precision, cast, is_cast
from piper.devices.tensors import torch_dtype
from piper.dtypes import DType
from piper.ir.body import TensorSpec
from piper.ir.dag import Clip, Dag, LossKind, Parameter
from piper.models.huggingface import capturable_experts, plain_experts
from piper.runtime.batch import Batch
from piper.runtime.optimizer import OptimizerSpec
from piper.runtime.random import DrawFrom
from piper.runtime.state import ModelState


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """One step's loss, and gradients by parameter name (absent where autograd gives none); of a
    training step that clips, the clipped ones, and their norm before. Of a step that was
    ``skipped``, because under a scaled loss the norm was not finite, none: they were not used.
    ``loss_scale`` is what the loss was scaled by.
    """

    loss: float
    gradients: dict[str, torch.Tensor]
    grad_norm: float | None = None
    loss_scale: float | None = None
    skipped: bool = False


class Reference:
    """One process that runs the global batch's microbatches in sequence, sums their gradients as
    the loss demands, and updates.

    Works on copies of the model's tensors; the model itself (its modules, hooks, mode) is used as
    it is. Random operators draw from the same streams as under any strategy. *clip* is that of the
    training step.

    Under a *precision* the parameters are its master weights, and each use of one reads a rounded
    copy of its own, so that gradients are summed over uses, as over microbatches, in its reduce
    type. (Autograd by itself would add up the gradients of a parameter that is used twice in the
    compute type, where the sum depends on the order.) What each backward starts from is the same as
    under any strategy: the gradient of the step's loss with respect to a microbatch's, times the
    scale of the loss. And libraries take the paths that they take when captured: Hugging Face's
    attention then calls its kernel with a mask where it would else say that it is causal, which
    rounds otherwise.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFn,
        dag: Dag,
        tensors: Mapping[str, torch.Tensor],
        optimizer: OptimizerSpec | None,
        seed: int = 0,
        clip: Clip | None = None,
        precision: Precision | None = None,
    ) -> None:
        self._model, self._loss_fn, self._dag, self._seed = model, loss_fn, dag, seed
        self._clip, self._precision = clip, precision
        self.scaler: LossScaler | None = None
        if precision is not None and precision.loss_scale is not None:
            self.scaler = LossScaler(precision.loss_scale)
        self._rows = Rows(dag.batch)
        parameters = {n: t for n, t in tensors.items() if n in dag.parameters}
        buffers = {n: t for n, t in tensors.items() if n in dag.buffers}
        declared = dag.parameters
        if precision is not None:
            declared = {n: _declared(p, dag.master_dtype(n)) for n, p in declared.items()}
            parameters = {
                n: t.to(torch_dtype(declared[n].spec.dtype)) for n, t in parameters.items()
            }
        self._start = (parameters, buffers, declared, optimizer)
        self.state = self.initial_state()

    def initial_state(self) -> ModelState:
        """A state of its own, as it is before the first step."""
        return ModelState(*self._start, torch.device("cpu"))

    def gradients(self, batch: Batch, num_microbatches: int, step: int) -> ReferenceStep:
        """Loss and gradients of one step; writes the model's buffers, updates nothing."""
        total_loss, total_weight = 0.0, 0.0
        scale = 1.0 if self.scaler is None else self.scaler.scale
        mean = self._dag.loss_kind is LossKind.MEAN
        seed = scale / num_microbatches if mean else scale
        sums: dict[str, torch.Tensor] = {}
        for number, part in enumerate(self._rows.parts(batch, num_microbatches)):
            used = _Parameters(self.state, self._precision)
            with torch.inference_mode(mode=False), torch.enable_grad():
                loss, weight, found = self._run(part, step, number, used, seed)
            for name, gradient in found.items():
                sums[name] = sums[name] + gradient if name in sums else gradient
            total_loss += float(loss.detach())
            total_weight += weight
        total_weight = total_weight or math.nan  # 0 / 0, as for tensors
        divisor = scale if mean else total_weight * scale
        gradients = {name: self._updating(g) / divisor for name, g in sums.items()}
        return ReferenceStep(total_loss / total_weight, gradients)

    def _updating(self, gradient: torch.Tensor) -> torch.Tensor:
        """A sum in the type in which it is used."""
        if self._precision is None or not is_cast(gradient):
            return gradient
        return gradient.to(self._precision.master)

    def step(
        self, batch: Batch, num_microbatches: int, step: int, lr_factor: float = 1.0
    ) -> ReferenceStep:
        """One training step, with learning rates *lr_factor* times those of the optimizer."""
        self.state.begin_step(lr_factor)
        result = self._clipped(self.gradients(batch, num_microbatches, step))
        if self.scaler is None:
            self.state.update(result.gradients, None)
            return result
        scale, skipped = self.scaler.scale, is_skipped(result.grad_norm)
        self.scaler.update(skipped=skipped)
        if skipped:
            return ReferenceStep(result.loss, {}, result.grad_norm, scale, skipped=True)
        self.state.update(result.gradients, None)
        return ReferenceStep(result.loss, result.gradients, result.grad_norm, scale)

    def _clipped(self, result: ReferenceStep) -> ReferenceStep:
        """*result* as torch's own function clips it."""
        if self._clip is None:
            return result
        parameters = [torch.nn.Parameter(g, requires_grad=False) for g in result.gradients.values()]
        for parameter, gradient in zip(parameters, result.gradients.values(), strict=True):
            parameter.grad = gradient.clone()
        max_norm = math.inf if self._clip.max_norm is None else self._clip.max_norm
        norm = torch.nn.utils.clip_grad_norm_(
            parameters, max_norm, float(self._clip.norm.value), error_if_nonfinite=False
        )
        found = [parameter.grad for parameter in parameters]
        gradients = {n: g for n, g in zip(result.gradients, found, strict=True) if g is not None}
        return ReferenceStep(result.loss, gradients, float(norm))

    def whole(self, batch: Batch, step: int) -> ReferenceStep:
        """Loss and gradients of the whole batch in one piece; writes no buffer that outlives the
        call.
        """
        with self._buffers_kept():
            return self._clipped(self.gradients(batch, 1, step))

    def weight(self, batch: Batch) -> float:
        """The weight of the loss of *batch*; writes no buffer that outlives the call."""
        with self._buffers_kept(), torch.no_grad():
            return self._run(batch, 0, 0, _Parameters(self.state, self._precision), None)[1]

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        saved = {name: buffer.clone() for name, buffer in self.state.buffers.items()}
        yield
        self.state.buffers.update(saved)

    def _run(
        self, part: Batch, step: int, number: int, used: "_Parameters", seed: float | None
    ) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
        """Loss, weight and, from *seed* on if given, gradients of a microbatch; writes buffers."""
        tensors = {**used.under_all_names(self._dag), **self._buffers()}

        def run() -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
            loss, weight = self._forward(part, used)
            return loss, weight, {} if seed is None else used.gradients(loss, seed)

        with DrawFrom(self._seed, step, number):
            result = with_tensors(self._model, tensors, run)
        for name, old in self.state.buffers.items():
            if tensors[name] is not old:  # `self.buffer = new`
                self.state.buffers[name] = tensors[name].detach().clone()
        return result

    def _forward(self, part: Batch, used: "_Parameters") -> tuple[torch.Tensor, float]:
        inputs, targets = part
        args, kwargs = as_arguments(inputs)
        # A policy rounds what each kernel makes: then it must be the kernels that were captured.
        captured = self._precision is not None
        paths = captured_kernels() if captured else nullcontext()
        experts = (capturable_experts if captured else plain_experts)(self._model)
        types = () if self._precision is None else (self._precision.compute,)
        with paths, kernels_of_this_machine(types), experts, used.separate():
            if self._precision is not None:
                args, kwargs = cast((args, kwargs), self._precision.compute)
            outputs = self._model(*args, **kwargs)
            if self._precision is not None:
                outputs = cast(outputs, self._precision.output)
            result = self._loss_fn(outputs, targets)
        loss = read_loss(result)
        weight = 1.0 if loss.weight is None else float(loss.weight)
        check_weight(weight)
        return loss.value, weight

    def _buffers(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for name, buffer in self._dag.buffers.items():
            if name in self.state.buffers:
                for alias in (name, *buffer.aliases):
                    tensors[alias] = self.state.buffers[name]
        return tensors


class _Parameters:
    """The parameters as one forward and backward sees them: themselves, or under a *precision*
    stand-ins of the compute type.
    """

    def __init__(self, state: ModelState, precision: Precision | None) -> None:
        self._tensors: dict[str, torch.Tensor] = dict(state.parameters)
        self._wide: dict[str, torch.Tensor] = {}
        if precision is None:
            return
        for name, master in state.parameters.items():
            if not is_cast(master):
                continue
            rounded = master.detach().to(precision.compute, copy=True)
            wide = rounded.to(precision.reduce, copy=True)
            self._tensors[name] = rounded.requires_grad_(master.requires_grad)
            self._wide[name] = wide.requires_grad_(master.requires_grad)

    def under_all_names(self, dag: Dag) -> dict[str, torch.Tensor]:
        """The tensors to run the model with."""
        return {
            alias: self._tensors[name]
            for name, parameter in dag.parameters.items()
            for alias in (name, *parameter.aliases)
        }

    def separate(self) -> AbstractContextManager[object]:
        """To be entered around the forward."""
        if not self._wide:
            return nullcontext()
        return SeparateUses([(self._tensors[name], wide) for name, wide in self._wide.items()])

    def gradients(self, loss: torch.Tensor, seed: float) -> dict[str, torch.Tensor]:
        """The gradient of each parameter for which autograd gives one; *seed* is the loss's."""
        sources = [
            (name, tensor)
            for tensors in (self._tensors, self._wide)
            for name, tensor in tensors.items()
            if tensor.requires_grad
        ]
        if not sources or not loss.requires_grad:
            return {}
        found = torch.autograd.grad(
            loss, [t for _, t in sources], torch.full_like(loss, seed), allow_unused=True
        )
        sums: dict[str, torch.Tensor] = {}
        for (name, _), gradient in zip(sources, found, strict=True):
            if gradient is not None:
                wide = self._wide.get(name)
                own = gradient if wide is None else gradient.to(wide.dtype)
                sums[name] = sums[name] + own if name in sums else own
        return {name: gradient.detach() for name, gradient in sums.items()}


def _declared(parameter: Parameter, kept_in: DType) -> Parameter:
    """*parameter* as it is kept."""
    return replace(parameter, spec=TensorSpec(parameter.spec.shape, kept_in))

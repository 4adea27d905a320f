"""Single-process training, the measure of every strategy: eager PyTorch, microbatch after microbatch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.func import functional_call

from piper.api.rows import Rows
from piper.capture.batch import as_arguments
from piper.capture.joint import LossFn
from piper.ir.dag import Clip, Dag
from piper.runtime.batch import Batch
from piper.runtime.random import DrawFrom
from piper.runtime.state import ModelState, OptimizerSpec


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """One step's loss, and gradients by parameter name (absent where autograd gives none); of a training step that clips, the clipped
    ones, and their norm before.
    """

    loss: float
    gradients: dict[str, torch.Tensor]
    grad_norm: float | None = None


class Reference:
    """One process that runs the global batch's microbatches in sequence, sums their gradients as the loss demands, and updates.

    Works on copies of the model's tensors; the model itself (its modules, hooks, mode) is used as it is. Random operators
    draw from the same streams as under any strategy. *clip* is that of the training step.
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
    ) -> None:
        self._model, self._loss_fn, self._dag, self._seed = model, loss_fn, dag, seed
        self._clip = clip
        self._rows = Rows(dag.batch)
        parameters = {n: t for n, t in tensors.items() if n in dag.parameters}
        buffers = {n: t for n, t in tensors.items() if n in dag.buffers}
        self.state = ModelState(parameters, buffers, dag.parameters, optimizer, torch.device("cpu"))

    def gradients(self, batch: Batch, num_microbatches: int, step: int) -> ReferenceStep:
        """Loss and gradients of one step; writes the model's buffers, updates nothing."""
        total_loss, total_weight = 0.0, 0.0
        sums: dict[str, torch.Tensor] = {}
        for number, part in enumerate(self._rows.parts(batch, num_microbatches)):
            loss, weight = self._forward(part, step, number)
            for name, gradient in self._backward(loss).items():
                sums[name] = sums[name] + gradient if name in sums else gradient
            total_loss += float(loss.detach())
            total_weight += weight
        total_weight = total_weight or math.nan  # 0 / 0, as for tensors
        return ReferenceStep(
            total_loss / total_weight, {name: g / total_weight for name, g in sums.items()}
        )

    def step(self, batch: Batch, num_microbatches: int, step: int) -> ReferenceStep:
        """One training step."""
        self.state.begin_step(step)
        result = self._clipped(self.gradients(batch, num_microbatches, step))
        self.state.update(result.gradients, None)
        return result

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

    def loss(self, batch: Batch, step: int) -> float:
        """The loss of the whole batch in one piece; writes no buffer that outlives the call."""
        loss, weight = self._without_trace(batch, step)
        return loss / (weight or math.nan)

    def weight(self, batch: Batch) -> float:
        """The weight of the loss of *batch*; writes no buffer that outlives the call."""
        return self._without_trace(batch, 0)[1]

    def _without_trace(self, batch: Batch, step: int) -> tuple[float, float]:
        saved = {name: buffer.clone() for name, buffer in self.state.buffers.items()}
        with torch.no_grad():
            loss, weight = self._forward(batch, step, 0)
        for name, buffer in saved.items():
            self.state.buffers[name].copy_(buffer)
        return float(loss), weight

    def _forward(self, part: Batch, step: int, number: int) -> tuple[torch.Tensor, float]:
        inputs, targets = part
        args, kwargs = as_arguments(inputs)
        with DrawFrom(self._seed, step, number):
            outputs = functional_call(self._model, self._tensors(), args, kwargs)
            result = self._loss_fn(outputs, targets)
        loss, weight = result if isinstance(result, tuple) else (result, 1.0)
        assert isinstance(loss, torch.Tensor)
        return loss, float(weight)

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self._dag.parameters.items():
            for alias in (name, *parameter.aliases):
                tensors[alias] = self.state.parameters[name]
        for name, buffer in self._dag.buffers.items():
            if name in self.state.buffers:
                for alias in (name, *buffer.aliases):
                    tensors[alias] = self.state.buffers[name]
        return tensors

    def _backward(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        trained = {n: p for n, p in self.state.parameters.items() if p.requires_grad}
        if not trained or not loss.requires_grad:
            return {}
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        return {n: g.detach() for n, g in zip(trained, found, strict=True) if g is not None}

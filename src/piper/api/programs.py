"""From a model, a strategy and a batch to a verified plan; one per batch signature, made once."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from piper.capture import Captured, capture_with_constants
from piper.capture.joint import LossFn
from piper.directives.base import Directive
from piper.directives.order import Order
from piper.directives.strategy import apply
from piper.plan.model import Plan
from piper.planner import microbatch_size, plan, violated_guard
from piper.runtime.batch import Batch, Signature, signature
from piper.verify import verify


@dataclass(frozen=True, slots=True)
class Program:
    """A verified plan for global batches of one signature, and the capture that it was made from."""

    key: str
    plan: Plan
    signature: Signature
    captured: Captured

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """Values of the constant buffers."""
        return self.captured.constants


class Programs:
    """Makes and keeps the programs of one model under one strategy.

    ``batch_dims`` is that of :func:`piper.capture`. A model whose graph does not hold for the strategy's microbatch
    size is captured again at that size. So is one whose modules have changed between training and evaluation mode, or
    some of whose parameters were frozen.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFn,
        strategy: Sequence[Directive],
        batch_dims: Mapping[str, int | None] | None = None,
    ) -> None:
        self.model, self.loss_fn, self.batch_dims = model, loss_fn, batch_dims
        self.strategy = tuple(strategy)
        self._made: dict[tuple[str, Signature, tuple[bool, ...]], Program] = {}

    def training(self, batch: Batch) -> Program:
        """The program of a training step on batches like *batch*."""
        return self._get("train", batch, self.strategy)

    def evaluation(self, batch: Batch) -> Program:
        """The program of the forward pass alone, in evaluation mode. Orders speak of training and are left out."""
        placed = tuple(d for d in self.strategy if not isinstance(d, Order))
        with evaluating(self.model):
            return self._get("eval", batch, placed)

    def _get(self, mode: str, batch: Batch, strategy: Sequence[Directive]) -> Program:
        found = signature(batch)
        known = (mode, found, _flags(self.model))
        if known not in self._made:
            key = f"{mode}-{len(self._made)}"
            self._made[known] = self._make(key, batch, found, strategy, grad=mode == "train")
        return self._made[known]

    def _make(
        self,
        key: str,
        batch: Batch,
        found: Signature,
        strategy: Sequence[Directive],
        *,
        grad: bool,
    ) -> Program:
        captured = self._capture(batch, None, grad=grad)
        dag = apply(captured.dag, strategy)
        size = microbatch_size(dag)
        if violated_guard(dag, size) is not None:
            captured = self._capture(batch, size, grad=grad)
            dag = apply(captured.dag, strategy)
        planned = plan(dag)
        verify(planned)
        return Program(key, planned, found, captured)

    def _capture(self, batch: Batch, size: int | None, *, grad: bool) -> Captured:
        return capture_with_constants(
            self.model,
            self.loss_fn,
            batch,
            batch_dims=self.batch_dims,
            batch_size=size,
            grad=grad,
        )


def _flags(model: torch.nn.Module) -> tuple[bool, ...]:
    """What a graph takes from the model besides its tensors: which modules are in training mode, which parameters are trained."""
    trained = (parameter.requires_grad for parameter in model.parameters())
    return (*(module.training for module in model.modules()), *trained)


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """*model* in evaluation mode; every module's own flag is put back afterwards."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in flags.items():
            module.training = training


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters and buffers by name, every alias of a tied one included."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in tensors.items()}

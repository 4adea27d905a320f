"""From a model, a strategy and a batch to a verified plan; one per batch signature, made once."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from piper.api.kinds import KEPT, Kinds
from piper.brief import brief, count
from piper.capture import Captured, capture_with_constants
from piper.capture.forms import as_pair, loss_function
from piper.capture.joint import LossFn
from piper.capture.precision import Precision
from piper.capture.surroundings import plain_surroundings
from piper.capture.wrapped import refuse_wrapped
from piper.directives.base import Directive
from piper.directives.order import Order
from piper.directives.strategy import apply, as_strategy
from piper.errors import ConfigError, expect
from piper.ir.dag import Clip, Dag, GradientUse
from piper.ir.edit import discard_buffer_updates, use_gradients
from piper.ir.operators import foreign_operators
from piper.models.huggingface import capturable_experts
from piper.ops.grad_norm import Norm
from piper.plan.model import Plan
from piper.planner import microbatch_size, plan_with, violated_guard
from piper.planner.budget import Limits
from piper.runtime.batch import Batch, Signature, signature
from piper.verify import verify

TRAIN, EVAL = "train", "eval"
"""The modes of programs, with which their keys begin."""


def _brief_program(it: "Program") -> str:
    return f"{it.key!r}, {it.plan!r}"


@brief(_brief_program)
@dataclass(frozen=True, slots=True)
class Program:
    """A verified plan for global batches of one signature, and the capture that it was made
    from.
    """

    key: str
    plan: Plan
    signature: Signature
    captured: Captured

    @property
    def trains(self) -> bool:
        """Whether it is a training step, not an evaluation."""
        return self.key.startswith(TRAIN)

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """Values of the constant buffers."""
        return self.captured.constants


def _brief_programs(it: "Programs") -> str:
    return f"{type(it.model).__name__}, {count(len(it.strategy), 'directive')}, {count(len(it._made), 'program')} made"  # noqa: SLF001


@brief(_brief_programs)
class Programs:
    """Makes and keeps the programs of one model under one strategy.

    ``batch_dims`` is that of :func:`piper.capture`. A model whose graph does not hold for the
    strategy's microbatch size is captured again at that size. So is one whose modules have changed
    between training and evaluation mode, or some of whose parameters were frozen. ``clip`` is that
    of every training step, ``precision`` that of every step, ``limits`` those of every plan. Plans
    of more than ``fold_above`` devices are folded if that makes them smaller: they can be looked
    at, not run.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFn | None,
        strategy: Sequence[Directive],
        batch_dims: Mapping[str, int | None] | None = None,
        clip: Clip | None = None,
        precision: Precision | None = None,
        limits: Limits | None = None,
        fold_above: int | None = None,
    ) -> None:
        expect(model, torch.nn.Module, "model", "give an instance, not its class or its forward")
        refuse_wrapped(model)
        self.fold_above = fold_above
        self.limits = limits or Limits()
        self.precision = precision
        self.loss_scaled = precision is not None and precision.loss_scale is not None
        # Whether all gradients are finite is seen by their norm.
        self.clip = Clip(Norm.L2, None) if self.loss_scaled and clip is None else clip
        self.model, self.batch_dims = model, batch_dims
        self.own_loss, self.loss_fn = loss_fn is None, loss_function(loss_fn)
        self.strategy = as_strategy(strategy)
        # What is to be tried with a batch of a new signature before it is captured.
        self.rehearse: Callable[[Batch], None] | None = None
        self._made: dict[tuple[object, ...], Program] = {}  # in the order of their last use
        self._count = 0  # of programs, those included that are no longer kept
        self._kinds = Kinds()
        self._trained: Plan | None = None  # by the last training step
        self._captured: dict[tuple[object, ...], Captured] = {}

    def pair(self, given: object) -> Batch:
        """The batch that a user gave, in any form, as the pair that everything else works with.

        Raises :class:`BatchError` for what is none.
        """
        return as_pair(given, own_loss=self.own_loss)

    def training(self, batch: Batch, use: GradientUse = GradientUse.UPDATE) -> Program:
        """The program of a training step on batches like *batch*, whose gradients are used as
        said.
        """
        program = self._get(TRAIN, batch, self.strategy, use)
        self._trained = program.plan
        return program

    def evaluation(self, batch: Batch) -> Program:
        """The program of the forward pass alone, in evaluation mode, which writes no state. Orders
        speak of training and are left out.
        """
        placed = tuple(d for d in self.strategy if not isinstance(d, Order))
        with evaluating(self.model):
            return self._get(EVAL, batch, placed, GradientUse.UPDATE)

    def _get(
        self, mode: str, batch: Batch, strategy: Sequence[Directive], use: GradientUse
    ) -> Program:
        found = signature(batch)
        alike = (mode, found, _flags(self.model))
        if (made := self._made.pop((alike, use), None)) is None:
            self._kinds.see(mode, found)
            with plain_surroundings():
                captured, dag = self._apply(alike, batch, strategy, use, grad=mode == TRAIN)
            # A region that exists in training only may be all that a device has.
            trained = None if mode == TRAIN else self._trained
            planned = plan_with(
                dag,
                self.limits,
                fold=self._pays_to_fold(dag),
                num_devices=None if trained is None else trained.num_devices,
            )
            # The model's own code called them: it is trusted.
            verify(planned, allow_operators=foreign_operators(dag.bodies.values()))
            made = Program(f"{mode}-{self._count}", planned, found, captured)
            self._count += 1
        self._made[alike, use] = made
        self._drop_old()
        return made

    def _drop_old(self) -> None:
        """Keep the programs that were used last, and the captures that they were made from."""
        while len(self._made) > KEPT:
            del self._made[next(iter(self._made))]
        used = {alike for alike, _ in self._made}
        self._captured = {a: found for a, found in self._captured.items() if a in used}

    def _pays_to_fold(self, dag: Dag) -> bool:
        if self.fold_above is None:
            return False
        return len({d for chunk in dag.chunks() for d in chunk.participants}) > self.fold_above

    def _apply(
        self,
        alike: tuple[object, ...],
        batch: Batch,
        strategy: Sequence[Directive],
        use: GradientUse,
        *,
        grad: bool,
    ) -> tuple[Captured, Dag]:
        """A capture, which all programs that are *alike* share, and what the strategy makes of
        it.
        """

        def applied() -> Dag:
            core = self._captured[alike].dag
            if grad:
                core = use_gradients(core, use, self.clip, loss_scaled=self.loss_scaled).dag
            else:
                core = discard_buffer_updates(core).dag
            return apply(
                core, strategy, tags_of=None if grad or self._trained is None else self._trained.dag
            )

        if alike not in self._captured:
            if self.rehearse is not None:
                self.rehearse(batch)
            self._captured[alike] = self._capture(batch, None, grad=grad)
        dag = applied()
        size = microbatch_size(dag)
        if violated_guard(dag, size) is not None:
            self._captured[alike] = self._capture(batch, size, grad=grad)
            dag = applied()
        return self._captured[alike], dag

    def _capture(self, batch: Batch, size: int | None, *, grad: bool) -> Captured:
        with capturable_experts(self.model):
            return capture_with_constants(
                self.model,
                self.loss_fn,
                batch,
                batch_dims=self.batch_dims,
                batch_size=size,
                grad=grad,
                precision=self.precision,
            )


def make_clip(max_grad_norm: float | None, norm_type: float) -> Clip | None:
    """What users ask for by ``max_grad_norm`` (infinity: only to report the norm) and
    ``norm_type``.

    Raises :class:`ConfigError` for a norm that is neither 2 nor infinity, or a bound that is not
    positive.
    """
    norm = next((n for n in Norm if float(n.value) == norm_type), None)
    if norm is None:
        raise ConfigError(f"norm_type is 2.0 or math.inf, found {norm_type!r}")
    if max_grad_norm is None:
        return None
    if not isinstance(max_grad_norm, (int, float)) or not max_grad_norm > 0:
        raise ConfigError(
            f"max_grad_norm is positive (math.inf: report the norm, clip nothing), found {max_grad_norm!r}"
        )
    return Clip(norm, None if math.isinf(max_grad_norm) else float(max_grad_norm))


def _flags(model: torch.nn.Module) -> tuple[bool, ...]:
    """What a graph takes from the model besides its tensors: which modules are in training mode,
    which parameters are trained.
    """
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

"""Is the captured graph the model? One microbatch's loss, gradients and buffers against eager
PyTorch, before any worker starts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from piper.api.compare import Errors, compare, scalar_error
from piper.api.programs import Program, Programs, model_tensors
from piper.api.reference import Reference, ReferenceStep
from piper.api.rows import Rows
from piper.backends.inprocess import InProcessBackend
from piper.capture.precision import Precision
from piper.devices.tensors import torch_dtype
from piper.directives.strategy import apply
from piper.ir.dag import Dag, LossKind
from piper.planner import plan
from piper.runtime.batch import Batch, signature
from piper.runtime.optimizer import OptimizerSpec
from piper.runtime.slices import Slice

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-3}
"""Allowed relative error by the model's element type; rounding stays far below, a wrong graph far
above.
"""

COARSE = 0.1
"""Allowed relative error for shorter types."""

ROUNDINGS = 64
"""Units in the last place of the shortest type inside the graph that rounding may add up to."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where graph and model differ: losses, and relative errors above what is *allowed*."""

    found: ReferenceStep
    expected: ReferenceStep
    allowed: float
    gradients: Mapping[str, float]
    buffers: Mapping[str, float]

    @property
    def only_buffers(self) -> bool:
        """Whether loss and gradients agree."""
        return not self.gradients and self.loss <= self.allowed

    @property
    def loss(self) -> float:
        """Relative error of the loss."""
        return scalar_error(self.found.loss, self.expected.loss)

    def table(self) -> str:
        """The worst errors."""
        named = {f"gradient of {n}": e for n, e in self.gradients.items()}
        named |= {f"buffer {n}": e for n, e in self.buffers.items()}
        worst = sorted(named.items(), key=lambda item: -item[1])[:5]
        return "\n".join(f"  {name:<40} {error:.1e}" for name, error in worst)


class GraphCheck:
    """The captured graph of *program* next to eager PyTorch, on a microbatch of *batch*: the first
    whose loss has a weight. Both compute under the same precision.

    ``part`` is the microbatch (``None``: no loss has a weight, there is nothing to compare), ``dag``
    the graph for it, ``tensors`` the model's.
    """

    def __init__(self, programs: Programs, program: Program, batch: Batch, seed: int) -> None:
        dag = program.captured.dag
        self._programs, self._seed = programs, seed
        self.constants = program.constants
        self.tensors = model_tensors(programs.model)
        size = program.plan.microbatch_size
        self.dag = replace(dag, batch_size=size)
        rows = Rows(dag.batch)
        parts = (
            rows.take(batch, torch.arange(i, i + size)) for i in range(0, dag.batch_size, size)
        )
        weigh = self._reference(self.tensors).weight
        counts = dag.loss_kind is LossKind.MEAN
        self.part = next((p for p in parts if counts or weigh(p)), None)

    def compare(self) -> Mismatch | None:
        """What differs by more than rounding."""
        if self.part is None:
            return None
        found, buffers = run_graph(self.dag, self.part, self.tensors, self.constants, self._seed)
        reference = self._reference(self.tensors)
        expected = reference.gradients(self.part, 1, 0)
        allowed = allowed_error(self.dag, self.tensors, self._programs.precision)
        gradients = _above(allowed, compare(found.gradients, expected.gradients))
        if gradients:
            gradients = self._without_noise(gradients, found, expected)
        written = reference.state.buffers
        left = {
            n: buffers.get(n, self.tensors[n]) for n in written
        }  # what nothing uses is not held
        different = _above(allowed, compare(left, written))
        mismatch = Mismatch(found, expected, allowed, gradients, different)
        same = mismatch.only_buffers and not different
        return None if same else mismatch

    def _without_noise(
        self, errors: Mapping[str, float], found: ReferenceStep, expected: ReferenceStep
    ) -> dict[str, float]:
        """*errors* without the gradients that are rounding on both sides: zero by construction,
        such as those of the bias of keys in attention.

        How large rounding is, is measured: as the change of the gradient when every parameter
        changes by one unit in the last place. A gradient that is itself no larger, on either side,
        and is nothing next to the largest one, says nothing.
        """
        assert self.part is not None
        draw = torch.Generator().manual_seed(0)
        moved = {n: _one_rounding(t, draw) for n, t in self.tensors.items()}
        again = self._reference(moved).gradients(self.part, 1, 0)
        largest = max((_norm(g) for g in expected.gradients.values()), default=0.0)
        bound = ROUNDINGS * _coarsest(self.dag) * largest
        kept = dict(errors)
        for name in errors:
            sides = (
                found.gradients.get(name),
                expected.gradients.get(name),
                again.gradients.get(name),
            )
            if any(side is None for side in sides):
                continue
            one, two, other = (side.double() for side in sides if side is not None)
            noise = _norm(other - two)
            if max(_norm(one), _norm(two)) <= min(8 * noise, bound):
                del kept[name]
        return kept

    def _reference(self, tensors: Mapping[str, torch.Tensor]) -> Reference:
        programs = self._programs
        precision = programs.precision
        # The graph by itself does not scale its loss; a training step does.
        unscaled = None if precision is None else replace(precision, loss_scale=None)
        return Reference(
            programs.model,
            programs.loss_fn,
            self.dag,
            tensors,
            None,
            self._seed,
            precision=unscaled,
        )


def _above(allowed: float, errors: Errors) -> dict[str, float]:
    return {n: e for n, e in errors.by_name.items() if e > allowed}


def _one_rounding(tensor: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """*tensor*, each element one unit in the last place up or down."""
    if not tensor.is_floating_point():
        return tensor
    signs = torch.randint(0, 2, tensor.shape, generator=draw).to(tensor.dtype).mul_(2).sub_(1)
    return tensor * (1 + signs * torch.finfo(tensor.dtype).eps)


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


def allowed_error(
    dag: Dag, tensors: Mapping[str, torch.Tensor], precision: Precision | None
) -> float:
    """The relative error that rounding may make: by the types of the model, or under a *precision*
    the compute type; where the graph computes something in a shorter type (a softmax in float32
    inside a float64 model, ``torch.autocast``), a few roundings of that.
    """
    types = {t.dtype for t in tensors.values() if t.is_floating_point()}
    if precision is not None:
        types = {precision.compute}
    allowed = max((TOLERANCE.get(t, COARSE) for t in types), default=TOLERANCE[torch.float32])
    eps = _coarsest(dag)
    if eps <= max((torch.finfo(t).eps for t in types), default=math.inf):
        return allowed
    inside = max((TOLERANCE.get(t, COARSE) for t in _types(dag)), default=allowed)
    return max(allowed, min(inside, ROUNDINGS * eps))


def _coarsest(dag: Dag) -> float:
    """The largest unit in the last place, of 1, of the types inside *dag*."""
    return max((torch.finfo(t).eps for t in _types(dag)), default=0.0)


def _types(dag: Dag) -> set[torch.dtype]:
    """Floating-point types of what is computed in *dag*."""
    specs = (
        spec
        for body in dag.bodies.values()
        for call in body.calls
        for spec in call.results
        if spec is not None
    )
    return {torch_dtype(s.dtype) for s in specs if s.dtype.is_real_floating}


def run_graph(
    dag: Dag,
    batch: Batch,
    tensors: Mapping[str, torch.Tensor],
    constants: Mapping[str, torch.Tensor],
    seed: int,
) -> tuple[ReferenceStep, Mapping[str, torch.Tensor]]:
    """Loss and gradients of the graph itself on one device, and the buffers that it leaves; nothing
    is updated.
    """
    gradients: dict[str, torch.Tensor] = {}

    def observe(found: Mapping[str, torch.Tensor], _: Mapping[str, Slice]) -> None:
        gradients.update({name: tensor.detach().clone() for name, tensor in found.items()})

    spec = OptimizerSpec(build=_frozen, observe=observe)
    backend = InProcessBackend()
    backend.start(1)
    try:
        backend.load("graph", plan(apply(dag, [])), signature(batch), constants)
        backend.initialise("graph", tensors, spec)
        (step,) = backend.run("graph", [batch], first_step=0, seed=seed).steps
        buffers = backend.snapshot(optimizer=False).buffers
    finally:
        backend.close()
    loss, weight = step.values["loss"][0], step.values.get("weight", {}).get(0, 1.0)
    return ReferenceStep(loss / weight, gradients), buffers


def _frozen(parameters: list[torch.Tensor] | list[dict[str, object]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)

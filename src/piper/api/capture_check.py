"""Is the captured graph the model? One microbatch's loss and gradients against eager PyTorch,
before any worker starts.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from piper.api.compare import compare, scalar_error
from piper.api.programs import Program, model_tensors
from piper.api.reference import Reference, ReferenceStep
from piper.api.rows import Rows
from piper.backends.inprocess import InProcessBackend
from piper.capture.joint import LossFn
from piper.capture.precision import Precision
from piper.directives.strategy import apply
from piper.errors import CaptureError
from piper.ir.dag import Dag, LossKind
from piper.planner import plan
from piper.runtime.batch import Batch, signature
from piper.runtime.optimizer import OptimizerSpec
from piper.runtime.slices import Slice

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-3}
"""Allowed relative error by the loss's element type; rounding stays far below, a wrong graph far
above.
"""

COARSE = 0.1
"""Allowed relative error for shorter types."""


def check_capture(
    model: torch.nn.Module,
    loss_fn: LossFn,
    program: Program,
    batch: Batch,
    seed: int,
    precision: Precision | None = None,
) -> None:
    """Raise :class:`CaptureError` if the captured graph and eager PyTorch disagree on a microbatch
    of *batch*: on the first whose loss has a weight. (Where none has, there is nothing to compare.)
    Both compute under *precision*.
    """
    dag = program.captured.dag
    size = program.plan.microbatch_size
    tensors = model_tensors(model)
    # The graph by itself does not scale its loss; a training step does.
    unscaled = None if precision is None else replace(precision, loss_scale=None)
    reference = Reference(model, loss_fn, dag, tensors, None, seed, precision=unscaled)
    rows = Rows(dag.batch)
    parts = (rows.take(batch, torch.arange(i, i + size)) for i in range(0, dag.batch_size, size))
    part = next((p for p in parts if dag.loss_kind is LossKind.MEAN or reference.weight(p)), None)
    if part is None:
        return
    found = run_graph(replace(dag, batch_size=size), part, tensors, program.constants, seed)
    expected = reference.gradients(part, 1, 0)
    allowed = _tolerance(tensors, precision)
    errors = compare(found.gradients, expected.gradients)
    loss_error = scalar_error(found.loss, expected.loss)
    if loss_error <= allowed and errors.worst <= allowed:
        return
    worst = sorted(errors.by_name.items(), key=lambda item: -item[1])[:5]
    table = "\n".join(f"  {name:<40} {error:.1e}" for name, error in worst)
    raise CaptureError(
        f"the captured graph does not compute what the model computes: loss {found.loss!r} against {expected.loss!r} in eager "
        f"PyTorch; largest relative gradient errors (allowed {allowed:.0e}):\n{table}\n"
        "State that changes from call to call (Python counters, randomness outside torch) is frozen at capture: make it an "
        "input or a buffer. verify_capture=False skips this check"
    )


def _tolerance(tensors: Mapping[str, torch.Tensor], precision: Precision | None) -> float:
    types = {t.dtype for t in tensors.values() if t.is_floating_point()}
    if precision is not None:
        types = {precision.compute}
    return max((TOLERANCE.get(t, COARSE) for t in types), default=TOLERANCE[torch.float32])


def run_graph(
    dag: Dag,
    batch: Batch,
    tensors: Mapping[str, torch.Tensor],
    constants: Mapping[str, torch.Tensor],
    seed: int,
) -> ReferenceStep:
    """Loss and gradients of the graph itself on one device; nothing is updated."""
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
    finally:
        backend.close()
    loss, weight = step.values["loss"][0], step.values.get("weight", {}).get(0, 1.0)
    return ReferenceStep(loss / weight, gradients)


def _frozen(parameters: list[torch.Tensor] | list[dict[str, object]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)

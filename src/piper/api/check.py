"""check: does a strategy compute what single-process training computes?"""

import copy
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypedDict

import torch

from piper.api.check_report import CheckReport, StepErrors
from piper.api.compare import Errors, compare, scalar_error
from piper.api.compile import compilation
from piper.api.loss_check import examine_loss
from piper.api.optimizers import optimizer_spec, require_same_groups
from piper.api.programs import Programs, make_clip, model_tensors
from piper.api.rates import Rates
from piper.api.reference import Reference, ReferenceStep
from piper.api.replay import Gradient, Replay
from piper.api.rows import rebuild_sequence
from piper.api.trainer import Trainer, TrainResult
from piper.api.trial import Trial
from piper.api.whole_batch import WholeBatch, compare_whole, reasons
from piper.backends import Backend, InProcessBackend, make_backend
from piper.boundary import public
from piper.capture.forms import as_pair
from piper.capture.joint import LossFn
from piper.capture.precision import PrecisionLike, make_precision
from piper.capture.surroundings import plain_surroundings
from piper.directives.base import Directive
from piper.errors import CheckError, expect
from piper.runtime.batch import Batch
from piper.runtime.optimizer import Optimizers, per_element
from piper.runtime.slices import Slice
from piper.runtime.snapshot import StateSnapshot
from piper.runtime.state import ModelState

TOLERANCE = 1e-10
"""Largest error that counts as equal, in float64."""

PRECISION_TOLERANCE = 1e-5
"""Largest error that counts as equal under a mixed-precision policy. What is computed in the
compute type is rounded alike on both sides, bit for bit; only sums in the reduce type (float32:
6e-8) are added in another order, which the update and the next steps make little larger.
"""


@public
def check(
    model: torch.nn.Module,
    loss_fn: LossFn | None,
    strategy: Sequence[Directive],
    batch: object,
    *,
    optimizer: Optimizers,
    param_groups: Sequence[Mapping[str, object]] | None = None,
    lr_schedule: Callable[[int], float] | None = None,
    steps: int = 2,
    seed: int = 0,
    max_grad_norm: float | None = None,
    norm_type: float = 2.0,
    precision: PrecisionLike = None,
    batch_dims: Mapping[str, int | None] | None = None,
    tolerance: float | None = None,
    backend: str | Backend | None = None,
    compile: bool | Literal["fallback"] = False,  # noqa: A002 (as in piper.compile)
) -> CheckReport:
    """Train a float64 copy of *model* for *steps* steps under *strategy*, and in one process, and
    compare.

    With a *precision*, both train a copy in the model's own types under that policy instead: this
    shows that the strategy keeps to the policy, and float64 that it computes the right thing.
    *tolerance* is by default :data:`TOLERANCE`, with a policy :data:`PRECISION_TOLERANCE` (with
    sharded experts give a rounding of the compute type, 1e-2 for bfloat16, see
    :class:`piper.Precision`). Under a policy the single process calls the kernels that were
    captured: some libraries, Hugging Face's among them, choose others while they are traced, and
    those round otherwise.

    *batch* is a global batch, in the forms that :func:`piper.compile` takes, or a function of the
    step. Compared after each step: the loss and, on
    every device that holds a copy, every gradient, parameter, buffer and optimizer state, and the
    norm where gradients are clipped. *backend* defaults to threads of this process; its workers
    must be threads, since the gradients are seen there. *compile* is that of :func:`piper.compile`:
    the single process is never compiled. Raises what :func:`piper.compile` raises.

    The single process runs the microbatches one after the other, too. What they change against the
    whole batch in one piece is a part of the report: :attr:`CheckReport.whole_batch`, and
    :attr:`CheckReport.loss_finding` where it is the loss function.
    """
    with plain_surroundings():
        if steps < 1:
            raise CheckError(f"steps must be at least 1 to compare anything, found {steps}")
        chosen = make_backend("inprocess" if backend is None else backend)
        if not isinstance(chosen, InProcessBackend):
            raise CheckError(
                f'check looks at the gradients of workers that are threads of this process: use backend="inprocess", found {backend!r}'
            )
        policy = make_precision(precision)
        expect(model, torch.nn.Module, "model", "give an instance, not its class or its forward")
        original = model
        model = copy.deepcopy(model) if policy is not None else copy.deepcopy(model).double()

        def fetch(step: int) -> Batch:
            given = batch(step) if callable(batch) else batch
            inputs, targets = as_pair(given, own_loss=loss_fn is None)
            return (inputs, targets) if policy is not None else (_double(inputs), _double(targets))

        spec = optimizer_spec(original, optimizer, param_groups)
        assert spec is not None, "check needs an optimizer"
        rates, clip = Rates(lr_schedule), make_clip(max_grad_norm, norm_type)
        programs = Programs(model, loss_fn, strategy, batch_dims, clip, policy)
        trial = Trial(programs, fetch(0), seed)
        eager = trial.before_capture()
        program = programs.training(fetch(0))
        require_same_groups(spec, original)
        tensors = model_tensors(model)
        trial.after_capture(program)
        core = program.captured.dag
        reference = Reference(
            model, programs.loss_fn, core, tensors, spec, seed, programs.clip, policy
        )
        finding = examine_loss(programs, program, fetch(0), eager)
        in_one = reference.whole(fetch(0), 0)
        whole: WholeBatch | None = None
        tap, replay = _Tap(), Replay(reference.initial_state())
        observed = replace(spec, observe=tap.observe)
        errors: list[StepErrors] = []
        how = compilation(compile)
        with Trainer(
            programs, program, chosen, tensors, observed, seed, how, lr_schedule
        ) as trainer:
            for step in range(steps):
                current = fetch(step)
                result = trainer.step(*current)
                plan = trainer.program.plan
                with chosen.computing_alike():
                    expected = reference.step(
                        current, plan.num_replicas * plan.num_microbatches, step, rates.at(step)
                    )
                if step == 0:
                    whole = compare_whole(in_one, expected)
                copies = chosen.copies()
                replayed = replay.step(tap.found, rates.at(step))
                errors.append(
                    StepErrors(
                        step=step,
                        loss=scalar_error(result.loss, expected.loss),
                        gradients=tap.compare(expected.gradients, copies),
                        grad_norm=_norm_error(result.grad_norm, expected.grad_norm),
                        loss_scale=_scale_error(result, expected),
                        **_state_errors(copies, reference.state, replayed),
                    )
                )
        if tolerance is None:
            tolerance = TOLERANCE if policy is None else PRECISION_TOLERANCE
        assert whole is not None
        if whole.differs(rounded=policy is not None):
            why = reasons(programs, program, fetch(0), finding)
            whole = replace(whole, reasons=why)
        return CheckReport(tuple(errors), tolerance, whole, policy, finding)


def _norm_error(found: float | None, expected: float | None) -> float:
    """Relative error of the norm of all gradients; 0 where there is none, or is no number, on both
    sides.
    """
    if found is None or expected is None:
        return 0.0 if found is expected else math.inf
    if math.isnan(found) and math.isnan(expected):
        return 0.0
    return scalar_error(found, expected)


def _scale_error(result: TrainResult, expected: ReferenceStep) -> float:
    """Relative error of the scale of the loss; infinite where one side alone updated."""
    if result.loss_scale is None or expected.loss_scale is None:
        return 0.0
    if result.skipped is not expected.skipped:
        return math.inf
    return scalar_error(result.loss_scale, expected.loss_scale)


class _Tap:
    """Collects the gradients that the devices' optimizers receive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: list[Gradient] = []

    @property
    def found(self) -> Sequence[Gradient]:
        """What all devices received since the last comparison."""
        return tuple(self._found)

    def observe(self, gradients: Mapping[str, torch.Tensor], slices: Mapping[str, Slice]) -> None:
        """Called by every device, with its final gradients."""
        with self._lock:
            self._found.extend((n, slices.get(n), g.detach().clone()) for n, g in gradients.items())

    def compare(
        self, expected: Mapping[str, torch.Tensor], copies: Sequence[StateSnapshot]
    ) -> Errors:
        """The worst error of each gradient over all devices, since the last call.

        Each of *copies* that holds a parameter must have been given its gradient, once.
        """
        found: dict[str, list[torch.Tensor]] = {}
        for name, part, gradient in self._found:
            whole = gradient if part is None else _completed(part, gradient, expected.get(name))
            found.setdefault(name, []).append(whole)
        self._found = []
        holders = Counter(n for held in copies for n in {**held.parameters, **held.shards})
        rounds = max((len(gradients) for gradients in found.values()), default=1)
        worst = _worst(
            ({n: g[min(i, len(g) - 1)] for n, g in found.items()} for i in range(rounds)), expected
        )
        miscounted = [n for n, gradients in found.items() if len(gradients) != holders[n]]
        return Errors({**worst.by_name, **dict.fromkeys(miscounted, math.inf)})


def _completed(part: Slice, tensor: torch.Tensor, expected: torch.Tensor | None) -> torch.Tensor:
    """A slice in place of that of what is *expected*, so that it can be compared as a whole
    tensor.
    """
    if expected is None:
        return tensor
    whole = expected.clone().contiguous()
    mine = part.of(whole)
    if mine.shape == tensor.shape:
        mine.copy_(tensor)
        return whole
    return torch.full_like(whole, math.nan)


def _worst(
    copies: Iterable[Mapping[str, torch.Tensor]], expected: Mapping[str, torch.Tensor]
) -> Errors:
    """The worst error of each tensor over all *copies*, each of which is compared as a whole."""
    worst: dict[str, float] = {}
    for found in copies:
        for name, error in compare(found, expected).by_name.items():
            worst[name] = max(error, worst.get(name, 0.0))
    return Errors(worst)


class _StateErrors(TypedDict):
    parameters: Errors
    buffers: Errors
    optimizer: Errors


def _state_errors(
    copies: Sequence[StateSnapshot], state: ModelState, replayed: StateSnapshot
) -> _StateErrors:
    """What is wrong with each device's copies; a name that no device holds is infinitely wrong.

    What the optimizer writes is right if it is what one process has, or what the optimizer makes of
    the gradients that the devices had, which are compared by themselves (:mod:`piper.api.replay`).
    """
    expected = state.snapshot([*state.parameters, *state.buffers], optimizer=True)
    parameters, optimizer = (
        Errors({n: min(e, again.by_name.get(n, e)) for n, e in once.by_name.items()})
        for once, again in (
            (_parameter_errors(copies, expected), _parameter_errors(copies, replayed)),
            (_optimizer_errors(copies, expected), _optimizer_errors(copies, replayed)),
        )
    )
    buffers = _held_errors([c.buffers for c in copies], expected.buffers)
    return _StateErrors(parameters=parameters, buffers=buffers, optimizer=optimizer)


def _parameter_errors(copies: Sequence[StateSnapshot], expected: StateSnapshot) -> Errors:
    whole = [c.parameters for c in copies]
    slices = [
        {n: _completed(s.part, s.tensor, expected.parameters.get(n)) for n, s in c.shards.items()}
        for c in copies
    ]
    return _held_errors([*whole, *slices], expected.parameters)


def _held_errors(
    copies: Sequence[Mapping[str, torch.Tensor]], expected: Mapping[str, torch.Tensor]
) -> Errors:
    """Errors of what each device holds. Norms count among all of *expected*, not only what is held.
    A copy in another type than is *expected*, as chunks read it, must be what is expected, rounded.
    """
    held = {name for copy in copies for name in copy}
    worst = dict.fromkeys(expected.keys() - held, math.inf)
    for copy_ in copies:
        wanted = {
            n: t.to(copy_[n].dtype) if n in copy_ and copy_[n].dtype != t.dtype else t
            for n, t in expected.items()
        }
        for name, error in compare({**wanted, **copy_}, wanted).by_name.items():
            worst[name] = max(error, worst.get(name, 0.0))
    return Errors(worst)


def _optimizer_errors(copies: Sequence[StateSnapshot], expected: StateSnapshot) -> Errors:
    """Errors of the optimizer's tensors and numbers, each kind of state by itself."""
    wanted = _by_kind(expected)
    errors: dict[str, float] = {}
    for held in copies:
        own = _by_kind(held, wanted)
        for kind in wanted.keys() | own.keys():
            all_ = wanted.get(kind, {})
            here = {**held.parameters, **held.shards}
            elsewhere = {n: t for n, t in all_.items() if n not in here}
            for name, error in compare({**elsewhere, **own.get(kind, {})}, all_).by_name.items():
                key = f"{kind} of {name}"
                errors[key] = max(error, errors.get(key, 0.0))
    return Errors(errors)


def _by_kind(
    snapshot: StateSnapshot, expected: Mapping[str, Mapping[str, torch.Tensor]] | None = None
) -> dict[str, dict[str, torch.Tensor]]:
    """The optimizer's state by key, then by parameter; numbers as tensors, slices completed by what
    is *expected*.
    """
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, entries in (snapshot.optimizer.state if snapshot.optimizer else {}).items():
        for key, value in entries.items():
            if isinstance(value, (torch.Tensor, int, float)):
                tensor, shard = torch.as_tensor(value), snapshot.shards.get(name)
                if shard is not None and per_element(key, tensor, tuple(shard.tensor.shape)):
                    whole = (expected or {}).get(key, {}).get(name)
                    tensor = _completed(shard.part, tensor, whole)
                found.setdefault(key, {})[name] = tensor
    return found


def _double(tree: object) -> object:
    if isinstance(tree, torch.Tensor):
        return tree.double() if tree.is_floating_point() else tree
    if isinstance(tree, Mapping):
        return {key: _double(child) for key, child in tree.items()}
    if isinstance(tree, (tuple, list)):
        return rebuild_sequence(tree, [_double(child) for child in tree])
    return tree

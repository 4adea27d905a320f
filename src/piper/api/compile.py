"""compile: from a model and a strategy to a trainer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch

from piper.api.loss_check import warn_unless_mean
from piper.api.memory import frame_bytes, make_limits, optimizer_bytes
from piper.api.optimizers import described_parameters, optimizer_spec, require_same_groups
from piper.api.programs import Programs, make_clip, model_tensors
from piper.api.trainer import Trainer
from piper.api.trial import Trial, warn_of_evaluation_mode
from piper.backends import make_backend
from piper.backends.base import Backend
from piper.boundary import public
from piper.capture.joint import LossFn
from piper.capture.precision import PrecisionLike, make_precision
from piper.capture.surroundings import plain_surroundings
from piper.directives.base import Directive
from piper.errors import ConfigError, StateError
from piper.runtime.compiled import Compilation
from piper.runtime.optimizer import Optimizers
from piper.runtime.state import Weights


@public
def compile(  # noqa: A001  (the field's word; users write piper.compile)
    model: torch.nn.Module,
    loss_fn: LossFn | None,
    strategy: Sequence[Directive],
    example_batch: object,
    *,
    optimizer: Optimizers | None,
    param_groups: Sequence[Mapping[str, object]] | None = None,
    lr_schedule: Callable[[int], float] | None = None,
    backend: str | Backend = "ray",
    seed: int = 0,
    max_grad_norm: float | None = None,
    norm_type: float = 2.0,
    precision: PrecisionLike = None,
    batch_dims: Mapping[str, int | None] | None = None,
    init: Weights | None = None,
    compile: bool | Literal["fallback"] = False,  # noqa: A002 (torch's word)
    verify_capture: bool = True,
    memory_budget: int | str | None = None,
    receive_bytes: int | str | None = None,
    gather_bytes: int | str | None = None,
    fetch_bytes: int | str | None = None,
    reduce_bytes: int | str | None = None,
) -> Trainer:
    """Capture, plan and verify a training step, then start workers for it.

    Everything that can be refused is refused here, before any worker starts.

    Args:
        model: not changed; :meth:`Trainer.copy_to` brings the trained weights back.
        loss_fn: ``loss_fn(outputs, targets)`` returns a scalar, the mean over samples, or
            ``(sum, weight)``. ``None`` trains the loss that the model computes itself: what it
            returns, or ``loss`` among it.
        strategy: a list of directives.
        example_batch: a *global* batch ``(inputs, targets)``; inputs are a tensor, a tuple
            (``*args``) or a mapping (``**kwargs``). Or one mapping of all arguments, as Hugging
            Face's collators make it: with ``loss_fn=None`` the model is given all of it, else
            *loss_fn* its ``labels``, and the model the rest.
        optimizer: takes what ``torch.optim`` classes take first, and returns one over all of it. It
            is called on every device, with one tensor per trained parameter of the model, in the
            model's order, of the model's shapes and with the attributes of the model's parameters.
            Or a mapping from patterns of parameter names (one, or a tuple) to such functions: the
            first pattern that matches a parameter decides, as in ``{"*norm*": f, "*": g}``.
            ``None``: the trainer cannot update parameters.
        param_groups: mappings ``{"names": [pattern, ...], **options}``.
        lr_schedule: maps the step to a factor on the learning rates, besides
            :attr:`Trainer.lr_factor`. The driver calls it, for a step that is about to begin.
        backend: ``"ray"`` (one process per device), ``"inprocess"`` (one thread per device) or a
            backend of your own.
        seed: of the random numbers that the model draws.
        max_grad_norm: clips the gradients by the norm of all of them together, as
            ``torch.nn.utils.clip_grad_norm_`` does on one device; with ``math.inf`` the norm is
            only reported.
        norm_type: 2 or ``math.inf``.
        precision: a :class:`piper.Precision`, or a type or its name (``torch.bfloat16``,
            ``"bf16"``, ``"fp16"``, ``"float32"``, ``"float64"``): in which types is computed,
            reduced and updated, and whether the loss is scaled, as for float16 (then the norm is
            reported too). ``None``: in those that the model and the batch have.
        batch_dims: names tensors that are not split (``{"mask": None}``).
        init: the weights of a model on the meta device: a mapping, or a function from names to one.
        compile: each chunk goes through TorchInductor when the workers start (forward, backward and
            the halves of a split backward, each distinct body once in a process; results are cached
            on disk). A chunk that cannot be compiled is a :class:`CompileError`, or, with
            ``"fallback"``, runs as it is, with a warning.
        verify_capture: run one microbatch in plain PyTorch first, twice from the Python state that
            the first run leaves: what fails there, a loss that is not finite, and whatever tracing
            would freeze (random numbers outside torch, attributes that the forward changes) is an
            error with the user's line, or, where nothing depends on it yet, a warning. Then compare
            the graph's loss, gradients and buffers with plain PyTorch's. All in all four steps of
            one microbatch on the driver, and copies of the model's tensors meanwhile; the logger
            ``piper.trial`` says at level DEBUG how long they took. The model and the random states
            are left as they were. Not seen: state in extension types and on the meta device, where
            only shapes are run. Batches of other shapes, later, are run once before they are
            captured. With ``False`` plain PyTorch is only run to explain a capture that fails.
        memory_budget: bytes, or a text such as ``"512MiB"``: bounds the planned peak of every
            device, optimizer state included, in every plan that the trainer makes.
        receive_bytes: bounds what a device receives before it is needed; see :func:`piper.plan`.
        gather_bytes: bounds what it gathers of sharded parameters before they are needed.
        fetch_bytes: bounds what it brings back from host memory before it is needed.
        reduce_bytes: bounds what reductions have in flight.

    Raises:
        CaptureError: the model, the loss or the batch cannot be captured.
        FilterError, DirectiveError: the strategy does not fit the model, or itself.
        VerificationError: the plan is wrong: a bug of piper.
        MemoryBudgetError: no plan fits in the budget.
        ConfigError: any other argument is wrong.
        StateError: a tensor of the model has no value.

    Warns (:class:`piper.errors.PiperWarning`) of a loss that is no mean over the rows of the example
    batch, so that microbatches change what it is.
    """
    with plain_surroundings():
        clip = make_clip(max_grad_norm, norm_type)
        policy = make_precision(precision)
        limits = make_limits(memory_budget, receive_bytes, gather_bytes, fetch_bytes, reduce_bytes)
        spec = optimizer_spec(model, optimizer, param_groups)
        if limits.budget is not None:
            state = optimizer_bytes(spec, described_parameters(model))
            limits = replace(limits, optimizer_bytes=state, frame_bytes=frame_bytes(backend))
        programs = Programs(model, loss_fn, strategy, batch_dims, clip, policy, limits)
        example = programs.pair(example_batch)
        if optimizer is not None:
            warn_of_evaluation_mode(model)
        trial = Trial(programs, example, seed)
        eager = trial.before_capture() if verify_capture else None
        with trial.blaming():
            program = programs.training(example)
        require_same_groups(spec, model)
        weights = init if init is not None else _weights(model)
        if verify_capture and not _on_meta(model):
            trial.after_capture(program)
            programs.rehearse = trial.rehearse
        warn_unless_mean(programs, program, example, eager)
        how = compilation(compile)
        return Trainer(
            programs, program, make_backend(backend), weights, spec, seed, how, lr_schedule
        )


def compilation(option: bool | Literal["fallback"]) -> Compilation:
    """What ``compile=`` says. Raises :class:`ConfigError` for anything else than its values."""
    choices = {False: Compilation.OFF, True: Compilation.ON, "fallback": Compilation.FALLBACK}
    if option not in choices:
        raise ConfigError(f'compile is False, True or "fallback", found {option!r}')
    return choices[option]


def _weights(model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    tensors = model_tensors(model)
    lost = [name for name, tensor in tensors.items() if tensor.is_meta]
    if lost:
        raise StateError(
            f"{len(lost)} tensors of the model are on the meta device ({', '.join(lost[:4])}, …); pass init= with a mapping "
            "from names to tensors, or a function from a list of names to such a mapping"
        )
    return tensors


def _on_meta(model: torch.nn.Module) -> bool:
    return any(t.is_meta for t in model_tensors(model).values())

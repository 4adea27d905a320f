"""compile: from a model and a strategy to a trainer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch

from piper.api.capture_check import check_capture
from piper.api.memory import frame_bytes, make_limits, optimizer_bytes
from piper.api.programs import Programs, make_clip, model_tensors
from piper.api.trainer import Trainer
from piper.backends import make_backend
from piper.backends.base import Backend
from piper.capture.joint import LossFn
from piper.capture.precision import PrecisionLike, make_precision
from piper.directives.base import Directive
from piper.errors import ConfigError, StateError
from piper.runtime.batch import Batch
from piper.runtime.compiled import Compilation
from piper.runtime.optimizer import OptimizerFactory, OptimizerSpec
from piper.runtime.state import Weights


def compile(  # noqa: A001  (the field's word; users write piper.compile)
    model: torch.nn.Module,
    loss_fn: LossFn,
    strategy: Sequence[Directive],
    example_batch: Batch,
    *,
    optimizer: OptimizerFactory | None,
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

    ``loss_fn(outputs, targets)`` returns a scalar mean over samples, or ``(sum, weight)``.
    ``strategy`` is a list of directives. ``example_batch`` is a *global* batch ``(inputs,
    targets)``; inputs are a tensor, a tuple (``*args``) or a mapping (``**kwargs``). ``optimizer``
    takes what ``torch.optim`` classes take first and returns one; ``param_groups`` are mappings
    ``{"names": [pattern, ...], **options}``; ``lr_schedule`` maps the step to a factor on the
    learning rates. ``backend`` is ``"ray"`` (one process per device), ``"inprocess"`` (one thread
    per device) or a backend of your own. ``max_grad_norm`` clips the gradients by the norm of all
    of them together, as ``torch.nn.utils.clip_grad_norm_`` does on one device (``norm_type`` 2 or
    ``math.inf``; with ``math.inf`` as bound the norm is only reported). ``precision`` is a
    :class:`piper.Precision`, or one of the names ``"bf16"``, ``"fp16"``, ``"float32"`` and
    ``"float64"``: in which types is computed, reduced and updated, and whether the loss is scaled
    (then the norm is reported too); without it, in those that the model and the batch have.
    ``batch_dims`` names tensors that are not split (``{"mask": None}``). ``init`` gives the weights
    of a model on the meta device: a mapping, or a function from names to one. With ``compile``,
    each chunk goes through TorchInductor when the workers start (forward, backward and the halves
    of a split backward, each distinct body once in a process; results are cached on disk); one that
    cannot be compiled is a :class:`CompileError`, or, with ``"fallback"``, runs as it is, with a
    warning. ``verify_capture`` compares one microbatch's loss and gradients with eager PyTorch
    first (skipped on the meta device).

    ``memory_budget`` (bytes, or a text such as ``"512MiB"``) bounds the planned peak of every
    device, optimizer state included, and of every plan that the trainer makes; ``receive_bytes``,
    ``gather_bytes`` and ``fetch_bytes`` bound what a device receives, gathers of sharded
    parameters, and brings back from host memory before it is needed, ``reduce_bytes`` what
    reductions have in flight. See :func:`piper.plan`.

    Everything that can be refused is refused here, before any worker starts: :class:`CaptureError`,
    :class:`FilterError`, :class:`DirectiveError` and its subclasses, :class:`VerificationError`,
    :class:`ConfigError`, :class:`MemoryBudgetError`.
    """
    clip = make_clip(max_grad_norm, norm_type)
    policy = make_precision(precision)
    limits = make_limits(memory_budget, receive_bytes, gather_bytes, fetch_bytes, reduce_bytes)
    spec = None
    if optimizer is not None:
        groups = None if param_groups is None else tuple(param_groups)
        spec = OptimizerSpec(build=optimizer, param_groups=groups, lr_schedule=lr_schedule)
    if limits.budget is not None:
        limits = replace(
            limits, optimizer_bytes=optimizer_bytes(spec), frame_bytes=frame_bytes(backend)
        )
    programs = Programs(model, loss_fn, strategy, batch_dims, clip, policy, limits)
    program = programs.training(example_batch)
    weights = init if init is not None else _weights(model)
    if verify_capture and not _on_meta(model):
        check_capture(model, loss_fn, program, example_batch, seed, policy)
    chosen = make_backend(backend) if isinstance(backend, str) else backend
    return Trainer(programs, program, chosen, weights, spec, seed, compilation(compile))


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

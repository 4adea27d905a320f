"""One microbatch in plain PyTorch, before anything is captured: can the model run at all?"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.utils._pytree as pytree
from torch import nn

from piper.api.swapped import with_tensors
from piper.api.trial.rows import likely_rows
from piper.capture import check_loss_fn
from piper.capture.batch import Batch as FlatBatch
from piper.capture.batch import as_arguments, flatten_batch
from piper.capture.explain import user_line
from piper.capture.hooks import refuse_parameter_hooks
from piper.capture.joint import LossFn, sparse_gradient
from piper.capture.loss import Loss, check_weight, read_loss
from piper.capture.precision import Precision, cast, check_model, is_cast
from piper.capture.states import model_states
from piper.directives.base import Directive
from piper.errors import CaptureError, PiperError
from piper.models.huggingface import plain_experts
from piper.runtime.batch import Batch
from piper.runtime.random import DrawFrom


@dataclass(frozen=True, slots=True)
class EagerRun:
    """What plain PyTorch made of one microbatch.

    ``batch`` is the microbatch of ``rows`` rows (``None``: no tensor is split). ``outputs`` are the
    model's, as the loss function was given them, and ``result`` is what it returned; both are
    detached. ``loss`` is the mean that the result stands for, NaN where its weight is 0. ``gradients`` of the
    result (of a pair: of the sum), ``parameters`` and ``buffers`` as they are afterwards: by every
    name.
    """

    batch: Batch
    rows: int | None
    outputs: object
    result: object
    loss: float
    weight: float
    gradients: Mapping[str, torch.Tensor]
    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


_REMEDY = {
    "the loss": "\nloss_fn is called as loss_fn(outputs, targets), with what the model returns and the second part of the batch: give targets "
    "of the type and shape that it takes, or write a function that brings both into form"
}
"""What to do about it, by what fails."""


@dataclass(frozen=True, slots=True)
class EagerModel:
    """A model, its loss function and the batches that it is run on; the model's own tensors are
    never written: each run has copies.
    """

    model: nn.Module
    loss_fn: LossFn
    batch: FlatBatch
    seed: int
    precision: Precision | None = None

    def run(
        self, first_row: int, rows: int, around: AbstractContextManager[object] | None = None
    ) -> EagerRun:
        """Forward, loss and backward of the rows of the batch from *first_row* on.

        *around* is entered around the model and the loss. Random operators draw what a captured step draws in the first microbatch. Raises
        :class:`CaptureError` with PyTorch's own error, the user's line, and whether it is the model
        that fails, the loss or the backward.
        """
        part = self._take(first_row, rows)
        tensors = self._copies()
        own = dict(tensors)

        def run() -> tuple[object, object, Loss]:
            with around or nullcontext():
                outputs = self._forward(part)
                with self._failing("the loss", outputs=outputs, targets=part[1]):
                    result = self.loss_fn(outputs, part[1])
            loss = read_loss(result)
            if loss.value.requires_grad:
                with self._failing("the backward", inputs=part[0]):
                    loss.value.backward()  # type: ignore[no-untyped-call]  # torch's own
            for name, tensor in own.items():
                if tensor.grad is not None and tensor.grad.layout is not torch.strided:
                    raise CaptureError(sparse_gradient(name))
            return outputs, result, loss

        with torch.inference_mode(mode=False), torch.enable_grad(), DrawFrom(self.seed, 0, 0):
            outputs, result, loss = with_tensors(self.model, tensors, run)
        weight = 1.0 if loss.weight is None else float(loss.weight)
        check_weight(weight)
        return EagerRun(
            batch=part,
            rows=None if self.batch.size is None else rows,
            outputs=_detached(outputs),
            result=_detached(result),
            loss=_mean(float(loss.value.detach()), weight),
            weight=weight,
            gradients={n: t.grad for n, t in own.items() if t.grad is not None},
            parameters={n: t.detach() for n, t in own.items() if isinstance(t, nn.Parameter)},
            buffers={
                n: tensors[n].detach() for n, t in own.items() if not isinstance(t, nn.Parameter)
            },
        )

    def _forward(self, part: Batch) -> object:
        args, kwargs = as_arguments(part[0])
        if self.precision is not None:
            args, kwargs = cast((args, kwargs), self.precision.compute)
        with plain_experts(self.model), self._failing("the model", inputs=part[0]):
            outputs: object = self.model(*args, **kwargs)
        return outputs if self.precision is None else cast(outputs, self.precision.output)

    def _take(self, first: int, rows: int) -> Batch:
        values = [
            _rows_of(leaf.value, first, rows if leaf.split else None) for leaf in self.batch.leaves
        ]
        stream = iter(values)
        inputs = self.batch.rebuild_inputs(stream)
        return inputs, self.batch.rebuild_targets(stream)

    def _copies(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by every name; tied ones are one tensor."""
        made: dict[int, torch.Tensor] = {}
        compute = None if self.precision is None else self.precision.compute

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in made:
                own = tensor.detach().clone()
                if isinstance(tensor, nn.Parameter):
                    wanted = compute if compute is not None and is_cast(own) else own.dtype
                    own = nn.Parameter(own.to(wanted), tensor.requires_grad)
                made[id(tensor)] = own
            return made[id(tensor)]

        model = self.model
        return {
            name: copied(tensor)
            for named in (model.named_parameters, model.named_buffers)
            for name, tensor in named(remove_duplicate=False)
        }

    @contextmanager
    def _failing(self, what: str, **given: object) -> Iterator[None]:
        """Say that *what* fails, and what it was given."""
        remedy = _REMEDY.get(what, "")
        try:
            yield
        except PiperError:
            raise
        except Exception as error:
            seen = "; ".join(f"{name}: {described(tree)}" for name, tree in given.items())
            where = user_line(error.__traceback__, default="")
            raise CaptureError(
                f"{f'{where}: ' if where else ''}in {what}: fails in plain PyTorch too, before anything is captured: "
                f"{type(error).__name__}: {_short(error)}\n(one microbatch; {seen}){remedy}"
            ) from error


def eager_model(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    batch_dims: Mapping[str, int | None] | None,
    seed: int,
    precision: Precision | None = None,
) -> EagerModel | None:
    """What there is to run; ``None`` where a tensor of the model has no value (the meta device).

    Raises what capture raises for a model, a batch or a loss function that it does not take.
    """
    check_loss_fn(loss_fn)
    flat = flatten_batch(model.forward, batch, batch_dims)
    if precision is not None:
        check_model(model, precision)
    refuse_parameter_hooks(model)
    parameters, buffers = model_states(model)
    if any(state.tensor.is_meta for state in (*parameters, *buffers)):
        return None
    return EagerModel(model, loss_fn, flat, seed, precision)


def first_microbatch(
    eager: EagerModel, strategy: Sequence[Directive], afresh: Callable[[], None]
) -> tuple[EagerRun, Callable[[], EagerRun]]:
    """The first microbatch that *strategy* will make (of those whose loss has a weight, if any
    has), and what runs it again. *afresh* is called between runs.

    Raises :class:`CaptureError` for what fails in plain PyTorch, and for a loss that is not finite
    there.
    """
    size = 1 if eager.batch.size is None else eager.batch.size
    rows = likely_rows(strategy, size)
    first = 0
    run = eager.run(first, rows)
    while run.weight == 0 and first + 2 * rows <= size:
        first += rows
        afresh()
        run = eager.run(first, rows)
    _require_finite(run)
    return run, partial(eager.run, first, rows)


def _require_finite(run: EagerRun) -> None:
    if run.weight == 0 or math.isfinite(run.loss):
        return
    inputs, targets = run.batch
    raise CaptureError(
        f"the loss of a microbatch is {run.loss} in plain PyTorch as well (outputs: {_finite(run.outputs)}; inputs: {described(inputs)}; "
        f"targets: {described(targets)}). If it is a mean over nothing (all labels ignored, an empty mask), return (sum, weight), "
        "so that such a microbatch counts for nothing; else look for what is infinite in the model or the data"
    )


def _finite(outputs: object) -> str:
    tensors = [
        t
        for t in pytree.tree_leaves(outputs)
        if isinstance(t, torch.Tensor) and t.is_floating_point()
    ]
    return "all finite" if all(bool(torch.isfinite(t).all()) for t in tensors) else "not finite"


def _mean(total: float, weight: float) -> float:
    return total / weight if weight else math.nan


def _rows_of(value: object, first: int, rows: int | None) -> object:
    """A copy of *value*, of *rows* of its rows if given."""
    if not isinstance(value, torch.Tensor):
        return value
    part = value if rows is None else value.narrow(0, first, rows)
    return part.detach().clone(memory_format=torch.contiguous_format)


def _detached(tree: object) -> object:
    def detached(leaf: object) -> object:
        return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(detached, tree)


def described(tree: object) -> str:
    """Types and shapes of the tensors of *tree*, on one line."""
    if isinstance(tree, torch.Tensor):
        return f"{str(tree.dtype).removeprefix('torch.')}{list(tree.shape)}"
    if isinstance(tree, Mapping):
        return _listed("{", [f"{key}: {described(child)}" for key, child in tree.items()], "}")
    if isinstance(tree, (tuple, list)):
        return _listed("(", [described(child) for child in tree], ")")
    return type(tree).__name__


def _listed(start: str, parts: Sequence[str], end: str, most: int = 6) -> str:
    rest = ", …" if len(parts) > most else ""
    return f"{start}{', '.join(parts[:most])}{rest}{end}"


def _short(error: Exception) -> str:
    """The first lines of what PyTorch says."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return "\n".join(lines[:3])

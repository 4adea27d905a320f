"""Capture: from a model, its loss and an example batch to a training DAG on one device."""

from collections.abc import Mapping

import torch

from piper.boundary import public
from piper.capture.annotate import annotate, annotate_module
from piper.capture.batch import flatten_batch
from piper.capture.forms import as_pair, loss_function, own_loss
from piper.capture.joint import LossFn, capture_joint
from piper.capture.partition import Captured, partition
from piper.capture.precision import PrecisionLike, check_model, make_precision
from piper.capture.surroundings import plain_surroundings
from piper.capture.wrapped import refuse_wrapped
from piper.errors import CaptureError, ConfigError, expect
from piper.ir.dag import Dag
from piper.pausing import collector_paused

__all__ = [
    "Captured",
    "annotate",
    "annotate_module",
    "capture",
    "capture_with_constants",
    "check_loss_fn",
]


@public
def capture(
    model: torch.nn.Module,
    loss_fn: LossFn | None,
    example_batch: object,
    *,
    batch_dims: Mapping[str, int | None] | None = None,
    batch_size: int | None = None,
    grad: bool = True,
    precision: PrecisionLike = None,
) -> Dag:
    """One training step of *model* and *loss_fn* as a DAG of chunks.

    *example_batch* is ``(inputs, targets)``: *inputs* a tensor, a tuple (``*args``) or a mapping
    (``**kwargs``), *targets* any tree of tensors. Only shapes and types count; *model* may be on
    ``meta`` and is not changed. Every tensor is split on dimension 0 unless *batch_dims* says
    otherwise (``{"mask": None}``); leaves that are not tensors are constants, as is
    ``model.training``.

    *loss_fn* ``(outputs, targets)`` returns a scalar, the mean over samples, or ``(sum, weight)``.
    ``None`` takes the loss that the model computes itself. A batch may be one mapping, see
    :func:`piper.compile`.
    The batch size stays symbolic unless *batch_size* fixes it. Without *grad* there is only the
    forward. *precision* is a :class:`piper.Precision`, or a type to compute in, or its name.

    Raises :class:`piper.errors.CaptureError` with the reason, the user's line and a remedy.
    """
    return capture_with_constants(
        model,
        loss_fn,
        example_batch,
        batch_dims=batch_dims,
        batch_size=batch_size,
        grad=grad,
        precision=precision,
    ).dag


def capture_with_constants(
    model: torch.nn.Module,
    loss_fn: LossFn | None,
    example_batch: object,
    *,
    batch_dims: Mapping[str, int | None] | None = None,
    batch_size: int | None = None,
    grad: bool = True,
    precision: PrecisionLike = None,
) -> Captured:
    """Like :func:`capture`, with the values of the DAG's constant buffers."""
    expect(model, torch.nn.Module, "model", "give an instance, not its class or its forward")
    refuse_wrapped(model)
    check_loss_fn(loss_function(loss_fn))
    pair = as_pair(example_batch, own_loss=loss_function(loss_fn) is own_loss, error=CaptureError)
    batch = flatten_batch(model.forward, pair, batch_dims)
    policy = make_precision(precision)
    if policy is not None:
        check_model(model, policy)
    with plain_surroundings(), collector_paused():
        joint = capture_joint(
            model, loss_function(loss_fn), batch, batch_size=batch_size, grad=grad, precision=policy
        )
        return partition(joint, batch)


def check_loss_fn(loss_fn: object) -> None:
    """Raise :class:`ConfigError` for what is no loss function: a text, the class of a loss."""
    if isinstance(loss_fn, type) and issubclass(loss_fn, torch.nn.Module):
        raise ConfigError(
            f"loss_fn: expected a function or an instance, found the class {loss_fn.__name__}, which is called with options, not with "
            f"outputs and targets; give {loss_fn.__name__}()"
        )
    if not callable(loss_fn):
        raise ConfigError(
            f"loss_fn is called as loss_fn(outputs, targets), found {type(loss_fn).__name__}: {loss_fn!r:.80}"
        )

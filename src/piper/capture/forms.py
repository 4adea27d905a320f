"""The forms in which users give batches and losses, brought into one: a pair ``(inputs, targets)``
and a function of the model's outputs and the targets.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from piper.capture.joint import LossFn
from piper.errors import BatchError, CaptureError, PiperError

LABELS = "labels"
"""The key of a batch that is one mapping under which a loss function finds its targets, as in
Hugging Face's Trainer.
"""

Pair: TypeAlias = tuple[object, object]


def as_pair(given: object, *, own_loss: bool, error: type[PiperError] = BatchError) -> Pair:
    """The batch that a user gave, as ``(inputs, targets)``.

    A pair is one already. One mapping (a dictionary, what Hugging Face's tokenizers and collators
    return, the fields of a dataclass) holds the model's arguments by name: with *own_loss*, where
    the model computes its loss, all of it is input; else its ``labels`` are the targets.

    Raises *error* for other forms, and for targets that nothing reads.
    """
    whole = _as_mapping(given)
    if whole is not None:
        return _divided(whole, own_loss, error)
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        size = f" of {len(given)}" if isinstance(given, (tuple, list)) else ""
        fields = " (._asdict() makes a mapping of it)" if hasattr(given, "_asdict") else ""
        raise error(
            f"a batch must be a pair (inputs, targets) or one mapping of the model's arguments, found {type(given).__name__}{size}{fields}"
        )
    inputs, targets = given
    if own_loss and targets is not None:
        raise error(
            "loss_fn=None trains the loss that the model computes from its inputs, so nothing would read the second part of the batch; "
            "give the labels among the inputs, such as one mapping of all arguments, or ((x, y), None)"
        )
    return inputs, targets


def loss_function(given: LossFn | None) -> LossFn:
    """The loss function that a user gave; without one, that which takes the model's own loss."""
    return own_loss if given is None else given


def own_loss(outputs: object, _targets: object) -> object:
    """The loss among the *outputs* of a model that computes its own: the scalar itself, ``loss`` of
    a mapping or an object, the only scalar of a tuple, or a pair (sum, weight).

    Raises :class:`CaptureError` where there is none.
    """
    if isinstance(outputs, torch.Tensor) and outputs.dim() == 0:
        return outputs
    if isinstance(outputs, (tuple, list)) and not hasattr(outputs, "loss"):
        scalars = [o for o in outputs if isinstance(o, torch.Tensor) and o.dim() == 0]
        if len(scalars) == 1:
            return scalars[0]
        if len(scalars) == len(outputs) == 2:
            return outputs  # what a pair may be is for its reader to say
        found = f"{type(outputs).__name__} of {len(outputs)} with {len(scalars)} scalar tensors"
    else:
        missing = object()
        loss = (
            outputs.get("loss", missing)
            if isinstance(outputs, Mapping)
            else getattr(outputs, "loss", missing)
        )
        if loss is not missing and loss is not None:
            return loss
        what = "loss None" if loss is None else "no loss"
        found = f"{type(outputs).__name__} with {what}"
    raise CaptureError(
        f"loss_fn=None trains the loss that the model computes itself, but the model returns {found}; give it what it needs for a loss "
        f"(Hugging Face's models: {LABELS!r} in the batch), or a loss_fn(outputs, targets)"
    )


@dataclass(frozen=True, slots=True)
class Paired:
    """``data(step)`` whose batches are pairs, whatever form *data* gives them."""

    data: Callable[[int], object]
    own_loss: bool

    def __call__(self, step: int) -> Pair:
        """The batch of *step*."""
        return as_pair(self.data(step), own_loss=self.own_loss)


def _as_mapping(given: object) -> dict[str, object] | None:
    if isinstance(given, Mapping):
        return {str(key): value for key, value in given.items()}
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        return {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    return None


def _divided(whole: dict[str, object], own_loss: bool, error: type[PiperError]) -> Pair:
    if own_loss:
        return whole, None
    if LABELS not in whole:
        raise error(
            f"a batch that is one mapping holds the model's arguments, and the targets of loss_fn under {LABELS!r}; found "
            f"{', '.join(map(repr, whole)) or 'nothing'}. Give a pair (inputs, targets), or loss_fn=None if the model computes its loss"
        )
    targets = whole.pop(LABELS)
    return whole, targets

"""Plain PyTorch, written without anything of piper: what every strategy must equal.

One process, the global batch cut into microbatches that run in sequence, gradients summed as the
loss demands, one optimizer over all parameters.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

Batch: TypeAlias = tuple[object, object]
LossFn: TypeAlias = Callable[..., object]
MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class Step:
    """One step's loss; gradients and updated parameters and buffers by their first name; gradients
    only where there are some.
    """

    loss: float
    gradients: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)


def rows(tree: object, start: int, stop: int) -> object:
    """Rows of every tensor of *tree*; everything else as it is."""
    if isinstance(tree, Tensor):
        return tree[start:stop]
    if isinstance(tree, Mapping):
        return {key: rows(child, start, stop) for key, child in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(rows(child, start, stop) for child in tree)
    return tree


def count_rows(tree: object) -> int:
    """Rows of the first tensor."""
    if isinstance(tree, Tensor):
        return tree.shape[0]
    children = tree.values() if isinstance(tree, Mapping) else tree
    return next(count_rows(c) for c in children if isinstance(c, (Tensor, Mapping, tuple, list)))


def call(model: nn.Module, inputs: object) -> object:
    """The model on inputs that are a tensor, arguments, or keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def one_step(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    num_microbatches: int,
    optimizer: torch.optim.Optimizer,
    around: Callable[[int], AbstractContextManager[object]] = lambda _: nullcontext(),
) -> Step:
    """One training step of *model*, in place. ``around(m)`` is entered for the forward of
    microbatch m.
    """
    size, rest = divmod(count_rows(batch[0]), num_microbatches)
    assert not rest
    optimizer.zero_grad(set_to_none=True)
    total, weight = 0.0, 0.0
    for m in range(num_microbatches):
        inputs, targets = (rows(part, m * size, (m + 1) * size) for part in batch)
        with around(m):
            result = loss_fn(call(model, inputs), targets)
        loss, own = result if isinstance(result, tuple) else (result, 1.0)
        loss.backward()
        total, weight = total + float(loss.detach()), weight + float(own)
    gradients: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            parameter.grad /= weight
            gradients[name] = parameter.grad.clone()
    optimizer.step()
    return Step(total / weight, gradients, state_of(model))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of parameters and buffers (also those that are not persistent)."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def train(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Sequence[Batch],
    num_microbatches: int,
    make_optimizer: MakeOptimizer,
    around: Callable[[int, int], AbstractContextManager[object]] = lambda _, __: nullcontext(),
) -> list[Step]:
    """One step per batch, on a copy of *model*. ``around(step, m)`` is entered for each
    microbatch's forward.
    """
    model = copy.deepcopy(model)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    return [
        one_step(model, loss_fn, b, num_microbatches, optimizer, partial(around, step))
        for step, b in enumerate(batches)
    ]

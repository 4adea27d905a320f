"""Does an optimizer treat every element by itself? Known for torch's own, tried out for any other.

A device updates the slices and the parameters that it holds, with an optimizer that sees nothing
else. That equals one optimizer over the whole model only if no parameter's update depends on
another parameter, and, where parameters are sharded, no element's on another element.
"""

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch.optim import Optimizer

from piper.errors import ConfigError
from piper.ir.dag import Parameter
from piper.runtime.optimizer import OptimizerSpec, build_optimizer, group_parameters
from piper.runtime.slices import Slice, merge_slices

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Optimizers whose update of an element depends on that element's gradient and history alone,
whatever their options. A subclass may do anything.
"""

STEPS = 12
"""More than the ten steps after which preconditioners are commonly first computed."""

TOLERANCE = 1e-9
"""Relative difference of two updates that counts as rounding, in float64."""

_SIZES = (4, 3, 2, 2)

Tensors = Mapping[str, torch.Tensor]


def check_optimizer(
    spec: OptimizerSpec, model: Mapping[str, Parameter], sharded: Collection[str], num_devices: int
) -> None:
    """Raise :class:`ConfigError` unless the optimizer serves parameters of *model* that are spread
    over *num_devices* devices, those named by *sharded* in slices, and the learning rate of the
    first step is a number.

    An optimizer that is not known is tried on small tensors with random gradients: all together,
    each parameter apart, and in two halves. Its update must be the same.
    """
    trained = [name for name, parameter in model.items() if parameter.requires_grad]
    if not trained:
        return
    _check_schedule(spec)
    if num_devices > 1 or sharded:
        _Trial(spec, model, _representatives(spec, model, sharded), sharded).run()


def _check_schedule(spec: OptimizerSpec) -> None:
    if spec.lr_schedule is None:
        return
    try:
        factor = float(spec.lr_schedule(0))
    except Exception as error:
        raise ConfigError(
            f"lr_schedule= must return a factor on the learning rates for every step, failed for step 0: {type(error).__name__}: {error}"
        ) from error
    if math.isnan(factor):
        raise ConfigError("lr_schedule= must return a factor on the learning rates, found NaN")


def _representatives(
    spec: OptimizerSpec, model: Mapping[str, Parameter], sharded: Collection[str]
) -> tuple[str, ...]:
    """Two trained parameters of each group, number of dimensions and way of being held."""
    chosen: dict[tuple[int, int, bool], list[str]] = {}
    for number, (names, _) in enumerate(group_parameters(model, spec.param_groups)):
        for name in names:
            kind = (number, len(model[name].spec.shape), name in sharded)
            alike = chosen.setdefault(kind, [])
            if len(alike) < 2:
                alike.append(name)
    return tuple(name for alike in chosen.values() for name in alike)


class _Trial:
    """The same steps, done by one optimizer and by several."""

    def __init__(
        self,
        spec: OptimizerSpec,
        model: Mapping[str, Parameter],
        names: Sequence[str],
        sharded: Collection[str],
    ) -> None:
        self.spec, self.model = spec, model
        self.sharded = [name for name in names if name in sharded]
        make = torch.Generator().manual_seed(0)
        shapes = {name: _shape(len(model[name].spec.shape)) for name in names}
        self.start = {name: _random(shape, make) for name, shape in shapes.items()}
        self.gradients = [
            {name: _uneven(_random(shape, make)) for name, shape in shapes.items()}
            for _ in range(STEPS)
        ]

    def run(self) -> None:
        try:
            optimizer = self._build(self.start)
            name = type(optimizer).__name__
            if type(optimizer) in ELEMENTWISE and not _hooked(optimizer):
                return
            whole = self._train(optimizer, self.start, self.gradients)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"optimizer= could not be tried on small tensors, as it must be to know whether devices may update their own "
                f"parameters apart: {type(error).__name__}: {error}"
            ) from error
        self._require_apart(name, whole)
        self._require_halves(name, whole)

    def _require_apart(self, optimizer: str, whole: Tensors) -> None:
        found: dict[str, torch.Tensor] = {}
        for name in self.start:
            found |= self._part({name: Slice(0, 1)})
        if not _same(found, whole, self.start):
            raise ConfigError(
                f"optimizer {optimizer} updates a parameter in another way when it is alone than beside others, which another "
                "device may hold: no device could compute the update of single-process training. Use an optimizer that treats "
                "each parameter by itself and draws no random numbers (max_grad_norm= clips by the norm over all devices)"
            )

    def _require_halves(self, optimizer: str, whole: Tensors) -> None:
        if not self.sharded:
            return
        remedy = (
            f"so it needs whole parameters, but the strategy shards {len(self.sharded)} kinds of them, such as "
            f"{self.sharded[0]!r}. Use a Replicate without shard_optimizer, shard_grads and shard_params (zero=0) for what "
            f"{optimizer} updates, or an elementwise optimizer such as AdamW"
        )
        try:
            halves = [self._part(dict.fromkeys(self.sharded, Slice(i, 2))) for i in range(2)]
        except Exception as error:
            raise ConfigError(
                f"optimizer {optimizer} cannot update a slice of a parameter ({type(error).__name__}: {error}), {remedy}"
            ) from error
        merged = {n: merge_slices([h[n] for h in halves], whole[n].shape) for n in self.sharded}
        if not _same(merged, whole, self.start):
            raise ConfigError(
                f"optimizer {optimizer} updates an element depending on other elements of its parameter, {remedy}"
            )

    def _part(self, slices: Mapping[str, Slice]) -> Tensors:
        """What the steps make of slices of some parameters."""
        start = {name: part.of(self.start[name]) for name, part in slices.items()}
        if all(part.count == 1 for part in slices.values()):
            start = {name: self.start[name] for name in slices}
        gradients = [
            {n: part.of(g[n]).reshape(start[n].shape) for n, part in slices.items()}
            for g in self.gradients
        ]
        return self._train(self._build(start), start, gradients)

    def _build(self, start: Tensors) -> Optimizer:
        """An optimizer over copies of *start*."""
        self.parameters = {n: torch.nn.Parameter(t.detach().clone()) for n, t in start.items()}
        optimizer = build_optimizer(self.spec, self.model, self.parameters)
        for group in optimizer.param_groups:
            # What it is in the run may be nothing at first, and would hide all else.
            rate = group.get("lr")
            if isinstance(rate, torch.Tensor):
                rate.fill_(0.01)
            elif rate is not None:
                group["lr"] = 0.01
        return optimizer

    def _train(self, optimizer: Optimizer, start: Tensors, gradients: Sequence[Tensors]) -> Tensors:
        parameters = {name: self.parameters[name] for name in start}
        for given in gradients:
            for name, gradient in given.items():
                parameters[name].grad = gradient.clone()
            optimizer.step()
        return {name: parameter.detach() for name, parameter in parameters.items()}


def _shape(dimensions: int) -> tuple[int, ...]:
    return tuple(_SIZES[i] if i < len(_SIZES) else 1 for i in range(dimensions))


def _random(shape: tuple[int, ...], make: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=make, dtype=torch.float64)


def _uneven(tensor: torch.Tensor) -> torch.Tensor:
    """*tensor* with its second half made larger, so that norms of the halves differ."""
    flat = tensor.reshape(-1)
    flat[(flat.numel() + 1) // 2 :] *= 10
    return flat.view(tensor.shape)


def _same(found: Tensors, expected: Tensors, start: Tensors) -> bool:
    """Whether the updates since *start* are equal but for rounding; false where one is not a
    number.
    """
    for name, tensor in found.items():
        moved = (expected[name] - start[name]).abs().max()
        if not (tensor - expected[name]).abs().max() <= TOLERANCE * moved:
            return False
    return True


def _hooked(optimizer: Optimizer) -> bool:
    """Whether the user's functions run before or after each step."""
    return bool(
        optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks  # noqa: SLF001
    )

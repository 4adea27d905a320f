"""Does an optimizer treat every element by itself? Known for torch's own, tried out for any other.

A device updates the slices and the parameters that it holds, with an optimizer that sees nothing
else. That equals one optimizer over the whole model only if no parameter's update depends on
another parameter, and, where parameters are sharded, no element's on another element.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from msgspec.structs import replace
from torch.optim import Optimizer

from piper.errors import ConfigError
from piper.ir.body import TensorSpec
from piper.ir.dag import Parameter
from piper.runtime.device_optimizer import DeviceOptimizer, Part, build_optimizer, outline
from piper.runtime.optimizer import OptimizerSpec
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
    spec: OptimizerSpec,
    model: Mapping[str, Parameter],
    sharded: Collection[str],
    num_devices: int,
    num_updates: int = 1,
) -> DeviceOptimizer:
    """The optimizer's groups, as :func:`~piper.runtime.device_optimizer.outline` gives them. Raise
    :class:`ConfigError` unless the optimizer serves parameters of *model* that are spread over
    *num_devices* devices, those named by *sharded* in slices, and updated by up to *num_updates*
    calls in each step.

    An optimizer that is not known is tried on small tensors with random gradients: all together,
    one parameter after the other, each apart, and in two halves. Its update must be the same.
    """
    found = outline(spec, model)
    alone = num_devices == 1 and num_updates <= 1 and not sharded
    for part in found.parts:
        optimizer = part.optimizer
        trained = any(part.names)
        if trained and (type(optimizer) not in ELEMENTWISE or _hooked(optimizer)):
            names = _representatives(part, model, sharded)
            kind = type(optimizer).__name__
            _Trial(spec, model, names, sharded).run(kind, alone=alone)
    return found


def _representatives(
    part: Part, model: Mapping[str, Parameter], sharded: Collection[str]
) -> tuple[str, ...]:
    """Two trained parameters of each group, number of dimensions and way of being held."""
    chosen: dict[tuple[int, int, bool], list[str]] = {}
    for number, names in enumerate(part.names):
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

    def run(self, kind: str, *, alone: bool) -> None:
        """Raise :class:`ConfigError` for an optimizer (of class *kind*) that does not serve; with
        *alone* one device holds all parameters whole, and updates them in one call.
        """
        whole = self._whole()
        if not alone:
            self._require_apart(kind, whole)
            self._require_one_after_another(kind, whole)
            self._require_halves(kind, whole)

    def _whole(self) -> Tensors:
        """What the steps make of the whole parameters. Where the optimizer does not take small
        tensors for the model's, the model is a small one from now on.
        """
        try:
            return self._train(self._build(self.start), self.start, self.gradients)
        except Exception:  # noqa: BLE001 (tried again, and raised if it is no matter of shapes)
            small = {name: tuple(tensor.shape) for name, tensor in self.start.items()}
            self.model = {
                name: _reshaped(p, small.get(name, _shape(len(p.spec.shape))))
                for name, p in self.model.items()
            }
        try:
            return self._train(self._build(self.start), self.start, self.gradients)
        except Exception as error:
            raise ConfigError(
                f"optimizer= could not be tried on small tensors, as it must be to know whether devices may update their own "
                f"parameters apart: {type(error).__name__}: {error}"
            ) from error

    def _require_one_after_another(self, optimizer: str, whole: Tensors) -> None:
        try:
            found = self._train(
                self._build(self.start), self.start, self.gradients, one_after_another=True
            )
        except Exception as error:
            raise ConfigError(
                f"optimizer {optimizer} fails in a step in which some parameters have no gradient (grad is None), as those have that a device "
                f"updates in another call: {type(error).__name__}: {error}. Skip such parameters, as torch's optimizers do"
            ) from error
        if not _same(found, whole, self.start):
            raise ConfigError(
                f"optimizer {optimizer} does other updates when the gradients of some parameters come later than those of others, each with "
                "a call of step() of its own, as they do on a device: it has state that is not kept for each parameter, such as a count of "
                "calls, draws random numbers, or uses other parameters' gradients. Use an optimizer that treats each parameter by itself "
                "and keeps its counts in state[parameter] (max_grad_norm= clips by the norm over all devices)"
            )

    def _require_apart(self, optimizer: str, whole: Tensors) -> None:
        found: dict[str, torch.Tensor] = {}
        for name in self.start:
            found |= self._part({name: Slice(0, 1)})
        if not _same(found, whole, self.start):
            raise ConfigError(
                f"optimizer {optimizer} updates a parameter in another way when it is alone than beside others, which another "
                "device may hold or which are updated at another time: no device could compute the update of single-process training. Use an optimizer that treats "
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
                f"optimizer {optimizer} cannot update a slice of a parameter, a run of its flattened elements, {remedy}"
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

    def _build(self, start: Tensors) -> DeviceOptimizer:
        """An optimizer over copies of *start*."""
        self.parameters = {n: torch.nn.Parameter(t.detach().clone()) for n, t in start.items()}
        optimizer = build_optimizer(self.spec, self.model, self.parameters)
        for group in optimizer.groups:
            # What it is in the run may be nothing at first, and would hide all else.
            rate = group.get("lr")
            if isinstance(rate, torch.Tensor):
                group["lr"] = torch.full_like(rate, 0.01)
            elif rate is not None:
                group["lr"] = 0.01
        return optimizer

    def _train(
        self,
        optimizer: DeviceOptimizer,
        start: Tensors,
        gradients: Sequence[Tensors],
        *,
        one_after_another: bool = False,
    ) -> Tensors:
        parameters = {name: self.parameters[name] for name in start}
        for given in gradients:
            calls = [[name] for name in given] if one_after_another else [list(given)]
            for names in calls:
                for name in names:
                    parameters[name].grad = given[name].clone()
                optimizer.step(names)
                for name in names:
                    parameters[name].grad = None
        return {name: parameter.detach() for name, parameter in parameters.items()}


def _reshaped(parameter: Parameter, shape: tuple[int, ...]) -> Parameter:
    return replace(parameter, spec=TensorSpec(shape, parameter.spec.dtype))


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

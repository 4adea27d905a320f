"""The model state of one device: parameters, buffers, and one optimizer over the parameters that it
holds.

State belongs to names, not to a plan: any number of plans may use it, and a snapshot loads into any
layout.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch

from piper.devices.tensors import torch_dtype
from piper.errors import StateError
from piper.ir.dag import ElementTypes, Parameter, master_dtype
from piper.runtime.device_optimizer import DeviceOptimizer, build_optimizer, copied
from piper.runtime.optimizer import STEP, OptimizerSpec, per_element
from piper.runtime.slices import Shard, Slice
from piper.runtime.snapshot import OptimizerSnapshot, StateSnapshot, check_tensor

Weights: TypeAlias = (
    Mapping[str, torch.Tensor] | Callable[[Sequence[str]], Mapping[str, torch.Tensor]]
)
"""Initial tensors by parameter's or buffer's name, or a function that makes those of the given
names.
"""


class ModelState:
    """Parameters and buffers of one device; the tensors keep their identity for the state's life.

    A device may hold a parameter whole, or a slice of it, or both; what the optimizer updates is
    the slice if there is one. *parameters* are whole tensors in either case; *slices* says of which
    a slice is held, *whole* which are held whole. Under mixed precision (*types*) slices, of which
    a master copy is one, are in the type in which parameters are updated; values of any
    floating-point type are converted. *experts* says of which only a part of the experts is held
    ("whole" then means that part), as (index, count).

    Raises :class:`StateError` for a tensor that does not have the model's shape or type,
    :class:`ConfigError` for an optimizer that cannot serve.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        model: Mapping[str, Parameter],
        optimizer: OptimizerSpec | None,
        device: torch.device,
        slices: Mapping[str, Slice] | None = None,
        whole: Container[str] | None = None,
        types: ElementTypes | None = None,
        experts: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self._device = device
        self._updated_in = {
            name: torch_dtype(master_dtype(model[name], types)) for name in parameters
        }
        for name, tensor in parameters.items():
            check_tensor("parameter", name, tensor, model[name].spec, types)
        self._slices = dict(slices or {})
        self._parts = {name: Slice(experts=part) for name, part in (experts or {}).items()}
        self._kept: dict[str, torch.Tensor] = {}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        self.parameters: dict[str, torch.nn.Parameter] = {
            name: _own(
                self._experts(name).part(tensor), model[name], self._updated_in[name], device
            )
            for name, tensor in parameters.items()
            if name not in self._slices or (whole is not None and name in whole)
        }
        self._shown = {**{n: s for n, s in self._parts.items() if n in parameters}, **self._slices}
        self.shards = {
            name: _padded_slice(parameters[name], part, self._updated_in[name], device)
            for name, part in self._slices.items()
        }
        self._trained: dict[str, torch.nn.Parameter] = {
            **self.parameters,
            **{
                name: torch.nn.Parameter(
                    _unpadded(self.shards[name], part, part.of(parameters[name]).numel()),
                    model[name].requires_grad,
                )
                for name, part in self._slices.items()
            },
        }
        self.buffers: dict[str, torch.Tensor] = {
            name: tensor.detach().to(device, copy=True) for name, tensor in buffers.items()
        }
        self._observe = optimizer.observe if optimizer is not None else None
        self._optimizer = self._build(model, optimizer, types) if optimizer is not None else None

    @property
    def optimizer_kind(self) -> str | None:
        """The optimizer's class with its module (of several: each), if there is an optimizer."""
        return None if self._optimizer is None else self._optimizer.kind

    def optimizer_state(self) -> list[object]:
        """What the optimizer keeps, for all parameters: the objects themselves."""
        return [] if self._optimizer is None else self._optimizer.states()

    def _experts(self, name: str) -> Slice:
        return self._parts.get(name, Slice())

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole parameter, of which a slice is held or all."""
        return self._shapes[name]

    def begin_step(self, lr_factor: float) -> None:
        """Make the learning rates of this step *lr_factor* times those of the optimizer's
        options.
        """
        if self._optimizer is not None:
            self._optimizer.set_factor(lr_factor)

    def update(
        self,
        gradients: Mapping[str, torch.Tensor],
        scale: torch.Tensor | None,
        norm: torch.Tensor | None = None,
        max_norm: float | None = None,
        *,
        only_finite: bool = False,
    ) -> None:
        """Let the optimizer update the named parameters from their gradients, each converted to the
        parameter's type, divided by *scale* and, given the *norm* of all parameters' gradients,
        clipped to *max_norm*. With *only_finite* nothing changes unless the norm is finite.

        Parameters that are not named keep their value and their optimizer state, as in PyTorch.
        """
        if self._optimizer is None:
            raise StateError(
                "the plan updates parameters, but the trainer has no optimizer; pass optimizer="
            )
        if only_finite and (norm is None or not bool(torch.isfinite(norm))):
            return
        parameters = self._trained
        clip = None if norm is None or max_norm is None else _clip_factor(norm, max_norm)
        try:
            for name, gradient in gradients.items():
                parameter = parameters[name]
                part = self._slices.get(name)
                if part is not None:
                    gradient = _unpadded(gradient, part, parameter.numel())  # noqa: PLW2901
                final = gradient.to(parameter.dtype)
                final = final if scale is None else (final / scale).to(final.dtype)
                final = final if clip is None else final * clip.to(final.dtype)
                parameter.grad = _laid_out_like(parameter, final)
            if self._observe is not None:
                shown = {name: _gradient(parameters[name]) for name in gradients}
                self._observe(shown, self._shown)
            self._optimizer.step(gradients)
        finally:
            for name in gradients:
                parameters[name].grad = None

    def write_buffer(self, name: str, value: torch.Tensor, replicas: int = 1) -> None:
        """Copy *value*, less ``replicas - 1`` times what the buffer was, into the buffer."""
        buffer = self.buffers[name]
        buffer.copy_(value if replicas == 1 else value - (replicas - 1) * buffer)

    def tensor(self, name: str) -> torch.Tensor:
        """The parameter or buffer *name*.

        Raises :class:`StateError` when this device does not hold it.
        """
        found: torch.Tensor | None = self.parameters.get(name, self.buffers.get(name))
        if found is None:
            raise StateError(
                f"this device holds no parameter or buffer {name!r}: it was given the state of a plan that does not "
                f"use it here; place the model in the same way in every plan of a trainer"
            )
        return found

    def shard(self, name: str) -> torch.Tensor:
        """This device's slice of a parameter, padded to the length that all slices have.

        Raises :class:`StateError` when this device does not hold one.
        """
        found = self.shards.get(name)
        if found is None:
            raise StateError(
                f"this device holds no slice of parameter {name!r}: it was given the state of a plan that does not shard it "
                f"here; replicate the model in the same way in every plan of a trainer"
            )
        return found

    def kept(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What is kept of the gradient of a parameter, or of its slice, whose gradient has this
        shape and type; at first zeros.
        """
        found = self._kept.get(name)
        if found is None:
            found = self._kept[name] = torch.zeros(shape, dtype=dtype, device=self._device)
        if (tuple(found.shape), found.dtype) != (shape, dtype):
            raise StateError(
                f"the kept gradient of {name!r} is {found.dtype}{list(found.shape)}, this plan's is {dtype}{list(shape)}; keep "
                "gradients under one plan for every parameter"
            )
        return found

    def keep_as(self, other: "ModelState") -> None:
        """Keep the gradients that *other* keeps."""
        self._kept = other._kept  # noqa: SLF001 (its own class)

    def snapshot(
        self, names: Iterable[str], *, optimizer: bool, everything: bool = False
    ) -> StateSnapshot:
        """Copies, on the CPU, of the named parameters and buffers; with *optimizer* its state for
        those parameters.

        Where the device holds a slice of a parameter, or a part of its experts, that is what is
        copied, and the whole one too, if it is there, only if *everything* is asked for.
        """
        wanted = set(names)
        parameters = {
            n: _copy(p)
            for n, p in self.parameters.items()
            if n in wanted
            and (
                n not in self._shown or (everything and n in self._slices and n not in self._parts)
            )
        }
        shards = {
            n: Shard(part, _copy(self._trained[n]))
            for n, part in self._shown.items()
            if n in wanted
        }
        buffers = {n: _copy(b) for n, b in self.buffers.items() if n in wanted}
        state = self._optimizer_snapshot({**parameters, **shards}) if optimizer else None
        return StateSnapshot(parameters, buffers, state, shards)

    def restore(self, snapshot: StateSnapshot) -> None:
        """Overwrite what this device holds with the entries of *snapshot*; other entries are
        ignored. Kept gradients, which belong to what is overwritten, are dropped.
        """
        for kept in self._kept.values():
            kept.zero_()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if name in snapshot.parameters:
                    value = self._experts(name).part(snapshot.parameters[name])
                    parameter.copy_(value.to(self._updated_in[name]))
            for name, part in self._slices.items():
                if name in snapshot.parameters:
                    self._trained[name].copy_(part.of(snapshot.parameters[name]))
            for name, buffer in self.buffers.items():
                if name in snapshot.buffers:
                    buffer.copy_(snapshot.buffers[name])
        if snapshot.optimizer is not None and self._optimizer is not None:
            self._restore_optimizer(self._optimizer, snapshot.optimizer)

    def _build(
        self, model: Mapping[str, Parameter], spec: OptimizerSpec, types: ElementTypes | None
    ) -> DeviceOptimizer | None:
        trained = {n: p for n, p in self._trained.items() if p.requires_grad}
        return build_optimizer(spec, model, trained, self._shown, types) if trained else None

    def _optimizer_snapshot(self, names: Iterable[str]) -> OptimizerSnapshot | None:
        if self._optimizer is None:
            return None
        found = {n: self._optimizer.state(n) for n in names if self._trained[n].requires_grad}
        entries = {
            name: {key: copied(value) for key, value in state.items()}
            for name, state in found.items()
            if state is not None
        }
        return OptimizerSnapshot(entries, self._optimizer.options())

    def _restore_optimizer(self, optimizer: DeviceOptimizer, snapshot: OptimizerSnapshot) -> None:
        if len(snapshot.groups) != len(optimizer.groups):
            raise StateError(
                f"the saved optimizer has {len(snapshot.groups)} parameter groups, this one has "
                f"{len(optimizer.groups)}; compile with the same param_groups and optimizer"
            )
        state = {
            name: {
                key: self._placed(key, self._part(name, key, value))
                for key, value in entries.items()
            }
            for name in self._trained
            if (entries := snapshot.state.get(name)) is not None
        }
        optimizer.restore(state, snapshot.groups)

    def _part(self, name: str, key: str, value: object) -> object:
        """What this device holds of an entry of the optimizer's state."""
        part = self._shown.get(name)
        if part is None or not isinstance(value, torch.Tensor):
            return value
        return part.of(value) if per_element(key, value, self._shapes[name]) else value

    def _placed(self, key: str, value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        # torch keeps the step counter on the CPU, in its own type, unless the optimizer is
        # capturable.
        return value.clone() if key == STEP else value.to(self._device, copy=True)


def _padded_slice(
    tensor: torch.Tensor, part: Slice, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    mine = part.of(tensor.detach())
    if part.count == 1:
        return mine.to(device=device, dtype=dtype, copy=True)
    padded = torch.zeros(part.length(tuple(tensor.shape)), dtype=dtype, device=device)
    padded[: mine.numel()].copy_(mine)
    return padded


def _unpadded(padded: torch.Tensor, part: Slice, numel: int) -> torch.Tensor:
    """The *numel* elements of the slice that are no padding."""
    return padded if part.count == 1 else padded[:numel]


def _own(
    tensor: torch.Tensor, declared: Parameter, updated_in: torch.dtype, device: torch.device
) -> torch.nn.Parameter:
    """A copy of *tensor* in the type in which chunks read it, rounded as it is after every
    update.
    """
    read_in = torch_dtype(declared.spec.dtype)
    own = tensor.detach().to(updated_in).to(device=device, dtype=read_in, copy=True)
    return torch.nn.Parameter(own, requires_grad=declared.requires_grad)


def _clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """As in ``torch.nn.utils.clip_grad_norm_``."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def _laid_out_like(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """*gradient* with the strides of *parameter*, as autograd makes them: fused optimizers read
    both in memory order.
    """
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)

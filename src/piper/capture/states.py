"""The model's parameters and buffers, and stand-ins for them and for the batch. Uses private
torch.
"""
# ruff: noqa: SLF001 (private state of modules and tensors has no public accessor)

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from piper.capture.batch import Batch
from piper.capture.hooks import watched_hooks
from piper.capture.precision import is_cast
from piper.errors import CaptureError

CAPTURE_DEVICE = torch.device("cpu")
"""Where stand-ins pretend to be; bodies say "here" instead."""


@dataclass(frozen=True, slots=True)
class TensorState:
    """A parameter or buffer of the model: shape, type and every name under which it is
    registered.
    """

    tensor: torch.Tensor
    names: tuple[str, ...]
    requires_grad: bool
    persistent: bool = True


def fake_leaves(
    fake: FakeTensorMode, batch: Batch, rows: int | torch.SymInt
) -> dict[int, torch.Tensor]:
    """Stand-ins for the tensor leaves by number, contiguous, the batch dimension *rows* long."""
    made = {}
    for index, leaf in enumerate(batch.leaves):
        if not isinstance(leaf.value, torch.Tensor):
            continue
        sizes: list[int | torch.SymInt] = list(leaf.value.shape)
        if leaf.split:
            sizes[0] = rows
        with fake:
            made[index] = torch.empty(sizes, dtype=leaf.value.dtype, device=CAPTURE_DEVICE)
    return made


def model_states(model: nn.Module) -> tuple[tuple[TensorState, ...], tuple[TensorState, ...]]:
    """Parameters and buffers, each once, with all their names."""
    transient = {
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules(remove_duplicate=False)
        for key in module._non_persistent_buffers_set
    }
    parameters = _by_identity(model.named_parameters(remove_duplicate=False))
    buffers = _by_identity(model.named_buffers(remove_duplicate=False))
    for tensor, names in (*parameters, *buffers):
        _refuse_exotic(tensor, names[0])
    _refuse_shared_memory((*parameters, *buffers))
    return (
        tuple(TensorState(t, names, t.requires_grad) for t, names in parameters),
        tuple(
            TensorState(t, names, requires_grad=False, persistent=not transient.issuperset(names))
            for t, names in buffers
        ),
    )


def _by_identity(
    named: Iterator[tuple[str, torch.Tensor]],
) -> list[tuple[torch.Tensor, tuple[str, ...]]]:
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in named:
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return [(tensor, tuple(names)) for tensor, names in found.values()]


def _refuse_exotic(tensor: torch.Tensor, name: str) -> None:
    if nn.parameter.is_lazy(tensor):
        raise CaptureError(
            f"{name!r} is not initialised yet: run the model once on an example, then capture it"
        )
    if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
        raise CaptureError(
            f"{name!r} is a {type(tensor).__name__} with layout {tensor.layout}; piper places plain "
            f"dense tensors itself: pass the model without sharding, quantisation or sparse weights"
        )


def _refuse_shared_memory(states: Sequence[tuple[torch.Tensor, tuple[str, ...]]]) -> None:
    owners: dict[int, str] = {}
    for tensor, (name, *_) in states:
        if tensor.is_meta or tensor.untyped_storage().nbytes() == 0:
            continue
        owner = owners.setdefault(tensor.untyped_storage().data_ptr(), name)
        if owner != name:
            raise CaptureError(
                f"{owner!r} and {name!r} share memory without being one tensor, so an update of one "
                f"would have to change the other; tie them by assigning the same nn.Parameter, or clone "
                f"one"
            )


@contextmanager
def fake_model(
    model: nn.Module, fake: FakeTensorMode, *, grad: bool, compute: torch.dtype | None = None
) -> Iterator[Callable[[], None]]:
    """Give *model* stand-ins for its parameters and buffers; afterwards restore everything. Those
    for floating-point parameters are of type *compute*, if given.

    Whatever the forward assigns to attributes of a module during the capture is undone too: at the
    end, and when what is given is called. Tracing runs the forward twice; without that the second
    run would find stand-ins of the first (in a cache that the first one filled, for instance).
    """
    stand_ins = _StandIns(fake, trained=grad, compute=compute)
    modules = list(model.modules())
    saved = [Attributes(module) for module in modules]
    try:
        for module in modules:
            module._parameters = {k: stand_ins.parameter(p) for k, p in module._parameters.items()}
            module._buffers = {k: stand_ins.buffer(b) for k, b in module._buffers.items()}
        with watched_hooks(modules):
            yield partial(_rewind, [Attributes(module) for module in modules])
    finally:
        for attributes in saved:
            attributes.restore()


def _rewind(traced: Sequence["Attributes"]) -> None:
    for attributes in traced:
        attributes.rewind()


class Attributes:
    """The attributes of a module, and what is in its dictionaries and lists (parameters, hooks, …).

    The same containers are restored: hook handles hold weak references to them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = dict(vars(module))
        containers = self._attributes.values()
        self._dicts = [(c, dict(c)) for c in containers if isinstance(c, dict)]
        self._lists = [(c, list(c)) for c in containers if isinstance(c, list)]

    def rewind(self) -> None:
        """Undo every assignment since but those to parameters, buffers and modules, so that the
        forward begins as it began the first time.
        """
        current = vars(self._module)
        registered = {key: current[key] for key in _REGISTERED}
        current.clear()
        current.update(self._attributes)
        current.update(registered)
        kept = {id(self._attributes[key]) for key in _REGISTERED}
        self._refill(kept)

    def restore(self) -> None:
        """Undo every assignment since."""
        vars(self._module).clear()
        vars(self._module).update(self._attributes)
        self._refill(())

    def _refill(self, kept: Container[int]) -> None:
        """Put back what is in the containers, but in those *kept*."""
        for mapping, items in self._dicts:
            if id(mapping) not in kept:
                mapping.clear()
                mapping.update(items)
        for sequence, values in self._lists:
            sequence[:] = values


_REGISTERED = ("_parameters", "_buffers", "_modules")


class _StandIns:
    """One stand-in per tensor, of the same shape and strides; of the same type, but for
    floating-point parameters if *compute* is given.
    """

    def __init__(self, fake: FakeTensorMode, *, trained: bool, compute: torch.dtype | None) -> None:
        self._fake = fake
        self._compute = compute
        self._trained = trained
        self._parameters: dict[int, nn.Parameter] = {}
        self._buffers: dict[int, torch.Tensor] = {}

    def parameter(self, tensor: nn.Parameter | None) -> nn.Parameter | None:
        """The stand-in of a parameter."""
        if tensor is None:
            return None
        if id(tensor) not in self._parameters:
            trained = tensor.requires_grad and self._trained
            dtype = self._compute if is_cast(tensor) else None
            stand_in = self._empty(tensor, dtype)
            self._parameters[id(tensor)] = nn.Parameter(stand_in, requires_grad=trained)
        return self._parameters[id(tensor)]

    def buffer(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """The stand-in of a buffer."""
        if tensor is None:
            return None
        if id(tensor) not in self._buffers:
            self._buffers[id(tensor)] = self._empty(tensor)
        return self._buffers[id(tensor)]

    def _empty(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        with self._fake:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=CAPTURE_DEVICE
            )

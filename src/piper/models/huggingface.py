"""Hugging Face mixtures of experts (Qwen3-MoE, Mixtral and others), unmodified: their experts as
regions that ``Shard`` can share out.
"""

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from piper.boundary import public
from piper.capture.annotate import annotate, check_tag
from piper.errors import ConfigError, PiperWarning
from piper.models.routing import sort_by_expert
from piper.runtime.grouped import grouped_mm

IMPLEMENTATION = "piper"
"""Piper's name in transformers' registry of expert implementations."""


class _Experts(Protocol):
    """What transformers' ``use_experts_implementation`` gives an experts module."""

    num_experts: int
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool
    gate_up_proj: Tensor
    gate_up_proj_bias: Tensor
    up_proj: Tensor
    up_proj_bias: Tensor
    down_proj: Tensor
    down_proj_bias: Tensor

    def _apply_gate(self, gate_up_out: Tensor) -> Tensor: ...

    def act_fn(self, x: Tensor) -> Tensor: ...

    def post_expert_norm(self, x: Tensor) -> Tensor: ...


@public
def annotate_experts(model: nn.Module, name: str = "EP") -> int:
    """Make the experts of each layer of a transformers model region *name*, numbered from 0, in the
    dropless form; their number.

    Experts are found by their structure (what transformers' ``use_experts_implementation`` gives a
    module), whatever the model's class. The router and the sum over a token's experts stay in the
    region around. The model then uses the implementation ``"piper"`` of transformers'
    ``ALL_EXPERTS_FUNCTIONS``, which computes the same as the others, in and outside of a capture.

    Without this call a model can be trained as well; its experts are then no region of their own.

    Raises :class:`ConfigError` for a model without experts of that structure, and for one whose
    experts transformers has shared out itself; warns (:class:`PiperWarning`) where some modules that
    look like experts do not have it.
    """
    check_tag(name, 0)
    found = _registered(model)
    missed = _unregistered(model, found)
    listed = ", ".join(f"{path} ({type(module).__name__})" for path, module in missed[:4])
    more = f" and {len(missed) - 4} more" if len(missed) > 4 else ""
    remedy = (
        "mark such modules with piper.annotate_module; to be shared out by Shard, a region's parameters have the experts as dimension 0 and "
        "its inputs hold each expert's tokens (see piper.models.MoE)"
    )
    if not found:
        looks = f"; what looks like experts: {listed}{more}" if missed else ""
        raise ConfigError(
            f"{type(model).__name__} has no experts that use transformers' registry of expert implementations{looks}. {remedy[0].upper()}{remedy[1:]}"
        )
    if missed:
        warnings.warn(
            f"annotate_experts marks {len(found)} modules of {type(model).__name__}, and leaves out what does not use transformers' registry of "
            f"expert implementations: {listed}{more}. {remedy[0].upper()}{remedy[1:]}",
            PiperWarning,
            stacklevel=2,
        )
    for index, module in enumerate(found):
        _refuse_shared_out(module)
        vars(module)["piper_region"] = (name, index)
    _set_implementation(found, IMPLEMENTATION)
    return len(found)


@contextmanager
def capturable_experts(model: nn.Module) -> Iterator[None]:
    """Inside, all experts of the registry run as piper's implementation, which one graph can hold
    whatever the routing and the element type. (Transformers' plain loop has shapes that depend on
    the data, its grouped products lack types.)
    """
    found = _registered(model)
    for module in found:
        _refuse_shared_out(module)
    with _implementation(found, IMPLEMENTATION):
        yield


@contextmanager
def plain_experts(model: nn.Module) -> Iterator[None]:
    """Inside, all experts of the registry run as transformers' plain loop, the model's own code,
    which knows every element type.
    """
    with _implementation(_registered(model), "eager"):
        yield


def _registered(model: nn.Module) -> list[nn.Module]:
    """The modules to which transformers' decorator gave a choice of implementations."""
    return [m for m in model.modules() if hasattr(m, "_apply_gate") and hasattr(m, "is_transposed")]


def _unregistered(
    model: nn.Module, registered: Collection[nn.Module]
) -> list[tuple[str, nn.Module]]:
    """What looks like several experts of a layer, and is not among those found: a list or mapping
    of modules that is named so, or a module with such a name and parameters of three dimensions.
    """
    missed: list[tuple[str, nn.Module]] = []
    for path, module in model.named_modules():
        names = f"{path.rpartition('.')[2]} {type(module).__name__}".lower()
        if "expert" not in names or "shared" in names or module in registered:
            continue
        several = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        stacked = any(p.dim() == 3 for p in module.parameters(recurse=False))
        if several or stacked:
            missed.append((path, module))
    return missed


def _refuse_shared_out(module: nn.Module) -> None:
    if getattr(module, "_is_expert_parallel", False):
        raise ConfigError(
            f"transformers has shared out the experts of {type(module).__name__} over processes itself; load the model without its tensor "
            "or expert parallelism, and use piper.Shard"
        )


@contextmanager
def _implementation(modules: Sequence[nn.Module], name: str) -> Iterator[None]:
    configs = {id(m.config): m.config for m in modules}.values()
    before = [config._experts_implementation for config in configs]  # type: ignore[union-attr]  # noqa: SLF001
    try:
        _set_implementation(modules, name)
        yield
    finally:
        for config, chosen in zip(configs, before, strict=True):
            config._experts_implementation = chosen  # type: ignore[union-attr]  # noqa: SLF001


def _set_implementation(modules: Sequence[nn.Module], name: str) -> None:
    if not modules:
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: PLC0415 (optional)

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)
    for module in modules:
        module.config._experts_implementation = name  # type: ignore[union-attr]  # noqa: SLF001 (where transformers looks)


def _experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """``hidden_states[N, width]``, ``top_k_index[N, k]``, ``top_k_weights[N, k] -> [N, width]``."""
    experts = cast("_Experts", self)
    routed = sort_by_expert(hidden_states, top_k_index, experts.num_experts)
    region: tuple[str, int] | None = vars(self).get("piper_region")
    with nullcontext() if region is None else annotate(*region):
        results = _experts(experts, routed.rows, routed.counts)
    if experts.has_post_expert_norm:
        results = experts.post_expert_norm(results)
    weighted = routed.unsort(results) * top_k_weights.reshape(-1, 1)
    mixed: Tensor = weighted.view(*top_k_index.shape, -1).sum(1)
    return mixed.to(hidden_states.dtype)


def _experts(self: _Experts, rows: Tensor, counts: Tensor) -> Tensor:
    first = self.gate_up_proj if self.has_gate else self.up_proj
    rows = _linear(self, rows, first, counts)
    if self.has_bias:
        rows = rows + _biases(
            rows, self.gate_up_proj_bias if self.has_gate else self.up_proj_bias, counts
        )
    rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    rows = _linear(self, rows, self.down_proj, counts)
    return rows + _biases(rows, self.down_proj_bias, counts) if self.has_bias else rows


def _linear(self: _Experts, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    return grouped_mm(rows, weights if self.is_transposed else weights.transpose(1, 2), counts)


def _biases(rows: Tensor, biases: Tensor, counts: Tensor) -> Tensor:
    """Each row's expert's bias."""
    return grouped_mm(torch.ones_like(rows[:, :1]), biases[:, None], counts)

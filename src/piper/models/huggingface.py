"""Hugging Face mixtures of experts (Qwen3-MoE, Mixtral and others), unmodified: their experts as
regions that ``Shard`` can share out.
"""

from typing import Protocol, cast

import torch
from torch import Tensor, nn

from piper.boundary import public
from piper.capture.annotate import annotate, check_tag
from piper.errors import ConfigError
from piper.models.routing import sort_by_expert
from piper.runtime.grouped import grouped_mm

IMPLEMENTATION = "piper"
"""Piper's name in transformers' registry of expert implementations."""


class _Experts(Protocol):
    """What transformers' ``use_experts_implementation`` gives an experts module."""

    piper_region: tuple[str, int]
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


@public
def annotate_experts(model: nn.Module, name: str = "EP") -> int:
    """Make the experts of each layer of a transformers model region *name*, numbered from 0, in the
    dropless form; their number.

    The router and the sum over a token's experts stay in the region around. The model then uses the
    implementation ``"piper"`` of transformers' ``ALL_EXPERTS_FUNCTIONS``, which computes the same
    as the others, in and outside of a capture.

    Raises :class:`ConfigError` for a model whose experts do not use that registry, or have a norm
    of their own.
    """
    check_tag(name, 0)
    found = [
        m for m in model.modules() if hasattr(m, "_apply_gate") and hasattr(m, "is_transposed")
    ]
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no experts that use transformers' registry of expert implementations; annotate its experts "
            "with piper.annotate_module"
        )
    for index, module in enumerate(found):
        if getattr(module, "has_post_expert_norm", False):
            raise ConfigError(
                f"the experts of {type(model).__name__} have a norm of their own, which piper's implementation does not have"
            )
        vars(module)["piper_region"] = (name, index)
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: PLC0415 (optional)

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)
    for module in found:
        module.config._experts_implementation = IMPLEMENTATION  # type: ignore[union-attr]  # noqa: SLF001 (where transformers looks)
    return len(found)


def _experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """``hidden_states[N, width]``, ``top_k_index[N, k]``, ``top_k_weights[N, k] -> [N, width]``."""
    experts = cast("_Experts", self)
    routed = sort_by_expert(hidden_states, top_k_index, experts.num_experts)
    name, index = experts.piper_region
    with annotate(name, index):
        results = _experts(experts, routed.rows, routed.counts)
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

"""A decoder with mixtures of experts, in the manner of Qwen3-MoE and DeepSeek: RMS norms, rotary
positions, token-choice top-k routing.
"""

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor, nn
from torch.nn import functional

from piper.boundary import public
from piper.capture.annotate import annotate
from piper.errors import ConfigError
from piper.models.routing import sort_by_expert
from piper.models.stages import require_layers, require_positive, stage_layers
from piper.runtime.grouped import grouped_mm


@public
@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Sizes of a ``MoE``.

    Each token goes to *experts_per_token* of *num_experts* experts of hidden width *expert_width*;
    beside them every token goes through a shared expert of width *shared_width* (0: none). The
    first *dense_layers* layers have an ordinary MLP of width *dense_width*. With *capacity_factor*
    f each expert takes at most f·k/E of the microbatch's tokens, in their order, and further ones
    pass by it; ``None`` is dropless. *balance_weight* and *z_weight* weigh the auxiliary losses:
    load balancing (Switch Transformer) and the router's squared log-partition (ST-MoE). With
    *count_tokens* a buffer counts each expert's tokens.
    """

    vocab_size: int = 256
    width: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_experts: int = 8
    experts_per_token: int = 2
    expert_width: int = 128
    shared_width: int = 0
    dense_layers: int = 0
    dense_width: int = 256
    capacity_factor: float | None = None
    balance_weight: float = 0.01
    z_weight: float = 0.001
    count_tokens: bool = False
    num_stages: int = 1

    def __post_init__(self) -> None:
        require_positive(
            "MoEConfig",
            vocab_size=self.vocab_size,
            width=self.width,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            expert_width=self.expert_width,
            dense_width=self.dense_width,
            num_stages=self.num_stages,
        )
        require_layers(self.num_layers, self.num_stages)
        if self.width % (2 * self.num_heads):
            raise ConfigError(
                f"MoEConfig.width: expected a multiple of 2*num_heads={2 * self.num_heads}, found {self.width}"
            )
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"MoEConfig.experts_per_token: expected at most num_experts={self.num_experts}, found {self.experts_per_token}"
            )
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ConfigError(
                f"MoEConfig.capacity_factor: expected a positive number or None, found {self.capacity_factor}"
            )


class Experts(nn.Module):
    """The experts' weights, SwiGLU: ``x[E, C, width]``, or rows ``[N, width]`` sorted by expert
    with counts ``[E]``, to the same shape.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        experts, width, hidden = config.num_experts, config.width, config.expert_width
        self.up = nn.Parameter(torch.empty(experts, width, 2 * hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))
        nn.init.normal_(self.up, std=width**-0.5)
        nn.init.normal_(self.down, std=hidden**-0.5)

    def forward(self, x: Tensor, counts: Tensor | None = None) -> Tensor:
        """Each expert's tokens through its own layers."""
        gate, up = self._times(x, self.up, counts).chunk(2, dim=-1)
        return self._times(functional.silu(gate) * up, self.down, counts)

    @staticmethod
    def _times(x: Tensor, weights: Tensor, counts: Tensor | None) -> Tensor:
        return torch.bmm(x, weights) if counts is None else grouped_mm(x, weights, counts)


class Mixture(nn.Module):
    """Router, experts and shared expert of layer *layer*: ``[B, T, width]`` to the same and the
    layer's auxiliary loss.

    The experts are region ``EP`` number *layer*; the rest belongs to the region around.
    """

    def __init__(self, config: MoEConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.router = nn.Linear(config.width, config.num_experts, bias=False)
        self.experts = Experts(config)
        self.shared = SwiGLU(config.width, config.shared_width) if config.shared_width else None
        self.expert_tokens: Tensor | None
        counted = torch.zeros(config.num_experts, dtype=torch.int64)
        self.register_buffer("expert_tokens", counted if config.count_tokens else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Route, let the experts work, put the results together."""
        tokens = x.flatten(0, 1)
        logits = self.router(tokens)
        probabilities = logits.softmax(-1)
        weights, chosen = probabilities.topk(self.config.experts_per_token, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        counts = self._hits(chosen.flatten()).sum(0)
        if self.expert_tokens is not None and self.training:
            self.expert_tokens.add_(counts)
        work = self._dropless if self.config.capacity_factor is None else self._capacity
        mixed = work(tokens, chosen).view(*chosen.shape, -1)
        out = (mixed * weights[..., None]).sum(1)
        if self.shared is not None:
            out = out + self.shared(tokens)
        return out.view_as(x), self._auxiliary(logits, probabilities, counts)

    def _dropless(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """The experts' results ``[N·k, width]`` for all choices, in their order."""
        routed = sort_by_expert(tokens, chosen, self.config.num_experts)
        with annotate("EP", self.layer):
            results = self.experts(routed.rows, routed.counts)
        return routed.unsort(results)

    def _capacity(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """The same; zeros for choices that find their expert full."""
        config = self.config
        number, experts, width = tokens.shape[0], config.num_experts, tokens.shape[1]
        factor = Fraction(config.capacity_factor or 1.0).limit_denominator(1000)
        up, down = factor.numerator * config.experts_per_token, factor.denominator * experts
        capacity = (number * up + down - 1) // down
        flat = chosen.flatten()
        hits = self._hits(flat)
        place = (hits.cumsum(0) * hits).sum(-1) - 1
        slots = experts * capacity
        slot = torch.where(place < capacity, flat * capacity + place, slots)
        choices = torch.arange(flat.shape[0], device=tokens.device)
        table = choices.new_full((slots + 1,), number)
        table = table.scatter(0, slot, choices // config.experts_per_token)
        nothing = tokens.new_zeros(1, width)
        x = torch.cat([tokens, nothing])[table[:-1]].view(experts, capacity, width)
        with annotate("EP", self.layer):
            x = self.experts(x)
        return torch.cat([x.reshape(slots, width), nothing])[slot]

    def _hits(self, chosen: Tensor) -> Tensor:
        """``[N·k, E]``: 1 where a choice is that expert."""
        experts = torch.arange(self.config.num_experts, device=chosen.device)
        return (chosen[:, None] == experts).long()

    def _auxiliary(self, logits: Tensor, probabilities: Tensor, counts: Tensor) -> Tensor:
        config = self.config
        share = counts / (logits.shape[0] * config.experts_per_token)
        balance = config.num_experts * (share * probabilities.mean(0)).sum()
        z = logits.logsumexp(-1).square().mean()
        return config.balance_weight * balance + config.z_weight * z


class SwiGLU(nn.Module):
    """``[…, width] -> […, width]``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Gate, multiply, project back."""
        gate, up = self.up(x).chunk(2, dim=-1)
        out: Tensor = self.down(functional.silu(gate) * up)
        return out


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions, ``[B, T, width] -> [B, T,
    width]``.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from each position to itself and the ones before it."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        mixed = functional.scaled_dot_product_attention(
            rotated(query), rotated(key), value, is_causal=True
        )
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


def rotated(x: Tensor) -> Tensor:
    """Rotary position embedding of ``[B, heads, T, size]`` (Su et al., 2021), base 10000."""
    half = x.shape[-1] // 2
    rates = torch.arange(half, device=x.device, dtype=x.dtype) / half
    positions = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)
    angles = positions[:, None] * 10000.0**-rates
    a, b = x[..., :half], x[..., half:]
    return torch.cat(
        [a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1
    )


class Block(nn.Module):
    """Attention, then a mixture of experts or an MLP, each normalised before and added to the
    residual stream.
    """

    def __init__(self, config: MoEConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-6)
        dense = layer < config.dense_layers
        self.mlp = SwiGLU(config.width, config.dense_width) if dense else Mixture(config, layer)

    def forward(self, x: Tensor, auxiliary: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, T, width]`` and the sum of the auxiliary losses so far."""
        x = x + self.attention(self.attention_norm(x))
        if isinstance(self.mlp, Mixture):
            out, loss = self.mlp(self.mlp_norm(x))
            return x + out, auxiliary + loss
        return x + self.mlp(self.mlp_norm(x)), auxiliary


class MoE(nn.Module):
    """Token ids ``[B, T]`` (int64) to logits ``[B, T, vocab_size]`` and the auxiliary losses' sum
    (a scalar).

    Region ``PP`` has *num_stages* indices; the embedding belongs to the first, the head to the
    last. The experts of layer i are region ``EP`` number i, inside it.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.stages = stage_layers(config.num_layers, config.num_stages)
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the next token at every position, and the auxiliary losses' sum."""
        last = len(self.stages) - 1
        for stage, layers in enumerate(self.stages):
            with annotate("PP", stage):
                if stage == 0:
                    x = self.embedding(ids)
                    auxiliary = x.new_zeros(())
                for layer in layers:
                    x, auxiliary = self.blocks[layer](x, auxiliary)
                if stage == last:
                    x = self.head(self.norm(x))
        return x, auxiliary


def moe_loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per token of logits ``[B, T, V]`` for int64 targets ``[B, T]``,
    plus the auxiliary losses.
    """
    logits, auxiliary = outputs
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) + auxiliary

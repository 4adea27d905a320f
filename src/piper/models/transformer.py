"""A decoder-only transformer in the manner of GPT-2: pre-norm, learned positions, causal
attention.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from piper.boundary import public
from piper.capture.annotate import annotate
from piper.errors import ConfigError
from piper.models.stages import require_layers, require_positive, require_probability, stage_layers


@public
@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """Sizes of a ``Transformer``.

    *context* is the longest sequence in tokens; *mlp_ratio* the hidden width of a block's MLP in
    units of *width*; *dropout* applies to the embedding and to both residual branches. With
    *tied_embedding* the head is the token embedding, so the first and the last stage share one
    parameter.
    """

    vocab_size: int = 256
    context: int = 128
    width: int = 128
    num_layers: int = 4
    num_heads: int = 4
    mlp_ratio: int = 4
    dropout: float = 0.0
    tied_embedding: bool = False
    num_stages: int = 1

    def __post_init__(self) -> None:
        require_positive(
            "TransformerConfig",
            vocab_size=self.vocab_size,
            context=self.context,
            width=self.width,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            mlp_ratio=self.mlp_ratio,
            num_stages=self.num_stages,
        )
        require_layers(self.num_layers, self.num_stages)
        require_probability("TransformerConfig", "dropout", self.dropout)
        if self.width % self.num_heads:
            raise ConfigError(
                f"TransformerConfig.width: expected a multiple of num_heads={self.num_heads}, "
                f"found {self.width}"
            )


class Attention(nn.Module):
    """Causal multi-head self-attention, ``[B, T, width] -> [B, T, width]``."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from each position to itself and the ones before it."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class Block(nn.Module):
    """Attention, then an MLP, each normalised before and added to the residual stream."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, config.mlp_ratio * config.width)
        self.down = nn.Linear(config.mlp_ratio * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, width] -> [B, T, width]``."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        hidden = functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
        out: Tensor = x + self.dropout(self.down(hidden))
        return out


class Transformer(nn.Module):
    """Token ids ``[B, T]`` (int64, T <= context) to logits ``[B, T, vocab_size]``.

    Region ``PP`` has *num_stages* indices; the embedding belongs to the first, the head to the
    last.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.stages = stage_layers(config.num_layers, config.num_stages)
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self._initialise()
        if config.tied_embedding:
            self.head.weight = self.token_embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token at every position.

        Raises:
            ConfigError: the sequence is longer than the model's context.
        """
        length = ids.shape[1]
        if length > self.config.context:
            raise ConfigError(
                f"Transformer: expected at most {self.config.context} tokens, found {length}; "
                f"increase TransformerConfig.context to {length} or more"
            )
        x = ids
        last = len(self.stages) - 1
        for stage, layers in enumerate(self.stages):
            with annotate("PP", stage):
                if stage == 0:
                    x = self._embed(ids)
                for layer in layers:
                    x = self.blocks[layer](x)
                if stage == last:
                    x = self.head(self.norm(x))
        return x

    def _embed(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.token_embedding(ids) + self.position_embedding(positions)
        out: Tensor = self.dropout(x)
        return out

    def _initialise(self) -> None:
        """GPT-2's: normal with 0.02, the two projections into the residual stream by 1/sqrt(2
        L).
        """
        into_residual = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = into_residual if name.endswith(("attention.out", "down")) else 0.02
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)


def transformer_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per token: logits ``[B, T, V]``, int64 targets ``[B, T]``.

    Every token counts, so this is also the mean over samples; it is not meant for padded targets.
    """
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


@torch.no_grad()
def generate(
    model: Transformer,
    prompt: bytes,
    n: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> bytes:
    """Sample *n* bytes that continue *prompt*, in evaluation mode on the model's own device.

    Temperature 0 takes the most likely byte each time. Only the last *context* bytes are seen.

    Raises:
        ConfigError: the prompt is empty, the temperature negative, or the vocabulary not of 256
            bytes.
    """
    if not prompt:
        raise ConfigError("generate: expected a prompt of at least one byte, found none")
    if temperature < 0.0:
        raise ConfigError(f"generate: expected temperature >= 0, found {temperature}")
    if model.config.vocab_size != 256:
        raise ConfigError(
            f"generate: expected a byte vocabulary of 256, found {model.config.vocab_size}"
        )
    was_training = model.training
    device = model.token_embedding.weight.device
    ids = torch.tensor([list(prompt)], dtype=torch.int64, device=device)
    model.eval()
    try:
        for _ in range(n):
            logits = model(ids[:, -model.config.context :])[0, -1]
            ids = torch.cat([ids, _pick(logits, temperature, generator).view(1, 1)], dim=1)
    finally:
        model.train(was_training)
    return bytes(ids[0, len(prompt) :].tolist())


def _pick(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """One token id (int64, shape ``[1]``) from the logits ``[V]`` of one position."""
    if temperature == 0.0:
        return logits.argmax(-1, keepdim=True)
    weights = torch.softmax(logits / temperature, dim=-1)
    return torch.multinomial(weights, 1, generator=generator)

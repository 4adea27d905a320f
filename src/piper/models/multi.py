"""A model with several inputs and outputs per stage, differentiable or not.

Across its boundaries go a float activation, int64 ids, a bool mask and a float table without a
gradient, all computed in the first stage and read by every later one; besides them an auxiliary
activation that only the last stage reads. Every stage reads the inputs ``mask`` and ``gain``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from piper.boundary import public
from piper.capture.annotate import annotate
from piper.models.stages import require_positive


@public
@dataclass(frozen=True, slots=True, kw_only=True)
class MultiConfig:
    """Sizes of a ``Multi``; *num_routes* is how many rows of its table a stage chooses among."""

    vocab_size: int = 16
    width: int = 8
    num_routes: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        require_positive(
            "MultiConfig",
            vocab_size=self.vocab_size,
            width=self.width,
            num_routes=self.num_routes,
            num_stages=self.num_stages,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """What the first stage hands to all others.

    ``auxiliary [B, T, width]`` carries a gradient; ``routes [B, T]`` int64, ``active [B, T]`` bool
    and ``table [B, 1, width]`` do not.
    """

    auxiliary: Tensor
    routes: Tensor
    active: Tensor
    table: Tensor


class Entry(nn.Module):
    """The first stage's own part: ids ``[B, T]`` to the activation and the ``Signals``."""

    def __init__(self, config: MultiConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.router = nn.Linear(config.width, config.num_routes)
        self.auxiliary = nn.Linear(config.width, config.width)

    def forward(self, ids: Tensor) -> tuple[Tensor, Signals]:
        """Embed the ids and derive from the embedding what the later stages read."""
        h = self.embedding(ids)
        scores = self.router(h)
        signals = Signals(
            auxiliary=torch.tanh(self.auxiliary(h)),
            routes=scores.argmax(-1),
            active=scores.detach().sum(-1) > 0,
            table=torch.sin(h.detach().mean(1, keepdim=True)),
        )
        confidence = scores.softmax(-1).amax(-1, keepdim=True)
        return h * confidence, signals


class Layer(nn.Module):
    """One stage's layer; positions that are masked or not active pass through unchanged."""

    def __init__(self, config: MultiConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.width, config.width)
        self.route_table = nn.Embedding(config.num_routes, config.width)

    def forward(self, h: Tensor, signals: Signals, mask: Tensor, gain: float) -> Tensor:
        """``[B, T, width] -> [B, T, width]``."""
        update = functional.gelu(self.linear(h + signals.table))
        update = update + gain * self.route_table(signals.routes)
        used = (mask & signals.active).unsqueeze(-1)
        return h + torch.where(used, update, torch.zeros_like(update))


class Multi(nn.Module):
    """Ids ``[B, T]`` int64 and a mask ``[B, T]`` bool to ``(logits [B, T, V], score [B])``."""

    def __init__(self, config: MultiConfig) -> None:
        super().__init__()
        self.config = config
        self.entry = Entry(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_stages))
        self.head = nn.Linear(config.width, config.vocab_size)
        self.score = nn.Linear(config.width, 1)

    def forward(self, ids: Tensor, mask: Tensor, *, gain: float = 1.0) -> tuple[Tensor, Tensor]:
        """Predict a token per position and one score per sample."""
        with annotate("PP", 0):
            h, signals = self.entry(ids)
            h = self.layers[0](h, signals, mask, gain)
            if self.config.num_stages == 1:
                return self._outputs(h, signals)
        for stage in range(1, self.config.num_stages - 1):
            with annotate("PP", stage):
                h = self.layers[stage](h, signals, mask, gain)
        with annotate("PP", self.config.num_stages - 1):
            h = self.layers[-1](h, signals, mask, gain)
            return self._outputs(h, signals)

    def _outputs(self, h: Tensor, signals: Signals) -> tuple[Tensor, Tensor]:
        logits = self.head(h)
        score = self.score((h * signals.auxiliary).mean(1)).squeeze(-1)
        return logits, score


def multi_loss(outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy of the tokens plus squared error of the scores, each a mean over samples.

    Targets: ``(labels [B, T] int64, scores [B])``.
    """
    logits, score = outputs
    labels, wanted = targets
    tokens = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return tokens + functional.mse_loss(score, wanted)

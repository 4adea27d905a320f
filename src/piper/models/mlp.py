"""A multilayer perceptron, the smallest model with pipeline stages."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from piper.boundary import public
from piper.capture.annotate import annotate
from piper.models.stages import require_layers, require_positive, require_probability, stage_layers


@public
@dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig:
    """Sizes of an ``MLP``; *num_layers* counts every linear layer."""

    in_features: int = 8
    width: int = 16
    out_features: int = 4
    num_layers: int = 4
    dropout: float = 0.0
    num_stages: int = 1

    def __post_init__(self) -> None:
        require_positive(
            "MLPConfig",
            in_features=self.in_features,
            width=self.width,
            out_features=self.out_features,
            num_layers=self.num_layers,
            num_stages=self.num_stages,
        )
        require_layers(self.num_layers, self.num_stages)
        require_probability("MLPConfig", "dropout", self.dropout)


class MLP(nn.Module):
    """``[B, in_features] -> [B, out_features]``: linear layers with GELU and dropout in between."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.config = config
        self.stages = stage_layers(config.num_layers, config.num_stages)
        hidden = [config.width] * (config.num_layers - 1)
        sizes = [config.in_features, *hidden, config.out_features]
        self.layers = nn.ModuleList(
            nn.Linear(sizes[layer], sizes[layer + 1]) for layer in range(config.num_layers)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map a batch ``[B, in_features]`` to ``[B, out_features]``."""
        last = self.config.num_layers - 1
        for stage, layers in enumerate(self.stages):
            with annotate("PP", stage):
                for layer in layers:
                    x = self.layers[layer](x)
                    if layer != last:
                        x = self.dropout(functional.gelu(x))
        return x


def mlp_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error over samples and features, both ``[B, out_features]``."""
    return functional.mse_loss(outputs, targets)

"""A convolutional U-Net: stage i hands its activation to stage num_stages - 1 - i.

Over four stages the skips go 0 → 3 and 1 → 2, across boundaries that the stages between do not use.
Source of the shape: Ronneberger et al., *U-Net*, arXiv 1505.04597.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from piper.boundary import public
from piper.capture.annotate import annotate
from piper.errors import ConfigError
from piper.models.stages import require_positive


@public
@dataclass(frozen=True, slots=True, kw_only=True)
class UNetConfig:
    """Sizes of a ``UNet`` on square images; each level down halves the side."""

    channels: int = 3
    width: int = 8
    image_size: int = 8
    num_stages: int = 4

    def __post_init__(self) -> None:
        require_positive(
            "UNetConfig",
            channels=self.channels,
            width=self.width,
            image_size=self.image_size,
            num_stages=self.num_stages,
        )
        multiple = 2 ** self.level((self.num_stages - 1) // 2)
        if self.image_size % multiple:
            raise ConfigError(
                f"UNetConfig.image_size: expected a multiple of {multiple} for "
                f"{self.num_stages} stages, found {self.image_size}"
            )

    def level(self, stage: int) -> int:
        """How often the image has been halved in *stage*: 0, 1, 1, 0 for four stages."""
        return min(stage, self.num_stages - 1 - stage)

    def skip_source(self, stage: int) -> int | None:
        """The earlier stage whose activation *stage* also reads, if there is one."""
        source = self.num_stages - 1 - stage
        return source if source < stage else None


class UNet(nn.Module):
    """Images ``[B, channels, S, S]`` to images of the same shape; one convolution per stage."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = nn.Conv2d(config.channels, config.width, kernel_size=1)
        self.convs = nn.ModuleList(self._conv(stage) for stage in range(config.num_stages))
        self.head = nn.Conv2d(config.width, config.channels, kernel_size=1)

    def forward(self, images: Tensor) -> Tensor:
        """Predict an image from an image; region ``PP`` has one index per stage."""
        x = images
        outputs: list[Tensor] = []
        for stage, conv in enumerate(self.convs):
            with annotate("PP", stage):
                if stage == 0:
                    x = self.stem(x)
                x = self._resize(x, stage)
                source = self.config.skip_source(stage)
                if source is not None:
                    x = torch.cat([x, outputs[source]], dim=1)
                x = functional.silu(conv(x))
                outputs.append(x)
                if stage == self.config.num_stages - 1:
                    x = self.head(x)
        return x

    def _conv(self, stage: int) -> nn.Conv2d:
        width = self.config.width
        inputs = width if self.config.skip_source(stage) is None else 2 * width
        return nn.Conv2d(inputs, width, kernel_size=3, padding=1)

    def _resize(self, x: Tensor, stage: int) -> Tensor:
        """Bring the previous stage's output to this stage's level."""
        if stage == 0:
            return x
        step = self.config.level(stage) - self.config.level(stage - 1)
        if step > 0:
            return functional.avg_pool2d(x, 2)
        if step < 0:
            return functional.interpolate(x, scale_factor=2.0, mode="nearest")
        return x


def unet_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error over samples and pixels, both ``[B, channels, S, S]``."""
    return functional.mse_loss(outputs, targets)

"""Small annotated models for examples, tests and benchmarks.

Each file holds one: ``XConfig``, the module ``X`` and ``x_loss(outputs, targets)``. Region ``PP``
with index ``s`` is pipeline stage ``s``; without a capture the annotations do nothing.
"""

from importlib import import_module

from piper.models.mlp import MLP, MLPConfig, mlp_loss
from piper.models.moe import MoE, MoEConfig, moe_loss
from piper.models.multi import Multi, MultiConfig, multi_loss
from piper.models.transformer import Transformer, TransformerConfig, generate, transformer_loss
from piper.models.unet import UNet, UNetConfig, unet_loss

__all__ = [
    "MLP",
    "MLPConfig",
    "MoE",
    "MoEConfig",
    "Multi",
    "MultiConfig",
    "Transformer",
    "TransformerConfig",
    "UNet",
    "UNetConfig",
    "generate",
    "mlp_loss",
    "moe_loss",
    "multi_loss",
    "transformer_loss",
    "unet_loss",
]


def __getattr__(name: str) -> object:
    """:mod:`piper.models.huggingface`, which is imported when it is asked for."""
    if name == "huggingface":
        return import_module("piper.models.huggingface")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "huggingface"})

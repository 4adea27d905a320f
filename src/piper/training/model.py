"""The model that a configuration describes."""

import torch

from piper.models.transformer import Transformer
from piper.training.config import RunConfig


def make_model(config: RunConfig) -> Transformer:
    """The model with its initial weights, which depend on ``train.seed`` and the sizes alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        return Transformer(config.transformer())


def make_skeleton(config: RunConfig) -> Transformer:
    """The model without weights, on the meta device: enough for planning."""
    with torch.device("meta"):
        return Transformer(config.transformer())

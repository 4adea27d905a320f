"""``piper check``: does the configured strategy compute what one process computes?"""

from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from piper.api.check import check as check_strategy
from piper.models.transformer import transformer_loss
from piper.training.config import load_config
from piper.training.data import VOCAB_SIZE
from piper.training.model import make_model

MAX_SEQ_LEN = 16
"""Sequences are cut to this many bytes: equality does not depend on their length, time does."""


def check(path: Path, console: Console) -> bool:
    """Print the comparison for the configuration at *path*; true if all errors are within the
    tolerance.

    The batch has the configured number of sequences, of random bytes. Raises what
    :func:`piper.check` raises.
    """
    config = load_config(path)
    rows, length = config.train.batch_size, min(MAX_SEQ_LEN, config.train.seq_len)
    generator = torch.Generator().manual_seed(config.train.seed)

    def batch(_step: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(VOCAB_SIZE, (rows, length + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    batches = [batch(step) for step in range(2)]
    console.print(Text(f"{rows} sequences of {length} random bytes a step", style="dim"))
    report = check_strategy(
        make_model(config),
        transformer_loss,
        config.strategy.directives(),
        batches.__getitem__,
        optimizer=config.optimizer.build,
        lr_schedule=config.train.warmup(),
        steps=len(batches),
        seed=config.train.seed,
        max_grad_norm=config.train.max_grad_norm,
        precision=config.train.policy(),
        compile=config.train.compile,
    )
    console.print(report)
    return report.ok

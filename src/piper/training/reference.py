"""The same training in one process: plain PyTorch, every batch in one piece, nothing of piper but
the model and the data.
"""

from collections.abc import Iterator

import torch

from piper.models.transformer import transformer_loss
from piper.training.config import RunConfig
from piper.training.model import make_model


def reference_losses(config: RunConfig, steps: int) -> Iterator[float]:
    """The losses (nats per token) of the first *steps* steps of *config*'s run, one at a time."""
    data, schedule = config.batches(), config.train.warmup()
    model = make_model(config)
    optimizer = config.optimizer.build(model.parameters())
    rate = config.optimizer.lr
    for step in range(steps):
        inputs, targets = data(step)
        for group in optimizer.param_groups:
            group["lr"] = rate * (schedule(step) if schedule else 1.0)
        loss = transformer_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        if config.train.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm)
        optimizer.step()
        yield loss.item()

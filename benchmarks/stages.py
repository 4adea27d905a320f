"""The example transformer, cut into stages by hand as torch's pipelining wants it."""

import torch

from piper.models.transformer import Transformer


class Stage(torch.nn.Module):
    """Stage *stage* of *num_stages* of *model*, which is taken apart: its parameters are the
    stage's.

    ``names`` has the model's name of each of the stage's own.
    """

    def __init__(self, model: Transformer, stage: int, num_stages: int) -> None:
        super().__init__()
        known = {id(parameter): name for name, parameter in model.named_parameters()}
        self.model = model
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        model.blocks = torch.nn.ModuleList(model.blocks[i] for i in model.stages[stage])
        if not self.is_first:
            del model.token_embedding, model.position_embedding
        if not self.is_last:
            del model.norm, model.head
        self.names = {name: known[id(parameter)] for name, parameter in self.named_parameters()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            x = self.model._embed(x)  # noqa: SLF001 (what the model's own forward does)
        for block in self.model.blocks:
            x = block(x)
        if self.is_last:
            x = self.model.head(self.model.norm(x))
        return x

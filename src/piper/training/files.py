"""The files that a run writes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from piper.directives.base import Directive
from piper.directives.strategy import dump_strategy
from piper.errors import ConfigError
from piper.plan.codec import save_plan
from piper.plan.model import Plan
from piper.training.checkpoint import (
    FOLDER,
)


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of a run in its folder."""

    folder: Path

    @property
    def metrics(self) -> Path:
        """A JSON object per step and evaluation."""
        return self.folder / "metrics.jsonl"

    @property
    def model(self) -> Path:
        """The trained parameters and buffers."""
        return self.folder / "model.safetensors"

    @property
    def strategy(self) -> Path:
        """The directives."""
        return self.folder / "strategy.json"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / FOLDER

    @property
    def plan(self) -> Path:
        """The folder of the plan's files."""
        return self.folder / "plan"

    def clear(self) -> None:
        """Remove what an earlier run wrote, but for its metrics and checkpoints, so that no file of
        it is taken for this one's.

        Raises :class:`ConfigError` when the folder cannot be written.
        """
        try:
            self.plan.mkdir(parents=True, exist_ok=True)
            old = (self.plan / "manifest.json", *self.plan.glob("device-*.json"))
            for path in (self.model, self.strategy, *old):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{self.folder}: expected a folder that can be written: {error.strerror}; choose another out_dir"
            ) from error

    def write_strategy(self, directives: Sequence[Directive], plan: Plan) -> None:
        """Write the strategy and the plan that was made of it."""
        dump_strategy(directives, self.strategy)
        save_plan(plan, self.plan)

    def write_model(self, state: dict[str, torch.Tensor]) -> None:
        """Write the model's state; each name gets a tensor of its own, since the format knows no
        sharing.
        """
        save_file({name: t.clone().contiguous() for name, t in state.items()}, self.model)

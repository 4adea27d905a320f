"""What varies from step to step: the batch, the step's number, what was reported."""

from dataclasses import dataclass, field

import torch

from piper.ir.dag import BatchLeaf
from piper.plan.model import Plan
from piper.runtime.batch import microbatch_rows


@dataclass(slots=True)
class Context:
    """What varies from step to step. Implements :class:`~piper.ops.base.StepContext`."""

    plan: Plan
    device: torch.device
    step: int = 0
    seed: int = 0
    loss_scale: float = 1.0
    leaves: dict[str, object] = field(default_factory=dict)
    values: dict[str, dict[int, torch.Tensor | float]] = field(default_factory=dict)
    by_index: dict[int, BatchLeaf] = field(init=False)

    def __post_init__(self) -> None:
        self.by_index = {leaf.index: leaf for leaf in self.plan.dag.batch}

    def batch_leaf(self, index: int, microbatch: int) -> torch.Tensor:
        """The rows of a global microbatch, on the device, contiguous."""
        plan = self.plan
        leaf = self.by_index[index]
        tensor = self.leaves[leaf.name]
        assert isinstance(tensor, torch.Tensor), f"batch leaf {leaf.name!r} is not a tensor"
        count = plan.num_microbatches * plan.num_replicas
        return microbatch_rows(leaf, tensor, microbatch, count).to(self.device).contiguous()

    def report(self, name: str, microbatch: int, value: torch.Tensor) -> None:
        """Keep a scalar for the driver; on an accelerator without waiting for it."""
        on_host = value.device.type == "cpu"
        self.values.setdefault(name, {})[microbatch] = value.item() if on_host else value.clone()

    def take(self) -> dict[str, dict[int, float]]:
        """The reported scalars as numbers."""
        values, self.values = self.values, {}
        return {n: {m: float(v) for m, v in by.items()} for n, by in values.items()}

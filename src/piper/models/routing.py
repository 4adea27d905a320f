"""Token-choice routing without drops: each token's choices, sorted by expert."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sorted:
    """Rows ``[N·k, width]``, one per choice, sorted by expert; ``counts[E]`` of each expert's rows;
    ``order[N·k]``: which choice each row is.
    """

    rows: Tensor
    counts: Tensor
    order: Tensor

    def unsort(self, results: Tensor) -> Tensor:
        """The rows' results in the order of the choices."""
        return results[self.order.argsort()]


def sort_by_expert(tokens: Tensor, chosen: Tensor, num_experts: int) -> Sorted:
    """Sort the choices ``chosen[N, k]`` (int64, experts' numbers) of ``tokens[N, width]``; of one
    expert's, the first token comes first.
    """
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    counts = (flat[:, None] == torch.arange(num_experts, device=flat.device)).sum(0)
    return Sorted(tokens[order // chosen.shape[-1]], counts, order)

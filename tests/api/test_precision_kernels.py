"""Under a policy the single process calls the kernels of the graph: then equal is equal, also where
a kernel rounds more than once.
"""

import pytest
import torch
from tests.cases.equal import randn, sgd
from torch import nn
from torch.nn import functional

import piper


class Rounding(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.kind == "dropout":
            x = functional.dropout(x, 0.1, self.training)
        elif self.kind == "attention dropout":
            x = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        elif self.kind == "layer norm":
            x = self.norm(x)
        return self.last(x)


@pytest.mark.parametrize(
    ("kind", "threads"), [("dropout", 1), ("attention dropout", 1), ("layer norm", 3)]
)
def test_bfloat16_is_equal_whatever_the_threads(kind, threads):
    """Torch's tracer makes another operator of a dropout, which rounds otherwise; the backward of a
    layer norm adds up one rounded part per thread.
    """
    torch.manual_seed(0)
    batch = randn(8, 5, 8).float(), randn(8, 5, 8, seed=1).float()
    strategy = [piper.Place({}, [0, 1]), piper.Replicate({}), piper.Split({}, num_microbatches=2)]
    report = piper.check(
        Rounding(kind),
        functional.mse_loss,
        strategy,
        batch,
        optimizer=sgd,
        precision="bf16",
        backend=piper.backends.InProcessBackend(threads=threads),
    )
    assert report.max_loss_error == 0
    assert report.ok, str(report)

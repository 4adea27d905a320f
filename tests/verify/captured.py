"""Captured models with strategies, for what hand-made DAGs do not have: real bodies, integers,
saved activations.
"""

from collections.abc import Callable
from functools import cache

import torch
from tests.equality.expert_matrix import VOCABULARY, Stack
from tests.support.zero_bubble import zb_h1
from tests.verify.execution import STEPS, Training, hand_made
from tests.verify.plans import CASES, both_ways, hybrid, interleaved, pipeline
from torch import nn
from torch.nn import functional

from piper.capture import annotate, capture_with_constants
from piper.directives.offload import Offload
from piper.directives.order import Order
from piper.directives.place import Place
from piper.directives.replicate import Replicate
from piper.directives.shard import Shard
from piper.directives.split import Split
from piper.directives.strategy import Strategy
from piper.models import (
    Multi,
    MultiConfig,
    Transformer,
    TransformerConfig,
    UNet,
    UNetConfig,
    moe_loss,
    multi_loss,
    transformer_loss,
    unet_loss,
)
from piper.runtime.batch import Batch
from piper.schedules import placements

ROWS = 8


def _training(model: nn.Module, loss, batch: Callable[[], Batch]) -> Training:
    model = model.double()
    data = [batch() for _ in range(STEPS)]
    captured = capture_with_constants(model, loss, data[0])
    weights = dict(model.named_parameters()) | dict(model.named_buffers())
    weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
    return Training(captured.dag, weights, data, captured.constants, model, loss)


def _transformer(*, tied: bool, stages: int, dropout: float = 0.0) -> Training:
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=11,
        context=5,
        width=8,
        num_layers=stages,
        num_heads=2,
        num_stages=stages,
        tied_embedding=tied,
        dropout=dropout,
    )
    ids = lambda: torch.randint(0, 11, (ROWS, 5))  # noqa: E731
    return _training(Transformer(config), transformer_loss, lambda: (ids(), ids()))


def _unet() -> Training:
    torch.manual_seed(0)
    image = lambda: torch.rand(ROWS, 3, 4, 4, dtype=torch.float64)  # noqa: E731
    return _training(UNet(UNetConfig(width=4, image_size=4)), unet_loss, lambda: (image(), image()))


class _Norms(nn.Module):
    """Two stages with BatchNorm, whose running statistics are buffers that the forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 3)

    def forward(self, x):
        with annotate("PP", 0):
            x = functional.relu(self.norm(self.first(x)))
        with annotate("PP", 1):
            return self.second(x)


def _by_valid_rows(outputs, targets):
    valid = targets >= 0
    loss = functional.cross_entropy(outputs, targets, ignore_index=-1, reduction="sum")
    return loss, valid.sum()


def _weighted() -> Training:
    torch.manual_seed(0)

    def batch() -> Batch:
        return torch.rand(ROWS, 4, dtype=torch.float64), torch.randint(-1, 3, (ROWS,))

    return _training(_Norms().eval(), _by_valid_rows, batch)


def _norms() -> Training:
    torch.manual_seed(0)

    def batch() -> Batch:
        return torch.rand(ROWS, 4, dtype=torch.float64), torch.randint(0, 3, (ROWS,))

    return _training(_Norms(), functional.cross_entropy, batch)


def _multi() -> Training:
    torch.manual_seed(0)

    def batch() -> Batch:
        ids, labels = (torch.randint(0, 16, (ROWS, 5)) for _ in range(2))
        mask = torch.rand(ROWS, 5) < 0.7
        return (ids, mask), (labels, torch.rand(ROWS, dtype=torch.float64))

    return _training(Multi(MultiConfig()), multi_loss, batch)


@cache
def _experts(form: str) -> Training:
    torch.manual_seed(0)
    ids = lambda: torch.randint(0, VOCABULARY, (ROWS, 3))  # noqa: E731
    return _training(Stack(1, form), moe_loss, lambda: (ids(), ids()))


def _shared(*groups: list[int], microbatches: int, **replicate) -> Strategy:
    """All on the devices of *groups*, each of which shares the experts."""
    return [
        Place({}, [d for group in groups for d in group]),
        Replicate({}, bucket_size=1e-4, **replicate),
        Shard({"EP": 0}, list(groups)),
        Split({}, num_microbatches=microbatches),
    ]


def _apart(dense: list[int], experts: list[int], **replicate) -> Strategy:
    """The experts on devices of their own, of which some are the others' too."""
    return [
        Place({"EP": None}, dense),
        Replicate({}, bucket_size=1e-4, **replicate),
        Shard({"EP": 0}, experts),
        Split({}, num_microbatches=2),
    ]


CAPTURED: dict[str, Callable[[], tuple[Training, Strategy]]] = {
    "tied transformer, 1f1b": lambda: (_transformer(tied=True, stages=2), pipeline(2)),
    "tied transformer, 1f1b × dp": lambda: (
        _transformer(tied=True, stages=2),
        pipeline(2, replicas=2, microbatches=2),
    ),
    "tied transformer, half backwards": lambda: (
        _transformer(tied=True, stages=2),
        [*placements.chain([[0], [1]]), Split({}, num_microbatches=4), *zb_h1(2, 4)],
    ),
    "transformer, half backwards, zero 3": lambda: (
        _transformer(tied=False, stages=2),
        [
            *(
                d
                for d in pipeline(
                    2, replicas=2, microbatches=2, shard_params=True, bucket_size=2e-3
                )
                if not isinstance(d, Order)
            ),
            *zb_h1(2, 2),
        ],
    ),
    "tied transformer, zero 1": lambda: (
        _transformer(tied=True, stages=2),
        pipeline(2, replicas=2, microbatches=2, shard_optimizer=True, bucket_size=2e-3),
    ),
    "transformer, zero 2": lambda: (
        _transformer(tied=False, stages=2),
        pipeline(2, replicas=2, microbatches=2, shard_grads=True, bucket_size=2e-3),
    ),
    "tied transformer, zero 3": lambda: (
        _transformer(tied=True, stages=2),
        pipeline(2, replicas=2, microbatches=2, shard_params=True, bucket_size=2e-3),
    ),
    "transformer, hybrid zero 3": lambda: (
        _transformer(tied=True, stages=2),
        hybrid(microbatches=1, shard_params=True, bucket_size=2e-3),
    ),
    "weighted loss, zero 2": lambda: (
        _weighted(),
        pipeline(2, replicas=2, microbatches=2, shard_grads=True),
    ),
    "transformer with dropout, interleaved": lambda: (
        _transformer(tied=False, stages=4, dropout=0.2),
        interleaved(2, 2, 4),
    ),
    "transformer, two ways": lambda: (_transformer(tied=False, stages=2), both_ways(2, 4)),
    "weighted loss, offloaded": lambda: (_weighted(), [*pipeline(2), Offload({})]),
    "experts, zero 2": lambda: (
        _experts("dropless"),
        _shared([0, 1], [2, 3], microbatches=1, shard_grads=True),
    ),
    "experts around the rest, zero 2": lambda: (
        _experts("dropless"),
        _apart([0, 1], [0, 2, 1, 3], shard_grads=True),
    ),
    "experts beside the rest": lambda: (_experts("capacity"), _apart([0, 1], [1, 2])),
    "u-net, 1f1b": lambda: (_unet(), pipeline(4)),
    "integers and masks, 1f1b": lambda: (_multi(), pipeline(3)),
    "batch norm, 1f1b": lambda: (_norms(), pipeline(2)),
    "weighted loss, 1f1b × dp": lambda: (_weighted(), pipeline(2, replicas=2, microbatches=2)),
}


def trainings() -> dict[str, Callable[[], tuple[Training, Strategy]]]:
    """All cases, hand-made first."""

    def of(name: str) -> Callable[[], tuple[Training, Strategy]]:
        def build() -> tuple[Training, Strategy]:
            dag, strategy = CASES[name]()
            return hand_made(dag), strategy

        return build

    return {name: of(name) for name in CASES} | CAPTURED

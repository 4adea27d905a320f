"""Flattening of the example batch."""

from typing import NamedTuple

import pytest
import torch

from piper.capture.batch import flatten_batch
from piper.errors import CaptureError


class Pair(NamedTuple):
    left: object
    right: object


def forward(x: object, mask: object = None, *rest: object, flag: bool = False) -> None:
    """Only the signature counts."""


def ones(rows: int = 4) -> torch.Tensor:
    return torch.ones(rows, 2)


def names(inputs: object, targets: object) -> list[str]:
    return [leaf.name for leaf in flatten_batch(forward, (inputs, targets)).leaves]


def test_names() -> None:
    assert names(ones(), ones()) == ["inputs", "targets"]
    assert names((ones(), ones(), ones()), None) == [
        "inputs[0]",
        "inputs[1]",
        "inputs[2]",
        "targets",
    ]
    assert names({"x": [ones(), ones()], "flag": True}, {"a": ones(), "b": (ones(),)}) == [
        "inputs.x[0]",
        "inputs.x[1]",
        "inputs.flag",
        "targets.a",
        "targets.b[0]",
    ]


def test_rebuild_is_the_inverse() -> None:
    inputs = {"x": [1, Pair(2, (3,))], "mask": None}
    targets = (4, {"a": 5})
    batch = flatten_batch(forward, (inputs, targets))
    assert batch.rebuild([leaf.value for leaf in batch.leaves]) == ((), inputs, targets)
    args = (1, 2, 3)
    batch = flatten_batch(forward, (args, 4))
    assert batch.rebuild([leaf.value for leaf in batch.leaves]) == (args, {}, 4)


@pytest.mark.parametrize("key", ["mask", "inputs[1]"])
def test_batch_dims_by_parameter_or_path(key: str) -> None:
    inputs = (ones(4), {"a": ones(3), "b": ones(5)})
    batch = flatten_batch(forward, (inputs, ones(4)), {key: None})
    assert [leaf.split for leaf in batch.leaves] == [True, False, False, True]
    assert batch.size == 4


def test_batch_dims_of_targets() -> None:
    for key in ("targets.weights", "weights"):
        batch = flatten_batch(forward, (ones(4), {"weights": ones(9), "y": ones(4)}), {key: None})
        assert [leaf.split for leaf in batch.leaves] == [True, False, True]


def test_batch_dims_errors() -> None:
    with pytest.raises(CaptureError, match=r"'mask_'.*did you mean 'mask'"):
        flatten_batch(forward, ((ones(), ones()), ones()), {"mask_": None})
    with pytest.raises(CaptureError, match="dimension 0"):
        flatten_batch(forward, (ones(), ones()), {"x": 1})


def test_sizes_that_disagree() -> None:
    with pytest.raises(CaptureError, match="'inputs' has 4, 'targets' has 5"):
        flatten_batch(forward, (ones(4), ones(5)))
    with pytest.raises(CaptureError, match=r"no dimensions.*batch_dims"):
        flatten_batch(forward, (ones(4), torch.ones(())))


def test_malformed_batches() -> None:
    with pytest.raises(CaptureError, match="pair"):
        flatten_batch(forward, (ones(),))
    with pytest.raises(CaptureError, match="takes 1 positional"):
        flatten_batch(lambda x: x, ((ones(), ones()), ones()))

"""Batches: names of leaves, signatures, rows."""

from collections import OrderedDict, UserDict
from typing import NamedTuple

import pytest
import torch

from piper.capture.batch import flatten_batch
from piper.dtypes import DType
from piper.errors import BatchError
from piper.ir.body import TensorSpec
from piper.ir.dag import BatchLeaf
from piper.runtime.batch import FixedBatches, flatten, microbatch_rows, signature


class Pair(NamedTuple):
    a: object
    b: object


X = torch.zeros(6, 2)


def forward(*args, **kwargs):
    """Takes anything."""


@pytest.mark.parametrize(
    "batch",
    [
        (X, X),
        ((X, X), X),
        ((X,), (X, [X, 3])),
        ({"ids": X, "mask": None, "flag": True}, {"labels": {"deep": X}}),
        (OrderedDict(z=X, a=X), UserDict(y=X)),
        ((Pair(X, X), [X]), Pair(X, "text")),
        ([X, X], X),
    ],
)
def test_leaves_have_the_names_that_capture_gives_them(batch):
    captured = flatten_batch(forward, batch)
    assert list(flatten(batch)) == [leaf.name for leaf in captured.leaves]
    assert list(flatten(batch).values()) == [leaf.value for leaf in captured.leaves]


@pytest.mark.parametrize("batch", [X, (X,), (X, X, X), None])
def test_a_batch_is_a_pair(batch):
    with pytest.raises(BatchError, match="must be a pair"):
        flatten(batch)


def test_signatures_see_shapes_types_and_constants_but_not_values_or_order():
    base = ({"a": X, "b": 1}, X)
    expected = signature(base)
    assert signature(({"b": 1, "a": X + 1}, X)) == expected
    assert hash(signature(base)) == hash(expected)
    for other in [
        ({"a": X[:3], "b": 1}, X),
        ({"a": X.double(), "b": 1}, X),
        ({"a": X, "b": 2}, X),
        ({"a": X, "b": None}, X),
        ({"a": X, "b": True}, X),
        ({"a": X, "b": 1.0}, X),
        ({"a": X}, X),
        ({"a": X, "b": 1, "c": 1}, X),
        ((X, 1), X),
    ]:
        assert signature(other) != expected
        assert expected.difference(signature(other))


def test_differences_are_named():
    found = signature(({"a": X[:3], "c": 1}, X))
    assert signature(({"a": X, "b": 1}, X)).difference(found) == (
        "missing inputs.b = 1; unexpected inputs.c = 1; "
        "expected inputs.a: float32[6, 2], found inputs.a: float32[3, 2]"
    )


def test_constants_must_be_comparable():
    import numpy as np

    with pytest.raises(BatchError, match=r"inputs\.a.*ndarray.*torch"):
        signature(({"a": np.zeros(3)}, X))


def leaf(dim: int | None) -> BatchLeaf:
    return BatchLeaf("inputs", 0, TensorSpec((6, 2), DType.FLOAT32), dim)


def test_rows_of_a_microbatch():
    x = torch.arange(12).reshape(6, 2)
    parts = [microbatch_rows(leaf(0), x, m, 3) for m in range(3)]
    assert torch.equal(torch.cat(parts), x)
    assert all(part.is_contiguous() for part in parts)
    assert microbatch_rows(leaf(None), x, 1, 3) is x


def test_rows_that_do_not_divide():
    with pytest.raises(BatchError, match="'inputs' has 6 rows, which 4 microbatches"):
        microbatch_rows(leaf(0), X, 0, 4)


def test_explicit_batches_by_step():
    data = FixedBatches(7, [(X, 1), (X, 2)])
    assert data(8)[1] == 2

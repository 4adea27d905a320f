"""Annotations: no-ops in eager, picklable, checked."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from piper.capture.annotate import annotate, annotate_module
from piper.errors import AnnotationError


def test_eager_is_unchanged() -> None:
    x = torch.ones(2)
    with annotate("PP"), annotate("EP", 3):
        y = x + 1
    assert torch.equal(y, torch.full((2,), 2.0))


@pytest.mark.parametrize("name", ["PASS", "COMM", "MB", "", None])
def test_bad_names(name: str) -> None:
    with pytest.raises(AnnotationError), annotate(name):
        pass


@pytest.mark.parametrize("index", [-1, True, "0", 1.0])
def test_bad_indices(index: int) -> None:
    with pytest.raises(AnnotationError, match="'PP'"), annotate("PP", index):
        pass
    with pytest.raises(AnnotationError, match="'PP'"):
        annotate_module(nn.Linear(2, 2), "PP", index)


def test_annotate_module_twice() -> None:
    layer = nn.Linear(2, 2)
    annotate_module(layer, "PP", 3)
    annotate_module(layer, "PP", 3)
    annotate_module(layer, "EP", 1)
    assert layer.forward.tags == (("PP", 3), ("EP", 1))
    with pytest.raises(AnnotationError, match="Linear already is region 'PP' with index 3"):
        annotate_module(layer, "PP", 4)


def test_annotated_model_is_copied_and_pickled() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    keys = list(model.state_dict())
    annotate_module(model[0], "PP", 0)
    assert list(model.state_dict()) == keys
    x = torch.randn(3, 2)
    expected = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ]
    for other in copies:
        assert torch.equal(other(x), expected)
        assert other[0].forward.module is other[0]
        with torch.no_grad():
            other[0].weight.zero_()
        assert torch.equal(other(x), other[1](other[0].bias.expand(3, 2)))
    assert torch.equal(model(x), expected)


def test_annotated_copy_can_be_annotated_again() -> None:
    layer = nn.Linear(2, 2)
    annotate_module(layer, "PP", 0)
    other = copy.deepcopy(layer)
    annotate_module(other, "EP", 1)
    assert layer.forward.tags == (("PP", 0),)
    assert other.forward.tags == (("PP", 0), ("EP", 1))


def test_own_forward_of_an_instance_is_kept() -> None:
    layer = nn.Linear(2, 2)
    original = layer.forward
    layer.forward = lambda x: original(x) * 0 + 7
    annotate_module(layer, "PP", 0)
    assert torch.equal(layer(torch.ones(1, 2)), torch.full((1, 2), 7.0))

"""Tied tensors under each of their names."""

import pytest
import torch

from piper.api.user_names import from_user_names, to_user_names
from piper.dtypes import DType
from piper.errors import StateError
from piper.ir.body import TensorSpec
from piper.ir.dag import Parameter

SPEC = TensorSpec((3,), DType.FLOAT64)
MODEL = {
    "wte.weight": Parameter("wte.weight", SPEC, True, ("head.weight",)),
    "h.weight": Parameter("h.weight", SPEC, True, ()),
}


def test_names_of_tied_parameters():
    named = to_user_names({n: torch.ones(3) for n in MODEL}, MODEL)
    assert named["head.weight"] is named["wte.weight"]
    assert from_user_names(named, MODEL).keys() == MODEL.keys()
    alone = {n: t for n, t in named.items() if n != "wte.weight"}
    assert from_user_names(alone, MODEL)["wte.weight"] is named["head.weight"]
    with pytest.raises(StateError, match=r"'head.weight' and 'wte.weight' are one tied tensor"):
        from_user_names({**named, "head.weight": torch.zeros(3)}, MODEL)

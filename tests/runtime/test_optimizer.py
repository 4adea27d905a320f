"""Groups of parameters."""

import pytest

from piper.dtypes import DType
from piper.errors import ConfigError
from piper.ir.body import TensorSpec
from piper.ir.dag import Parameter
from piper.runtime.optimizer import group_parameters

SPEC = TensorSpec((3,), DType.FLOAT64)
MODEL = {
    p.name: p
    for p in (
        Parameter("wte.weight", SPEC, True, ("head.weight",)),
        Parameter("h.0.weight", SPEC, True, ()),
        Parameter("h.0.bias", SPEC, True, ()),
        Parameter("h.1.weight", SPEC, True, ()),
        Parameter("h.1.bias", SPEC, True, ()),
        Parameter("frozen.weight", SPEC, False, ()),
    )
}


def names_of(groups) -> list[list[str]]:
    return [names for names, _ in groups]


def test_groups_by_pattern_any_alias_counts_and_the_rest_comes_last():
    groups = [{"names": ["head.*"], "lr": 1.0}, {"names": ["*.bias"], "weight_decay": 0.0}]
    found = group_parameters(MODEL, groups)
    assert names_of(found) == [
        ["wte.weight"],
        ["h.0.bias", "h.1.bias"],
        ["h.0.weight", "h.1.weight"],
    ]
    assert [options for _, options in found] == [{"lr": 1.0}, {"weight_decay": 0.0}, {}]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"names": ["*.gamma"]}], r"param_groups\[0\]: pattern '\*.gamma' matches no parameter"),
        ([{"names": ["h.0.wieght"]}], "did you mean 'h.0.weight'"),
        ([{"names": ["frozen.*"]}], "only parameters that do not require a gradient"),
        (
            [{"names": ["*.bias"]}, {"names": ["h.0.*"]}],
            r"param_groups\[1\]: parameter 'h.0.bias' is already in param_groups\[0\]",
        ),
        ([{"names": "*.bias"}], r"param_groups\[0\] must be"),
        ([{"lr": 1.0}], r"param_groups\[0\] must be"),
    ],
)
def test_groups_that_make_no_sense_are_refused(groups, message):
    with pytest.raises(ConfigError, match=message):
        group_parameters(MODEL, groups)

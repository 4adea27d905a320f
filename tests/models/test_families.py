"""Unmodified Hugging Face models of every family equal one process, under 1F1B with ZeRO-2 and under
zero bubble, with SGD and AdamW.
"""

import pytest
import torch
from tests.models.families import FAMILIES, staged

import piper

pytest.importorskip("transformers")

STRATEGIES = {
    "1f1b": (2, lambda: piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 2, zero=2)),
    "zbv": (4, lambda: piper.strategies.pipeline("zbv", [[0], [1]], 4)),
}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


IN_EVERY_RUN = {("bert", "1f1b", adamw), ("t5", "1f1b", sgd)}
CASES = [
    pytest.param(
        *case, marks=[] if case in IN_EVERY_RUN else [pytest.mark.full, pytest.mark.timeout(600)]
    )
    for case in ((f, s, o) for f in FAMILIES for s in STRATEGIES for o in (sgd, adamw))
]


@pytest.mark.parametrize(("name", "strategy", "optimizer"), CASES)
def test_a_family_equals_one_process(name, strategy, optimizer):
    family, (num_stages, make) = FAMILIES[name], STRATEGIES[strategy]
    model = staged(family, num_stages)
    report = piper.check(model, family.loss, make(), family.batch(), optimizer=optimizer)
    assert report.ok, str(report)

"""Damaged plans: the verifier refuses whatever can go wrong when run. ``benchmarks/mutation.py``
has the full figure.
"""

import pytest
from tests.verify.captured import CAPTURED, trainings
from tests.verify.execution import FailedError, differs, eager, harm, in_process, reference
from tests.verify.mutations import KINDS, Mutator
from tests.verify.plans import make

from piper.verify import find_problems, verify

TRAININGS = trainings()
MUTATIONS = 25  # per case


@pytest.mark.parametrize("name", [name for name in CAPTURED if "dropout" not in name])
def test_the_reference_is_eager_pytorch(name):
    training, strategy = CAPTURED[name]()
    plan = make(training.dag, strategy)
    expected = eager(training, plan)
    assert differs(reference(training, plan), expected) is None


@pytest.mark.parametrize("name", TRAININGS)
def test_verified_plans_equal_the_reference_under_any_schedule(name):
    training, strategy = TRAININGS[name]()
    plan = make(training.dag, strategy)
    verify(plan)
    expected = reference(training, plan)
    assert expected.reports
    assert harm(plan, training, expected, schedules=8) is None
    assert differs(in_process(plan, training, timeout=60), expected) is None


@pytest.mark.parametrize("name", TRAININGS)
def test_no_harmful_mutation_is_accepted(name):
    training, strategy = TRAININGS[name]()
    plan = make(training.dag, strategy)
    expected = reference(training, plan)
    caught = 0
    for seed in range(MUTATIONS):
        mutation = Mutator(plan, seed).mutate()
        if find_problems(mutation.plan):
            caught += 1
            continue
        what = f"{mutation.kind}: {mutation.text}"
        assert harm(mutation.plan, training, expected, schedules=10) is None, what
        try:
            outcome = in_process(mutation.plan, training, timeout=60)
        except FailedError as failure:
            pytest.fail(f"{what}: {failure}")
        assert differs(outcome, expected) is None, what
    assert caught > MUTATIONS // 2, "most mutations do harm"


def test_the_adversary_finds_a_missing_wait():
    """What runs in order on a CPU by chance is found by an executor whose streams run at any
    speed.
    """
    training, strategy = TRAININGS["1f1b"]()
    plan = make(training.dag, strategy)
    expected = reference(training, plan)
    mutator = Mutator(plan, 0)
    for _ in range(10):
        _, spoiled = KINDS["drop wait"][1](mutator)
        assert find_problems(spoiled)
        assert harm(spoiled, training, expected, schedules=100) is not None

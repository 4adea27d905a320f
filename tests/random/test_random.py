"""Random models, losses, strategies and options, all at once: equal to plain PyTorch that shares no
code with piper, or refused for a reason that a user can mend. ``make fuzz`` runs any number.
"""

import itertools
from dataclasses import replace

import pytest
from tests.random.cases import draw, from_json, smaller, to_json
from tests.random.outcome import (
    DIVERGED,
    EQUAL,
    REFUSED,
    WRONG,
    namespace,
    outcome,
    shared_captures,
    shrink,
)
from tests.random.reference import Plain
from tests.random.source import definitions, script

NUMBER = 60


@pytest.mark.timeout(600)
def test_random_compositions_are_equal_or_refused_for_a_reason():
    """Most run: a test of refusals would show little."""
    with shared_captures():
        found = {seed: outcome(draw(seed)) for seed in range(NUMBER)}
    assert not {seed: o for seed, o in found.items() if o.kind not in (EQUAL, REFUSED, DIVERGED)}
    refused = [o.reason for o in found.values() if o.kind == REFUSED]
    assert sum(o.kind == EQUAL for o in found.values()) >= NUMBER * 7 // 10, refused


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [3, 11])
def test_random_compositions_on_ray(seed):
    """Model, loss and optimizer go to processes that know nothing of the text they came from."""
    found = outcome(replace(draw(seed), ray=True), seconds=280)
    assert found.kind == EQUAL, found


def test_a_case_is_a_function_of_its_seed_and_can_be_written_down():
    for seed in range(40):
        case = draw(seed)
        assert draw(seed) == case
        assert from_json(to_json(case)) == case


def test_what_is_drawn_has_a_bit_of_everything():
    cases = [draw(seed) for seed in range(4000)]
    layouts = [layout for case in cases for layout in case.layouts]
    assert len({layout.schedule for layout in layouts}) == 11
    assert {layout.shard for layout in layouts} >= {"placed", "pairs", "subset", "superset"}
    assert {z for layout in layouts for z in layout.zero} == {0, 1, 2, 3}
    assert len({layer.kind for case in cases for layer in case.sketch.layers}) == 24
    assert {case.precision for case in cases} == {None, "bf16", "fp16", "float32", "float64"}
    assert {a for case in cases for a in case.actions} == {
        "update",
        "keep",
        "evaluate",
        "reload",
        "switch",
    }


def test_a_wrong_value_is_found_shrunk_and_written_as_a_script(tmp_path, monkeypatch):
    """The reference is made to lose a factor: every case with momentum and two layers is wrong."""
    case = next(
        case
        for case in map(draw, itertools.count())
        if case.precision is None and len(case.sketch.layers) == 2 and len(case.actions) > 1
    )
    gradients = Plain._gradients

    def halved(self, *arguments):
        loss, found = gradients(self, *arguments)
        return loss, {name: gradient / 2 for name, gradient in found.items()}

    monkeypatch.setattr(Plain, "_gradients", halved)
    with shared_captures():
        found = outcome(case)
        assert found.kind == WRONG
        small = shrink(case, found, outcome, tries=12)
    assert len(small.actions) == 1
    path = tmp_path / "wrong.py"
    path.write_text(script(small, "A wrong case."))
    compile(path.read_text(), str(path), "exec")
    names = [line for line in path.read_text().splitlines() if "import" in line]
    assert not [line for line in names if "tests" in line]


def test_smaller_cases_are_cases():
    """Every way to shrink leaves something whose definitions can be written."""
    for seed in range(0, 80, 8):
        for option in smaller(draw(seed)):
            namespace(option)
            assert definitions(option)

"""Copies to and from host memory: what can go wrong with them is found."""

from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct
from tests.verify.captured import CAPTURED
from tests.verify.plans import make

from piper.ops.compute import Compute
from piper.ops.offload import CopyFromHost, CopyToHost
from piper.ops.wait import Wait
from piper.verify import find_problems

DEVICE = 0


@pytest.fixture(scope="module")
def plan():
    training, strategy = CAPTURED["weighted loss, offloaded"]()
    found = make(training.dag, strategy)
    assert not find_problems(found)
    return found


def changed(plan, change):
    program = list(plan.devices[DEVICE].instructions)
    change(program)
    devices = list(plan.devices)
    devices[DEVICE] = replace_struct(devices[DEVICE], instructions=tuple(program))
    return replace(plan, devices=tuple(devices))


def places(program, kind):
    return [n for n, i in enumerate(program) if isinstance(i, kind)]


def checks(plan):
    return {problem.check for problem in find_problems(plan)}


@pytest.mark.parametrize("kind", [CopyToHost, CopyFromHost])
def test_a_dropped_copy(plan, kind):
    def drop(program):
        program.pop(places(program, kind)[0])

    problems = find_problems(changed(plan, drop))
    assert any(
        "is never executed" in p.text or "nothing has written yet" in p.text for p in problems
    )


@pytest.mark.parametrize("kind", [CopyToHost, CopyFromHost])
@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_swapped_slots(plan, kind, side):
    def swap(program):
        at = next(n for n in places(program, kind) if len(getattr(program[n], side)) > 1)
        one, two, *rest = getattr(program[at], side)
        program[at] = replace_struct(program[at], **{side: (two, one, *rest)})

    assert "fidelity" in checks(changed(plan, swap))


def test_copies_of_two_microbatches_swapped(plan):
    def swap(program):
        one, two = places(program, CopyFromHost)[:2]
        a, b = program[one], program[two]
        program[one] = replace_struct(a, inputs=b.inputs)
        program[two] = replace_struct(b, inputs=a.inputs)

    assert "fidelity" in checks(changed(plan, swap))


def test_the_device_asks_for_a_copy_and_does_not_wait(plan):
    """Each wait for a copy, one after the other: of compute for the fetch, of the fetch for the
    offload, of the free.
    """
    program = plan.devices[DEVICE].instructions
    events = {
        i.record
        for i in program
        if isinstance(i, (CopyToHost, CopyFromHost)) and i.record is not None
    }
    waits = [n for n, i in enumerate(program) if isinstance(i, Wait) and i.event in events]
    assert {program[n].stream for n in waits} >= {"compute", "offload:in"}
    for n in waits:
        found = changed(plan, lambda p, n=n: p.pop(n))
        assert "races" in checks(found), program[n].describe()


def test_a_fetch_after_its_use(plan):
    def late(program):
        at = places(program, CopyFromHost)[0]
        fetch = program.pop(at)
        users = [n for n, i in enumerate(program) if set(fetch.outputs) & set(i.reads())]
        program.insert(users[0] + 1, fetch)

    assert "lifetime" in checks(changed(plan, late))


def test_the_backward_reads_the_copy_that_was_freed_on_the_device(plan):
    def stale(program):
        fetch = program[places(program, CopyFromHost)[0]]
        out = next(
            i for i in program if isinstance(i, CopyToHost) and set(i.outputs) & set(fetch.inputs)
        )
        back = dict(zip(fetch.outputs, out.inputs, strict=True))
        for n, i in enumerate(program):
            if isinstance(i, Compute) and set(i.inputs) & set(back):
                program[n] = replace_struct(i, inputs=tuple(back.get(s, s) for s in i.inputs))

    assert {"fidelity", "lifetime"} <= checks(changed(plan, stale))


def test_another_stream(plan):
    def move(program):
        at = places(program, CopyToHost)[0]
        program[at] = replace_struct(program[at], stream="elsewhere")

    assert "fidelity" in checks(changed(plan, move))

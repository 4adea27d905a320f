"""What boxes need, beside what they wait for last."""

import pytest
from tests.verify.plans import case

from piper.plan.costs import UnitCosts
from piper.simulate import simulate

NAMES = ["1f1b × dp", "two ways × dp", "zero 3", "zero 2", "clipped × dp"]


def placed(line):
    return {(d.device, b.position): b for d in line.devices for b in d.boxes()}


def members(line):
    found = {}
    for place, box in placed(line).items():
        found.setdefault(box.meeting or place, []).append(place)
    return found


def all_needs(line):
    """By place, with what the others of its meeting need."""
    boxes = placed(line)
    return {
        place: {n for p in together for n in boxes[p].needs}
        for together in members(line).values()
        for place in together
    }


@pytest.fixture(scope="module", params=["H100", "CPU", UnitCosts()], ids=["H100", "CPU", "unit"])
def costs(request):
    return request.param


@pytest.mark.parametrize("name", NAMES)
def test_all_that_a_box_needs_is_over_when_it_starts(name, costs):
    line = simulate(case(name), costs)
    boxes = placed(line)
    for place, needed in all_needs(line).items():
        assert all(boxes[n].end <= boxes[place].start * (1 + 1e-12) for n in needed)


@pytest.mark.parametrize("name", NAMES)
def test_everything_that_the_dag_asks_for_is_reached(name, costs):
    subject = case(name)
    line = simulate(subject, costs)
    boxes, needs = placed(line), all_needs(line)
    reached = {}
    for place in sorted(boxes, key=lambda p: (boxes[p].start, boxes[p].end, p)):
        reached[place] = needs[place].union(*(reached[n] for n in needs[place]))
    nodes = {(device, box.node) for (device, _), box in boxes.items()}
    anywhere = {node for _, node in nodes}
    checked = 0
    for place, box in boxes.items():
        if box.op != "compute":
            continue
        before = {boxes[p].node for p in reached[place]}
        direct = {(device, boxes[device, at].node) for device, at in needs[place]}
        for node in shown_before(subject.dag, box.node, anywhere):
            assert node in before
            checked += 1
        for value in subject.dag.nodes[box.node].inputs:
            made = (place[0], subject.dag.producers.get(value))
            assert made in direct or made not in nodes
    assert checked


def shown_before(dag, node, shown):
    """The predecessors of *node*; instead of one that takes no time, its own."""
    for before in dag.predecessors[node]:
        yield from (before,) if before in shown else shown_before(dag, before, shown)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_box_waits_for_last_is_among_its_needs(name):
    for costs in ("H100", UnitCosts()):
        line = simulate(case(name), costs)
        boxes, needs = placed(line), all_needs(line)
        for place, box in boxes.items():
            assert set(box.waits_on) <= {boxes[n].node for n in needs[place]} | {-1}


def test_a_chunk_needs_what_sends_to_it_and_the_chunk_before():
    boxes = placed(simulate(case("1f1b"), UnitCosts()))
    needed = {b.label: {boxes[n].label for n in b.needs} for b in boxes.values()}
    # Messages take no time here: the chunks of the other device are needed themselves.
    assert needed["F PP=0 MB=0"] == set()
    assert needed["B PP=1 MB=0"] == {"F PP=0 MB=0", "F PP=1 MB=0"}
    assert needed["B PP=0 MB=0"] == {"B PP=1 MB=0", "F PP=0 MB=1"}

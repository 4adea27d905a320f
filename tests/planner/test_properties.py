"""Whatever the DAG and the strategy: the plan is proven correct, and what holds of every plan
holds.
"""

from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.synthetic import Region, network

from piper.directives.order import Order
from piper.directives.place import Place
from piper.directives.replicate import Replicate
from piper.directives.split import Split
from piper.directives.strategy import Strategy, apply
from piper.ir.dag import STATE, Dag
from piper.ops.compute import Compute
from piper.plan.codec import decode_plan, encode_plan
from piper.planner import plan
from piper.planner.streams import total_order
from piper.verify import verify


@dataclass(frozen=True)
class Case:
    """A DAG, a strategy for it, and the planner's memory limit."""

    dag: Dag
    strategy: Strategy
    receive_bytes: int


@st.composite
def cases(draw) -> Case:
    count = draw(st.integers(2, 5))
    regions = []
    for r in range(count):
        reads = draw(st.sets(st.integers(0, r - 1), max_size=2)) if r else set()
        regions.append(Region(tuple(sorted(reads)), draw(st.integers(0, count - 1))))
    microbatches, replicas = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    dag = network(regions, batch_size=24, weighted=draw(st.booleans()))
    lanes = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    numbers = {lane: i for i, lane in enumerate(dict.fromkeys(lanes))}
    placed = [
        Place({"R": r}, [numbers[lane] * replicas + i for i in range(replicas)])
        for r, lane in enumerate(lanes)
    ]
    replicate = Replicate({}, bucket_size=draw(st.sampled_from([None, 1e-9, 1e-3])))
    split = Split({}, num_microbatches=microbatches)
    strategy = draw(st.permutations([placed, [replicate], [split]]))
    flat = [directive for part in strategy for directive in part]
    if draw(st.booleans()):
        flat += draw(st.sampled_from([[], [Order([[{"PASS": ["BI", "BW"]}]])]]))
        flat += _orders(draw, apply(dag, flat), len(numbers))
    return Case(dag, flat, draw(st.sampled_from([0, 1000, 2**24])))


def _orders(draw, dag: Dag, lanes: int) -> list[Order]:
    """Orders that some execution follows: a random one, cut at random into groups whose members do
    not need each other.
    """
    priority = draw(st.randoms(use_true_random=False))
    waiting = {n: len(before) for n, before in dag.predecessors.items()}
    ready = [n for n, count in waiting.items() if not count]
    execution = []
    needed: dict[int, set[int]] = {}
    while ready:
        node = ready.pop(priority.randrange(len(ready)))
        execution.append(dag.nodes[node])
        before = dag.predecessors[node]
        needed[node] = set(before).union(*(needed[b] for b in before))
        for after in dag.successors[node]:
            waiting[after] -= 1
            if not waiting[after]:
                ready.append(after)
    groups: dict[tuple[int, ...], list[list[dict[str, int | str]]]] = {}
    last: dict[tuple[int, ...], set[int]] = {}
    for node in execution:
        if node.derived:
            continue
        mine = groups.setdefault(node.participants, [])
        together = last.setdefault(node.participants, set())
        if not mine or priority.random() < 0.7 or needed[node.id] & together:
            mine.append([])
            together.clear()
        together.add(node.id)
        mine[-1].append({**dict(node.tags), "PASS": node.pass_.value})
    assert len(groups) == lanes
    return [Order(filters) for filters in groups.values()]


FEW = settings(max_examples=60, deadline=None, derandomize=True)


@FEW
@given(cases())
def test_every_plan_is_proven_correct(case):
    dag = apply(case.dag, case.strategy)
    verify(plan(dag, receive_bytes=case.receive_bytes))


@FEW
@given(cases())
def test_every_slot_is_written_before_it_is_read_and_freed_exactly_once(case):
    planned = plan(apply(case.dag, case.strategy), receive_bytes=case.receive_bytes)
    for device in planned.devices:
        state = {s for s, info in enumerate(device.slots) if info.role in STATE}
        alive, freed = set(state), Counter()
        for i in device.instructions:
            assert alive >= set(i.reads()) - set(i.writes())
            alive |= set(i.writes())
            freed.update(i.frees())
            alive -= set(i.frees())
        assert alive == state
        assert freed == Counter(s for s in range(len(device.slots)) if s not in state)


@FEW
@given(cases(), st.randoms(use_true_random=False))
def test_the_total_order_respects_all_edges_whatever_the_durations(case, random):
    dag = apply(case.dag, case.strategy)
    order = total_order(dag, {n: random.choice([1e-6, 0.5, 1.0, 7.0]) for n in dag.nodes})
    at = {node: i for i, node in enumerate(order)}
    assert sorted(order) == sorted(dag.nodes)
    assert all(at[b] < at[n] for n, before in dag.predecessors.items() for b in before)


@FEW
@given(cases())
def test_each_chunk_runs_once_per_replica_on_its_own_microbatch(case):
    dag = apply(case.dag, case.strategy)
    planned = plan(dag)
    ran = Counter(
        (dag.nodes[i.node].tags[0], dag.nodes[i.node].pass_, i.microbatch)
        for device in planned.devices
        for i in device.instructions
        if isinstance(i, Compute)
    )
    pieces = planned.num_replicas * planned.num_microbatches
    core = {(c.tags[0], c.pass_) for c in dag.chunks() if not c.derived}
    assert {(tag, p.value[0]) for tag, p in core} == {
        (c.tags[0], c.pass_.value) for c in case.dag.chunks()
    }
    assert ran == Counter((*chunk, m) for chunk in core for m in range(pieces))


@FEW
@given(cases())
def test_plans_and_their_files_are_the_same_thing(case):
    dag = apply(case.dag, case.strategy)
    planned = plan(dag)
    files = encode_plan(planned)
    assert decode_plan(files) == planned
    assert encode_plan(decode_plan(files)) == files
    assert encode_plan(plan(dag)) == files

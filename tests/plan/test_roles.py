import re
from collections import Counter
from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct
from tests.equality import expert_matrix
from tests.verify.dags import chain
from tests.verify.plans import CASES, ROWS, drop, find, hybrid, make, pipeline

from piper.backends.inprocess import InProcessBackend
from piper.directives.replicate import Replicate
from piper.directives.split import Split
from piper.directives.strategy import apply
from piper.errors import ConfigError, VerificationError
from piper.ids import DeviceId
from piper.ir.dag import Clip, GradientUse
from piper.ir.edit import use_gradients
from piper.ops.accumulate import Accumulate
from piper.ops.all_gather import AllGatherBucket, RefreshBucket
from piper.ops.all_reduce import AllReduceBucket
from piper.ops.all_to_all import ExchangeRows
from piper.ops.grad_norm import Norm
from piper.ops.p2p import Send
from piper.ops.reduce_scatter import ReduceScatterBucket
from piper.plan.codec import decode_plan, encode_plan
from piper.plan.costs import hardware
from piper.plan.roles import find_roles
from piper.plan.topology import Topology
from piper.planner import plan as make_plan
from piper.simulate import simulate
from piper.verify import find_problems, verify
from piper.verify.contributions import _Symbolic
from piper.verify.deadlock import Execution
from piper.verify.structure import check_structure

MORE = {
    "six replicas": lambda: (chain(3, 6 * ROWS), pipeline(3, replicas=6, shard_grads=True)),
    "two rows of three": lambda: (
        chain(2, 6 * ROWS),
        [Replicate({}, [[0, 1, 2], [3, 4, 5]], shard_params=True), Split({}, num_microbatches=2)],
    ),
}


def experts(ep, dp, zero, *, clip=False):
    """Two stages, each on *dp* groups of *ep* devices that share the experts."""
    case = expert_matrix.Case("1f1b", ep, dp, 2, zero, "dropless", recompute=False)
    dag = expert_matrix.captured(2, "dropless").dag
    dag = replace(dag, batch_size=expert_matrix.ROWS * case.size * case.microbatches)
    if clip:
        dag = use_gradients(dag, GradientUse.UPDATE, Clip(Norm.L2, 1.5)).dag
    return dag, expert_matrix.strategy(case)


EXPERTS = {
    "experts": lambda: experts(2, 2, 0),
    "experts, zero 2": lambda: experts(4, 2, 2),
    "experts, zero 3": lambda: experts(2, 4, 3),
    "experts, zero 3, clipped": lambda: experts(4, 2, 3, clip=True),
}
ALL = {**CASES, **MORE, **EXPERTS}
FOLDED = {
    "1f1b × dp": 2,
    "tied × dp": 2,
    "weighted × dp": 2,
    "clipped × dp": 4,  # the first replica alone measures the gradients
    "zero 1": 2,
    "zero 2": 2,
    "zero 3": 2,
    "zero 3, tied, weighted": 3,
    "zero 3, empty slices": 1,
    "hybrid zero 3": 1,
    "two ways, zero 2": 2,
    "looped, zero 3": 2,
    "six replicas": 3,
    "two rows of three": 1,
    "buffer × dp": 4,  # the first replica's buffer counts
    "1f1b": 2,
    "experts": 2,
    "experts, zero 2": 2,
    "experts, zero 3": 2,
    # The first replica measures dense gradients, its group those of the experts.
    "experts, zero 3, clipped": 8,
}
"""Roles by case."""


def both(name):
    dag, strategy = ALL[name]()
    dag = apply(dag, strategy)
    return make_plan(dag), make_plan(dag, fold=True)


@pytest.mark.parametrize("name", FOLDED)
def test_the_number_of_roles(name):
    plan, folded = both(name)
    assert len(folded.represented()) == FOLDED[name]
    assert sorted(d for role in folded.represented() for d in role) == list(range(plan.num_devices))


@pytest.mark.parametrize("name", ALL)
def test_programs_are_those_of_the_whole_plan(name):
    plan, folded = both(name)
    first = {role[0] for role in folded.represented()}
    for mine, whole in zip(folded.devices, plan.devices, strict=True):
        if mine.device in first:
            assert mine == whole
        else:
            assert not mine.instructions
            assert not mine.slots


def renamed(text, moved):
    """A communicator's or stream's name with other devices, as a set: ranks follow the devices' own
    order.
    """
    kind, _, devices = text.rpartition(":")
    if not re.fullmatch(r"[\d>,]+", devices):
        return text
    order = ">" if ">" in devices else ","
    numbers = [moved(DeviceId(int(d))) for d in devices.split(order)]
    return kind, order, tuple(numbers) if order == ">" else frozenset(numbers)


def skeleton(instruction, num_microbatches, moved):
    """An instruction without what a symmetry renames, or with it renamed."""
    fields = {f: getattr(instruction, f) for f in instruction.__struct_fields__}
    fields["op"] = instruction.op
    fields["stream"] = renamed(instruction.stream, moved)
    if "communicator" in fields:
        fields["communicator"] = renamed(fields["communicator"], moved)
    if "members" in fields:
        fields["members"] = frozenset(map(moved, fields["members"]))
    for end in ("sender", "receiver"):
        if end in fields:
            fields[end] = moved(fields[end])
    if "microbatch" in fields:
        fields["microbatch"] %= num_microbatches
    return fields


@pytest.mark.parametrize("name", ALL)
def test_devices_of_one_role_have_one_program_up_to_renaming(name):
    plan, folded = both(name)
    roles = find_roles(plan.dag, plan.num_devices)
    count = plan.num_microbatches
    for role in folded.represented():
        mine = plan.devices[role[0]].instructions
        for other in role[1:]:
            theirs = plan.devices[other].instructions
            assert [skeleton(i, count, lambda d, to=other: roles.moved(d, to)) for i in mine] == [
                skeleton(i, count, lambda d: d) for i in theirs
            ]


@pytest.mark.parametrize("name", ALL)
def test_folded_plans_are_verified(name):
    plan, folded = both(name)
    report, whole = verify(folded), verify(plan)
    assert report.messages == whole.messages
    assert report.collectives == whole.collectives


def sums(plan):
    """What each slot of each device holds in the verifier's execution with symbols: for what, which
    contributions how often, which part.
    """
    subject, problems = check_structure(plan)
    assert not problems
    execution = Execution(subject)
    execution.run()
    symbolic = _Symbolic(subject)
    assert not list(symbolic.run(execution.completed))
    return [
        {slot: (t.target, t.counts, t.shard, t.final, t.scaled) for slot, t in mine.items()}
        for mine in symbolic.totals
    ]


@pytest.mark.parametrize("name", ALL)
def test_sums_are_followed_as_in_the_whole_plan(name):
    plan, folded = both(name)
    whole, found = sums(plan), sums(folded)
    for device, *_ in folded.represented():
        assert found[device] == whole[device]


@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.parametrize(("groups_per_node", "nics"), [(1, 1), (2, 1), (2, 2)])
def test_folded_plans_take_as_long(name, groups_per_node, nics):
    plan, folded = both(name)
    one = hardware("H100").topology_for(1)
    size = plan.num_replicas * groups_per_node
    topology = Topology(-(-plan.num_devices // size), size, one.intra, one.inter, nics)
    line = simulate(folded, hardware("H100", topology))
    whole = simulate(plan, hardware("H100", topology))
    assert line.seconds == pytest.approx(whole.seconds, rel=1e-12)
    assert line.flops == pytest.approx(whole.flops)
    assert line.bubble == pytest.approx(whole.bubble)
    by_device = {d.device: d for d in whole.devices}
    for mine in line.devices:
        assert mine.peak == by_device[mine.device].peak
        for same in mine.stands_for:
            assert by_device[same].busy == pytest.approx(mine.busy)


@pytest.mark.parametrize(
    ("name", "kind", "check"),
    [
        ("1f1b × dp", AllReduceBucket, "never executed"),
        ("zero 2", ReduceScatterBucket, "never executed"),
        ("zero 3", AllGatherBucket, "never executed"),
        ("zero 1", RefreshBucket, "never executed"),
        ("six replicas", Accumulate, "never added"),
        ("six replicas", Send, "never executed"),
        ("experts, zero 3", ExchangeRows, "never executed"),
        ("experts, zero 3", ReduceScatterBucket, "never executed"),
        ("experts, zero 3, clipped", AllReduceBucket, "never executed"),
    ],
)
def test_what_is_missing_in_a_folded_plan_is_found(name, kind, check):
    _, folded = both(name)
    with pytest.raises(VerificationError, match=check):
        verify(drop(folded, 0, find(folded, 0, kind)))


def test_a_reduction_that_leaves_a_replica_out_is_found():
    """The sums are followed for all replicas, not only for those that have a program."""
    _, folded = both("six replicas")
    dag = folded.dag
    nodes = dict(dag.nodes)
    for node in dag.comms():
        if node.work.kind == "reduce_scatter":
            nodes[node.id] = replace_struct(node, groups=tuple((g[:3]) for g in node.groups))
    spoiled = replace(folded, dag=replace(dag, nodes=nodes))
    assert find_problems(spoiled)


def test_roles_that_the_dag_does_not_give_are_refused():
    _, folded = both("clipped × dp")
    merged = ((DeviceId(0), DeviceId(1)), (DeviceId(2), DeviceId(3)))
    with pytest.raises(VerificationError, match="symmetries"):
        verify(replace(folded, roles=merged))


def test_a_contribution_that_is_counted_twice_is_found():
    plan = make(chain(1, ROWS), hybrid(shard_grads=True))
    folded = make_plan(plan.dag, fold=True)
    assert Counter(map(len, folded.roles)) == {4: 1}
    # Reduced within a pair only: each slice lacks what the other pair contributes.
    with pytest.raises(VerificationError):
        verify(drop(folded, 0, find(folded, 0, AllReduceBucket)))


def test_folded_plans_are_not_run():
    _, folded = both("zero 3")
    with InProcessBackend() as backend:
        backend.start(folded.num_devices)
        with pytest.raises(ConfigError, match="folded"):
            backend.load("train", folded, None)


def test_folded_plans_are_files():
    _, folded = both("zero 3")
    assert decode_plan(encode_plan(folded)) == folded

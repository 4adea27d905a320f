"""Sharded optimizer state, gradients and parameters: every size, every kind of parameter, every
layout a checkpoint may come from.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from math import ceil

import pytest
import torch
from tests.cases.equal import adamw, assert_equal, mse, randn, sgd
from tests.cases.test_state import Borrowed, Branching, Mixed, SometimesTied, TiedFourTimes
from tests.equality import eager, planned
from torch import nn
from torch.nn import functional

import piper
from piper.api.programs import Programs
from piper.backends.inprocess import InProcessBackend
from piper.directives.base import Directive
from piper.errors import DirectiveError, PlacementError, StateError
from piper.ids import DeviceId, Slot
from piper.ir.dag import Pass, Role
from piper.ops.all_gather import AllGatherBucket, RefreshBucket
from piper.ops.compute import Compute
from piper.ops.reduce_scatter import ReduceScatterBucket
from piper.ops.update import OptimizerStep
from piper.plan.model import Plan

pytestmark = pytest.mark.timeout(120)

LEVELS = (1, 2, 3)
PAIRS = [[0, 1], [2, 3]]
SMALL = 1e-6
"""A bucket size (MiB) below that of any parameter: one message each."""


def replicate(zero: int, selected=None, devices="placed", bucket_size=None) -> piper.Replicate:
    return piper.Replicate(
        {} if selected is None else selected,
        devices,
        shard_optimizer=zero == 1,
        shard_grads=zero == 2,
        shard_params=zero == 3,
        bucket_size=bucket_size,
    )


def pipeline(zero: int, groups=PAIRS, microbatches: int = 2, **options) -> Sequence[Directive]:
    return piper.strategies.pipeline("1f1b", groups, microbatches, zero=zero, **options)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2, eps=1e-3)


class Odd(nn.Module):
    """Two stages whose parameters have 0 dimensions, one element, and sizes that neither 2 nor 3
    nor 4 divides.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 2)
        self.gain = nn.Parameter(torch.tensor(1.3))
        self.shift = nn.Parameter(torch.tensor([0.2]))
        self.power = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        with piper.annotate("PP", 0):
            h = (self.gain * self.a(x)).tanh() + self.shift
        with piper.annotate("PP", 1):
            return self.b(h) * self.power


def odd_batch(rows: int = 24):
    return randn(rows, 3), randn(rows, 2, seed=1)


# --- what is reduced, updated and gathered ----------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("bucket_size", [None, SMALL])
def test_every_microbatch_is_reduced_once(schedule, bucket_size):
    """Sharded gradients: contributions are scattered as they come, together where they come one
    after the other; none is lost, none counts twice.
    """
    strategy = piper.strategies.pipeline(schedule, PAIRS, 4, zero=2, bucket_size=bucket_size)
    plan = assert_equal(
        Odd(), mse, strategy, odd_batch(32), optimizer=adam, steps=3, poison=True, delay=0.001
    )
    for device, parameters in zip(plan.devices, (4, 4, 3, 3), strict=True):
        scattered = count(plan, device.device, ReduceScatterBucket)
        passes = [plan.dag.nodes[i.node].pass_ for i in device.instructions if i.op == "compute"]
        runs = sum(1 for pass_, _ in groupby(passes) if pass_ is Pass.BACKWARD)
        assert scattered == runs * (1 if bucket_size is None else parameters)


def test_whole_gradients_are_reduced_once_per_step():
    """A sharded optimizer alone: sums first, then one reduction."""
    plan = assert_equal(Odd(), mse, pipeline(1, microbatches=4), odd_batch(32), steps=3)
    for device in plan.devices:
        for kind in (ReduceScatterBucket, OptimizerStep, RefreshBucket):
            assert count(plan, device.device, kind) == 1


@pytest.mark.parametrize("zero", LEVELS)
@pytest.mark.parametrize("bucket_size", [None, SMALL])
def test_sharded_within_and_replicated_across(zero, bucket_size):
    """2×2, three microbatches: what the second reduction adds has all of them."""
    strategy = [
        replicate(zero, devices=PAIRS, bucket_size=bucket_size),
        piper.Split({}, num_microbatches=3),
    ]
    plan = assert_equal(Odd(), mse, strategy, odd_batch(), optimizer=adam, steps=3, poison=True)
    assert set(plan.dag.shards.values()) == {((0, 1), (2, 3))}


@pytest.mark.parametrize("zero", LEVELS)
def test_sharded_within_and_replicated_across_in_a_pipeline(zero):
    strategy = [
        *piper.placements.chain([[0, 1, 2, 3], [4, 5, 6, 7]]),
        replicate(zero, {"PP": 0}, [[0, 1], [2, 3]]),
        replicate(zero, {"PP": 1}, [[4, 6], [5, 7]]),
        piper.Split({}, num_microbatches=2),
        *piper.schedules.one_f_one_b(num_stages=2, num_microbatches=2),
    ]
    # The second list has another order than the placement: replicas are numbered by it.
    with pytest.raises(PlacementError, match=r"'F PP=1' is placed on \[4, 5, 6, 7\]"):
        assert_equal(Odd(), mse, strategy, odd_batch())
    strategy[3] = replicate(zero, {"PP": 1}, [[4, 5], [6, 7]])
    assert_equal(Odd(), mse, strategy, odd_batch(), optimizer=adam, steps=3)


class Tied(nn.Module):
    """Two stages that share a weight, which 2 does not divide; stage 0 uses it twice; each has a
    parameter of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        with piper.annotate("PP", 0):
            h = (self.b(x).tanh() @ self.a.weight.T).tanh()
        with piper.annotate("PP", 1):
            return self.c(self.a(h).tanh())


FOURS = [[0, 1, 2, 3], [4, 5, 6, 7]]
QUARTERS = [[0, 1], [2, 3], [4, 5], [6, 7]]


def across_stages(zero: int, form: str, **options) -> list[Directive]:
    """Two stages of four replicas, sharded within pairs; one directive for both stages or one
    each.
    """
    if form == "one directive":
        claims = [replicate(zero, devices=QUARTERS, **options)]
    else:
        claims = [
            replicate(zero, {"PP": stage}, QUARTERS[2 * stage : 2 * stage + 2], **options)
            for stage in (0, 1)
        ]
    return [
        *piper.placements.chain(FOURS),
        *claims,
        piper.Split({}, num_microbatches=2),
        *piper.schedules.one_f_one_b(num_stages=2, num_microbatches=2),
    ]


@pytest.mark.parametrize("form", ["one directive", "one each"])
@pytest.mark.parametrize("zero", LEVELS)
def test_tied_across_stages_sharded_within_and_replicated_across(zero, form):
    """Slice i of the shared weight's gradient is added up over all pairs of both stages, after the
    last contribution.
    """
    strategy = across_stages(zero, form)
    batch = (randn(16, 3), randn(16, 2, seed=1))
    plan = assert_equal(Tied(), mse, strategy, batch, optimizer=adam, steps=3, poison=True)
    dag = plan.dag
    assert dag.shards["a.weight"] == tuple(map(tuple, QUARTERS))
    assert dag.shards["c.weight"] == tuple(map(tuple, QUARTERS[2:]))
    (groups,) = (
        comm.groups
        for comm in dag.comms()
        if comm.work.kind == "all_reduce"
        and "a.weight" in {dag.values[v].name for v in comm.inputs}
    )
    assert list(map(set, groups)) == [{0, 2, 4, 6}, {1, 3, 5, 7}]


@pytest.mark.parametrize("zero", LEVELS)
def test_tied_across_stages_clipped(zero):
    """The norm counts each slice of the shared weight once, though four pairs hold it."""
    batch = (randn(16, 3), randn(16, 2, seed=1))
    strategy = across_stages(zero, "one each")
    piper.check(Tied(), mse, strategy, batch, optimizer=adamw, max_grad_norm=0.01).require()


@pytest.mark.parametrize("zero", LEVELS)
def test_tied_in_both_directions_of_a_pipeline_sharded_within_and_replicated_across(zero):
    strategy = [
        piper.Split({}, num_microbatches=2),
        *piper.placements.two_way(FOURS, 2),
        replicate(zero, devices=QUARTERS, bucket_size=SMALL),
    ]
    batch = (randn(16, 3), randn(16, 2, seed=1))
    plan = assert_equal(Tied(), mse, strategy, batch, optimizer=adam, steps=2, poison=True)
    assert plan.dag.shards.keys() == {"a.weight", "a.bias", "b.bias", "c.weight"}
    assert {frozenset(groups) for groups in plan.dag.shards.values()} == {
        frozenset(map(tuple, QUARTERS))
    }


@pytest.mark.parametrize("zero", LEVELS)
def test_lists_of_which_each_stage_is_one(zero):
    """Sharded within each stage's only list; the shared weight's slices are added up across the
    stages.
    """
    strategy = [
        *piper.placements.chain(PAIRS),
        replicate(zero, devices=PAIRS),
        piper.Split({}, num_microbatches=2),
    ]
    batch = (randn(16, 3), randn(16, 2, seed=1))
    plan = assert_equal(Tied(), mse, strategy, batch, optimizer=adam)
    assert plan.dag.shards["a.weight"] == ((0, 1), (2, 3))
    assert plan.dag.shards["c.weight"] == ((2, 3),)


def test_a_shared_parameter_is_cut_into_equally_many_slices_everywhere():
    batch = (randn(16, 3), randn(16, 2, seed=1))
    strategy = across_stages(2, "one each")
    strategy[3] = replicate(2, {"PP": 1})  # within all four
    with pytest.raises(DirectiveError, match=r"'a\.weight'.*shard it differently"):
        assert_equal(Tied(), mse, strategy, batch)
    for one, two, differing in (
        (replicate(1, {"PP": 0}), replicate(2, {"PP": 1}), "what is sharded"),
        (replicate(2, {"PP": 0}), replicate(2, {"PP": 1}, bucket_size=1.0), "bucket_size"),
    ):
        strategy[2:4] = [one, two]
        with pytest.raises(
            DirectiveError,
            match=rf"'a\.weight'.*({differing} differs between directives .*one Replicate|shard it differently)",
        ):
            assert_equal(Tied(), mse, strategy, batch)


def test_lists_that_are_not_those_of_the_stage():
    strategy = across_stages(2, "one directive")
    strategy[2] = replicate(2, devices=[[0, 1], [2, 4], [3, 5], [6, 7]])
    with pytest.raises(
        PlacementError, match=r"'F PP=0' is placed on \[0, 1, 2, 3\].*lists of which.*in this order"
    ):
        assert_equal(Tied(), mse, strategy, odd_batch())


@pytest.mark.parametrize("delay_seed", [0, 1])
def test_new_parameters_are_gathered_while_others_are_updated(delay_seed):
    """Equal from the second step on: nothing stale or half-gathered is read."""
    strategy = pipeline(1, bucket_size=SMALL)
    plan = assert_equal(
        Odd(),
        mse,
        strategy,
        odd_batch(),
        optimizer=adam,
        steps=3,
        poison=True,
        delay=0.003,
        delay_seed=delay_seed,
    )
    for device in plan.devices:
        kinds = [type(i) for i in device.instructions]
        last_update = len(kinds) - 1 - kinds[::-1].index(OptimizerStep)
        assert kinds.index(RefreshBucket) < last_update
        streams = {i.stream for i in device.instructions if type(i) is RefreshBucket}
        assert streams == {"gather"}


def count(plan: Plan, device: DeviceId, kind: type) -> int:
    return sum(type(i) is kind for i in plan.devices[device].instructions)


class Deep(nn.Module):
    """Four stages of one matrix, which each backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(4)])

    def forward(self, x):
        for stage, linear in enumerate(self.stages):
            with piper.annotate("PP", stage):
                x = linear(linear(x).tanh()).tanh()
        return x


MATRIX = 4 * 4 * 8
"""Bytes of a stage's parameters."""


def planned_deep(microbatches: int, schedule: str, virtual: int, **options) -> Plan:
    groups = PAIRS if virtual == 2 else [[0, 1], [2, 3], [4, 5], [6, 7]]
    strategy = piper.strategies.pipeline(
        schedule, groups, microbatches, num_virtual_stages=virtual, zero=3
    )
    batch = (randn(4 * microbatches, 4), randn(4 * microbatches, 4, seed=1))
    model = Deep().double()
    captured = piper.capture(model, mse, batch)
    plan = piper.plan(piper.apply(captured, strategy), **options)
    piper.verify(plan)
    return plan


def gathered_bytes(plan: Plan, device: DeviceId) -> list[int]:
    """Bytes of whole parameters that are there, or on their way, after each instruction."""
    mine = plan.devices[device]
    live: set[Slot] = set()
    found = []
    for instruction in mine.instructions:
        if isinstance(instruction, AllGatherBucket):
            live.update(instruction.writes())
        live.difference_update(instruction.frees())
        found.append(sum(mine.slots[s].message.nbytes for s in live))
    return found


def gathers(plan: Plan, device: DeviceId) -> Counter[str]:
    """How often each parameter is gathered."""
    mine = plan.devices[device]
    return Counter(
        mine.slots[slot].name
        for i in mine.instructions
        if isinstance(i, AllGatherBucket)
        for slot in i.writes()
    )


def needed(plan: Plan, device: DeviceId) -> Counter[str]:
    """How often a chunk reads a parameter that the chunk before it on the device did not."""
    found: Counter[str] = Counter()
    before: set[str] = set()
    for instruction in plan.devices[device].instructions:
        if isinstance(instruction, Compute):
            values = [plan.dag.values[v] for v in plan.dag.nodes[instruction.node].inputs]
            now = {v.name for v in values if v.role is Role.GATHERED}
            found.update(now - before)
            before = now
    return found


@pytest.mark.parametrize("microbatches", [2, 16])
def test_one_stage_per_device_gathers_once(microbatches):
    """All chunks of a device read the same parameters, so one gather serves them all."""
    plan = planned_deep(microbatches, "1f1b", 1)
    for device in plan.devices:
        assert count(plan, device.device, AllGatherBucket) == 1
        found = gathered_bytes(plan, device.device)
        assert max(found) == MATRIX
        assert found[-1] == 0


@pytest.mark.parametrize("microbatches", [2, 16])
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "looped_bfs"])
def test_gathers_follow_the_order_and_memory_does_not_grow(schedule, microbatches):
    """A chunk gathers what the chunk before it on its device did not read; only ``gather_bytes``
    more are on their way.
    """
    for ahead in (0, MATRIX, 3 * MATRIX):
        plan = planned_deep(microbatches, schedule, 2, gather_bytes=ahead)
        for device in plan.devices:
            found = gathered_bytes(plan, device.device)
            assert MATRIX <= max(found) <= ahead + MATRIX
            assert found[-1] == 0
            assert gathers(plan, device.device) == needed(plan, device.device)


@pytest.mark.parametrize("microbatches", [2, 16])
def test_by_default_what_two_chunks_need_is_there(microbatches):
    """Not the whole model, however small it is: of two stages and more, the current one's and the
    next one's.
    """
    strategy = [
        *[piper.Place({"PP": s}, [0, 1]) for s in range(4)],
        piper.Replicate({}, shard_params=True),
        piper.Split({}, num_microbatches=microbatches),
    ]
    batch = (randn(4 * microbatches, 4), randn(4 * microbatches, 4, seed=1))
    plan = piper.plan(piper.apply(piper.capture(Deep().double(), mse, batch), strategy))
    for device in plan.devices:
        found = gathered_bytes(plan, device.device)
        assert max(found) == 2 * MATRIX
        assert found[-1] == 0


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "looped_bfs"])
@pytest.mark.parametrize("ahead", [0, MATRIX])
def test_gathers_just_in_time_are_equal(schedule, ahead):
    torch.manual_seed(0)
    plan = planned_deep(4, schedule, 2, gather_bytes=ahead)
    torch.manual_seed(0)
    model = Deep().double()
    batches = [(randn(16, 4, seed=s), randn(16, 4, seed=9 + s)) for s in range(3)]
    found = planned.train(plan, {}, model, batches, adam, poison=True, delay=0.001)
    worst = planned.compare(found, eager.train(model, mse, batches, 8, adam))
    assert worst.worst <= 1e-10


# --- kinds of parameters ----------------------------------------------------------------------------


@pytest.mark.parametrize("zero", LEVELS)
@pytest.mark.parametrize(("replicas", "bucket_size"), [(2, SMALL), (3, None), (4, SMALL)])
def test_sizes_that_do_not_divide_and_empty_slices(zero, replicas, bucket_size):
    """Parameters of 0 dimensions, of fewer elements than there are replicas, and of every other
    size.
    """
    groups = [list(range(replicas)), list(range(replicas, 2 * replicas))]
    strategy = pipeline(zero, groups, bucket_size=bucket_size)
    assert_equal(Odd(), mse, strategy, odd_batch(), optimizer=adam, steps=3, poison=True)


@pytest.mark.parametrize("zero", LEVELS)
def test_each_device_holds_its_part_and_no_more(zero):
    batch = odd_batch()
    with InProcessBackend(threads=1) as backend, trainer(pipeline(zero), backend) as running:
        running.step(*batch)
        copies = backend.copies()
    first, second = copies[:2]  # stage 0
    names = {"a.weight": 15, "a.bias": 5, "gain": 1, "shift": 1}
    assert first.shards.keys() == second.shards.keys() == names.keys()
    for name, size in names.items():
        length = ceil(size / 2)
        sizes = [copy.shards[name].tensor.numel() for copy in (first, second)]
        assert sizes == [length, size - length]
        moments = [copy.optimizer.state.get(name, {}) for copy in (first, second)]
        assert [m["exp_avg"].numel() for m in moments] == sizes
    whole = set() if zero == 3 else set(names)
    assert set(first.parameters) == set(second.parameters) == whole


@pytest.mark.parametrize("zero", LEVELS)
@pytest.mark.parametrize("replicas", [2, 3])
def test_frozen_parameters(zero, replicas):
    groups = [[s * replicas + r for r in range(replicas)] for s in range(4)]
    batch = (randn(12, 3), randn(12, 2, seed=1))
    plan = assert_equal(Mixed(), mse, pipeline(zero, groups), batch, optimizer=adamw, steps=3)
    sharded = {n for n, p in Mixed().named_parameters() if p.requires_grad or zero == 3}
    assert set(plan.dag.shards) == sharded


@pytest.mark.parametrize("zero", LEVELS)
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_a_parameter_that_this_step_does_not_use(zero, optimizer):
    """No gradient means no update of any slice: no weight decay, no momentum, no count of steps."""
    torch.manual_seed(0)
    model = Branching().double()
    batches = [
        ({"x": randn(8, 3, seed=s), "branch": used}, randn(8, 2, seed=9 + s))
        for s, used in enumerate([True, False, False, True])
    ]
    expected = eager.train(model, mse, batches, 4, optimizer)
    with piper.compile(
        model, mse, pipeline(zero), batches[0], optimizer=optimizer, backend="inprocess"
    ) as running:
        for batch, wanted in zip(batches, expected, strict=True):
            before = running.state_dict()["branch.weight"]
            assert running.step(*batch).loss == pytest.approx(wanted.loss, rel=1e-12)
            state = running.state_dict()
            for name, tensor in wanted.state.items():
                torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-12)
            assert torch.equal(before, state["branch.weight"]) != batch[0]["branch"]


@pytest.mark.parametrize("zero", LEVELS)
@pytest.mark.parametrize("flags", [(True, False, True), (False, True, False)])
def test_a_weight_that_a_stage_uses_in_some_steps_only(zero, flags):
    """Equal, or refused at that step by name; never a stale slice or copy."""
    torch.manual_seed(0)
    model = SometimesTied().double()
    batches = [
        ({"x": randn(8, 3, seed=s), "tied": tied}, randn(8, 3, seed=9 + s))
        for s, tied in enumerate(flags)
    ]
    expected = eager.train(model, mse, batches, 4, sgd)
    with piper.compile(
        model, mse, pipeline(zero), batches[0], optimizer=sgd, backend="inprocess"
    ) as running:
        assert running.step(*batches[0]).loss == pytest.approx(expected[0].loss, rel=1e-12)
        try:
            losses = [running.step(*batch).loss for batch in batches[1:]]
        except StateError as error:
            assert "first." in str(error)  # noqa: PT017 (equal or refused)
            same = running.step(*batches[0]).loss
            (_, wanted) = eager.train(model, mse, [batches[0]] * 2, 4, sgd)
            assert same == pytest.approx(wanted.loss, rel=1e-12)
        else:
            assert losses == pytest.approx([step.loss for step in expected[1:]], rel=1e-12)


class SometimesDetached(nn.Module):
    """A flag says whether a weight gets a gradient; it is read either way."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x, *, trained):
        with piper.annotate("PP", 0):
            weight = self.a.weight if trained else self.a.weight.detach()
            h = functional.linear(x, weight, self.a.bias).tanh()
        with piper.annotate("PP", 1):
            return self.b(h)


@pytest.mark.parametrize("zero", LEVELS)
@pytest.mark.parametrize("flags", [(True, False, True), (False, True, False)])
def test_a_weight_that_is_trained_in_some_steps_only(zero, flags):
    """State moves to where the plan of a later step wants it."""
    torch.manual_seed(0)
    model = SometimesDetached().double()
    batches = [
        ({"x": randn(8, 3, seed=s), "trained": trained}, randn(8, 2, seed=9 + s))
        for s, trained in enumerate(flags)
    ]
    expected = eager.train(model, mse, batches, 4, adam)
    with piper.compile(
        model, mse, pipeline(zero), batches[0], optimizer=adam, backend="inprocess"
    ) as running:
        assert running.step(*batches[0]).loss == pytest.approx(expected[0].loss, rel=1e-12)
        for batch, wanted in zip(batches[1:], expected[1:], strict=True):
            assert running.step(*batch).loss == pytest.approx(wanted.loss, rel=1e-12)
            for name, tensor in wanted.state.items():
                found = running.state_dict()[name]
                torch.testing.assert_close(found, tensor, rtol=1e-10, atol=1e-12)


class Strided(nn.Module):
    """Parameters that do not lie in memory as their shape says, one of which is viewed as it
    lies.
    """

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(randn(5, 3).t())
        self.conv = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.last = nn.Linear(5, 2)

    def forward(self, x):
        with piper.annotate("PP", 0):
            h = x @ self.turned.t().view(15).view(5, 3).t()
            h = self.conv(h.view(-1, 1, 1, 5).expand(-1, 2, 2, 5)).mean((1, 2))
        with piper.annotate("PP", 1):
            return self.last(h)


@pytest.mark.parametrize("zero", LEVELS)
def test_slices_are_of_the_logical_order(zero):
    assert_equal(Strided(), mse, pipeline(zero), odd_batch(), optimizer=adam, steps=3)


@pytest.mark.parametrize("zero", LEVELS)
def test_parameter_groups_and_learning_rates(zero):
    """A group's options are those of its slices, also where a device has none of the group."""
    torch.manual_seed(0)
    model = Odd().double()
    plain = copy.deepcopy(model)
    named = dict(plain.named_parameters())
    groups = [
        {"params": [named["a.weight"], named["b.weight"]], "weight_decay": 0.3},
        {"params": [named["a.bias"]], "lr": 0.1},
        {"params": [p for n, p in named.items() if n not in ("a.weight", "b.weight", "a.bias")]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
    rates = [group["lr"] for group in optimizer.param_groups]
    with piper.compile(
        model,
        mse,
        pipeline(zero),
        odd_batch(),
        optimizer=adamw,
        param_groups=[
            {"names": ["*.weight"], "weight_decay": 0.3},
            {"names": ["a.bias"], "lr": 0.1},
        ],
        lr_schedule=lambda step: 1.0 / (1 + step),
        backend="inprocess",
    ) as running:
        for step in range(3):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate / (1 + step)
            expected = eager.one_step(plain, mse, odd_batch(), 4, optimizer)
            assert running.step(*odd_batch()).loss == pytest.approx(expected.loss, rel=1e-12)
            for name, tensor in expected.state.items():
                found = running.state_dict()[name]
                torch.testing.assert_close(found, tensor, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("zero", LEVELS)
@pytest.mark.parametrize("replicas", [2, 3])
def test_one_weight_in_every_stage_and_twice_in_some(zero, replicas):
    """Tied across stages, and within two of them: each group of replicas has slices, which are
    added up across groups.
    """
    groups = [[s * replicas + r for r in range(replicas)] for s in range(3)]
    batch = (randn(12, 3), randn(12, 3, seed=1))
    plan = assert_equal(
        TiedFourTimes(), mse, pipeline(zero, groups), batch, optimizer=adam, steps=3, poison=True
    )
    assert plan.dag.shards["a.weight"] == tuple(map(tuple, groups))


@pytest.mark.parametrize("zero", LEVELS)
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("how", ["detached", "no_grad"])
def test_a_stage_reads_a_weight_that_another_one_trains(how, replicas, zero):
    groups = [list(range(replicas)), list(range(replicas, 2 * replicas))]
    batch = (randn(12, 3), randn(12, 3, seed=1))
    assert_equal(
        Borrowed(how), mse, pipeline(zero, groups), batch, optimizer=adam, steps=3, poison=True
    )


class TwoTypes(nn.Module):
    """Parameters of two element types in one region."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
        self.narrow = nn.Parameter(torch.tensor([4.0, -2.0, 1.0], dtype=torch.float32))
        self.other = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))

    def forward(self, x):
        with piper.annotate("PP", 0):
            h = x * self.wide + x * self.narrow.double()
        with piper.annotate("PP", 1):
            return h.sum(1) * self.other


@pytest.mark.parametrize("zero", LEVELS)
def test_element_types_do_not_share_a_message(zero):
    """All numbers are small integers over powers of two: exact in either type, whatever the order
    of sums.
    """
    model = TwoTypes()
    x = torch.arange(-12.0, 12.0, dtype=torch.float64).reshape(8, 3)
    batch = (x, torch.zeros(8, dtype=torch.float64))

    def plain(parameters):
        return torch.optim.SGD(parameters, lr=0.5)

    def loss_fn(outputs, targets):
        return (outputs - targets).mean()

    program = Programs(model, loss_fn, pipeline(zero)).training(batch)
    found = planned.train(program.plan, program.constants, model, [batch] * 2, plain)
    expected = eager.train(model, loss_fn, [batch] * 2, 4, plain)
    assert planned.compare(found, expected).worst == 0.0


# --- layouts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 0, 2), (0, 3, 1)])
def test_regions_shard_as_they_like(order):
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)])

        def forward(self, x):
            for stage, linear in enumerate(self.stages):
                with piper.annotate("PP", stage):
                    x = linear(x).tanh()
            return x

    strategy = [
        *piper.placements.chain([[0, 1], [2, 3], [4, 5]]),
        *(replicate(zero, {"PP": stage}) for stage, zero in enumerate(order)),
        piper.Split({}, num_microbatches=2),
        *piper.schedules.one_f_one_b(num_stages=3, num_microbatches=2),
    ]
    assert_equal(Three(), mse, strategy, odd_batch(), optimizer=adam, steps=3)
    both = [piper.Place({}, [0, 1]), *strategy[3:7]]  # all on the same devices
    assert_equal(Three(), mse, both, odd_batch(), optimizer=adam, steps=3)


@pytest.mark.parametrize("zero", LEVELS)
def test_order_of_directives_does_not_matter(zero):
    """Sharded before it is placed, after it is split, as late as you like."""
    place, shard = piper.placements.chain(PAIRS), replicate(zero)
    split = piper.Split({}, num_microbatches=2)
    for strategy in ([shard, *place, split], [*place, split, shard], [split, shard, *place]):
        assert_equal(Odd(), mse, strategy, odd_batch(), optimizer=adam)


HYBRID = [replicate(2, devices=PAIRS), piper.Split({}, num_microbatches=3)]

LAYOUTS: dict[str, Sequence[Directive]] = {
    "sharded parameters": pipeline(3),
    "one device": [],
    "sharded optimizer": pipeline(1, bucket_size=SMALL),
    "sharded within and replicated across": HYBRID,
    "three replicas": pipeline(3, [[0, 1, 2], [3, 4, 5]]),
    "replicated": pipeline(0),
    "sharded gradients": pipeline(2, [[1, 0], [3, 2]]),
    "one device each": pipeline(0, [[0], [1]]),
    "parameters, other devices": pipeline(3, [[2, 3], [0, 1]]),
}


def trainer(strategy: Sequence[Directive], backend, model=None) -> piper.Trainer:
    torch.manual_seed(0)
    return piper.compile(
        (Odd() if model is None else model).double(),
        mse,
        strategy,
        odd_batch(),
        optimizer=adam,
        backend=backend,
        verify_capture=False,
    )


def assert_same_snapshot(found, expected) -> None:
    assert found.parameters.keys() == expected.parameters.keys()
    for name, tensor in expected.parameters.items():
        assert torch.equal(found.parameters[name], tensor), name
    assert found.optimizer.state.keys() == expected.optimizer.state.keys()
    for name, entries in expected.optimizer.state.items():
        mine = found.optimizer.state[name]
        assert mine.keys() == entries.keys()
        for key, value in entries.items():
            assert mine[key].shape == value.shape
            assert torch.equal(mine[key], value), (name, key)


def test_training_goes_on_under_any_other_layout():
    """One step under each layout in turn, from the snapshot of the one before, Adam's moments
    included; then back to the first.
    """
    torch.manual_seed(0)
    model = Odd().double()
    batches = [(randn(24, 3, seed=s), randn(24, 2, seed=50 + s)) for s in range(len(LAYOUTS) + 1)]
    expected = eager.train(model, mse, batches, 1, adam)
    names = [*LAYOUTS, next(iter(LAYOUTS))]
    snapshot = None
    for name, batch, wanted in zip(names, batches, expected, strict=True):
        with InProcessBackend(threads=1) as backend, trainer(LAYOUTS[name], backend) as running:
            if snapshot is not None:
                backend.restore(snapshot)
                assert_same_snapshot(backend.snapshot(), snapshot)
            assert running.step(*batch).loss == pytest.approx(wanted.loss, rel=1e-10), name
            snapshot = backend.snapshot()
            for key, tensor in wanted.state.items():
                torch.testing.assert_close(snapshot.parameters[key], tensor, rtol=1e-10, atol=1e-12)
    shapes = {n: p.shape for n, p in model.named_parameters()}
    for name, entries in snapshot.optimizer.state.items():
        assert entries["exp_avg"].shape == entries["exp_avg_sq"].shape == shapes[name]
        assert entries["step"] == len(batches)


@pytest.mark.parametrize("zero", LEVELS)
def test_state_dict_between_layouts(zero):
    """Under the user's names and shapes; loading one reaches every slice and every whole copy."""
    torch.manual_seed(1)
    other = Odd().double()
    with trainer(pipeline(zero), "inprocess") as running:
        running.step(*odd_batch())
        running.load_state_dict(other.state_dict())
        state = running.state_dict()
        assert state.keys() == other.state_dict().keys()
        for name, tensor in other.state_dict().items():
            assert torch.equal(state[name], tensor)
        with torch.no_grad():
            loss = float(mse(other(odd_batch()[0]), odd_batch()[1]))
        assert running.evaluate(*odd_batch()).loss == pytest.approx(loss, rel=1e-12)
        running.step(*odd_batch())
        trained = running.state_dict()
    with trainer([], "inprocess") as plain:
        plain.load_state_dict(trained)
        assert all(torch.equal(t, trained[n]) for n, t in plain.state_dict().items())


@pytest.mark.parametrize("zero", LEVELS)
@pytest.mark.parametrize("rows", [24, 48, 7])
def test_evaluation_between_steps(zero, rows):
    """More, fewer, and an odd number of rows; the parameters are the new ones, and training goes on
    as if nothing was.
    """
    torch.manual_seed(0)
    plain, batch, other = Odd().double(), odd_batch(), odd_batch(rows)
    expected = eager.train(plain, mse, [batch] * 2, 4, adam)
    with trainer(pipeline(zero), "inprocess") as running:
        for wanted in expected:
            assert running.step(*batch).loss == pytest.approx(wanted.loss, rel=1e-12)
            plain.load_state_dict(wanted.state)
            with torch.no_grad():
                loss = float(mse(plain(other[0]), other[1]))
            assert running.evaluate(*other).loss == pytest.approx(loss, rel=1e-10)


@pytest.mark.parametrize("zero", LEVELS)
def test_gradients_of_several_calls_add_up(zero):
    torch.manual_seed(0)
    plain, batches = Odd().double(), [(randn(24, 3, seed=s), randn(24, 2, seed=s)) for s in (5, 6)]
    optimizer = adam(list(plain.parameters()))
    with trainer(pipeline(zero), "inprocess", copy.deepcopy(plain)) as running:
        for _ in range(2):
            optimizer.zero_grad()
            for batch in batches:
                mse(plain(batch[0]), batch[1]).backward()
            optimizer.step()
            running.step(*batches[0], update=False)
            running.step(*batches[1])
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(running.state_dict()[name], tensor, rtol=1e-9, atol=1e-12)


# --- bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", LEVELS)
def test_nothing_to_shard_over(zero):
    with pytest.raises(DirectiveError, match=r"\[0\] leaves nothing to shard over.*at least 2"):
        assert_equal(Odd(), mse, [replicate(zero, devices=[0])], odd_batch())
    with pytest.raises(DirectiveError, match=r"leaves nothing to shard over"):
        assert_equal(Odd(), mse, [replicate(zero, devices=[[0], [1]])], odd_batch())


@pytest.mark.parametrize("zero", LEVELS)
def test_a_group_of_one_that_was_placed_is_not_sharded(zero):
    """The same file serves one replica."""
    strategy = [piper.Place({}, [0]), replicate(zero), piper.Split({}, num_microbatches=2)]
    plan = assert_equal(Odd(), mse, strategy, odd_batch(), optimizer=adam)
    assert plan.dag.shards == {}


@pytest.mark.parametrize(
    ("devices", "error", "match"),
    [
        ([[0, 1], [2]], PlacementError, r"inner lists of devices must have equal lengths.*\[2\]"),
        ([[0, 1], []], PlacementError, r"needs at least one device, found an empty list"),
        (
            [[0, 1], [1, 2]],
            PlacementError,
            r"lists distinct devices counted from 0, found \[0, 1, 1, 2\]",
        ),
        ([[0, 1], 2], PlacementError, r"a list of devices or a list of lists"),
        ([], PlacementError, r"needs at least one device, found an empty list"),
    ],
)
def test_malformed_lists(devices, error, match):
    with pytest.raises(error, match=match):
        assert_equal(Odd(), mse, [replicate(3, devices=devices)], odd_batch())


def test_overlapping_directives():
    strategy = [*piper.placements.chain(PAIRS), replicate(1, {"PP": 0}), replicate(3)]
    with pytest.raises(DirectiveError, match=r"'F PP=0' is replicated twice: by directive 2"):
        assert_equal(Odd(), mse, strategy, odd_batch())


def under_two_directives(one: int, two: int) -> list[Directive]:
    return [
        *piper.placements.chain([[0, 1], [2, 3], [4, 5]]),
        replicate(one, {"PP": 0}),
        replicate(two, {"PP": [1, 2]}),
    ]


@pytest.mark.parametrize("zero", [0, *LEVELS])
def test_a_shared_parameter_under_two_directives_that_ask_the_same(zero):
    batch = (randn(8, 3), randn(8, 3, seed=1))
    assert_equal(TiedFourTimes(), mse, under_two_directives(zero, zero), batch)


@pytest.mark.parametrize(("one", "two"), [(1, 3), (0, 2)])
def test_a_shared_parameter_under_two_directives(one, two):
    strategy, batch = under_two_directives(one, two), (randn(8, 3), randn(8, 3, seed=1))
    with pytest.raises(DirectiveError, match=r"'a\.(weight|bias)'.*one Replicate must claim all"):
        assert_equal(TiedFourTimes(), mse, strategy, batch)


def test_a_level_that_does_not_exist():
    with pytest.raises(DirectiveError, match="found 4"):
        pipeline(4)

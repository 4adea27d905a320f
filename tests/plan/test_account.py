import math
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from random import Random

import pytest
import torch
from tests.equality.expert_matrix import Stack
from tests.plan.odd import Step, random_step
from torch import nn

import piper
from piper.api.programs import model_tensors
from piper.api.strategies import pipeline
from piper.backends.inprocess import InProcessBackend
from piper.backends.measured import measure
from piper.capture import annotate, capture_with_constants
from piper.devices.gloo import _Layout
from piper.devices.memory import InMemoryCommunicator
from piper.directives.replicate import Replicate
from piper.dtypes import DType
from piper.ir.body import Body, Call, Ref, TensorSpec
from piper.ir.dag import GradientUse, Role
from piper.ir.storages import Given, Made, output_memory
from piper.models import (
    Transformer,
    TransformerConfig,
    UNet,
    UNetConfig,
    moe_loss,
    transformer_loss,
    unet_loss,
)
from piper.ops.all_gather import AllGatherBucket, RefreshBucket
from piper.ops.base import RandomKey
from piper.plan.account import account, adam_bytes, gloo_frame
from piper.plan.memory import Category
from piper.runtime.batch import signature
from piper.runtime.code import chunk_function
from piper.runtime.optimizer import OptimizerSpec
from piper.runtime.state import ModelState

ROWS, LENGTH, VOCABULARY, LAYERS = 2, 8, 32, 4
VIRTUAL = ("interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b")
BOUNDED = ("1f1b", "zb_h1", "dualpipe", *VIRTUAL)
"""The schedules under which the activations of a fixed number of microbatches are alive at once."""
ADAM = OptimizerSpec(lambda parameters: torch.optim.Adam(parameters, lr=1e-3))

MATRIX = [
    (tied, pp, dp, zero, schedule)
    for tied, pp, dp, zero, schedule in product((False, True), (1, 2), (1, 2), range(4), SCHEDULES)
    if dp > 1 or zero == 0
]
QUICK = [
    (False, 1, 1, 0, "gpipe"),
    (True, 2, 1, 0, "1f1b"),
    (True, 2, 2, 1, "1f1b"),
    (False, 1, 2, 2, "gpipe"),
    (False, 2, 2, 3, "interleaved_1f1b"),
    (True, 1, 2, 3, "1f1b"),
]


@cache
def captured(tied, stages, precision=None):
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=VOCABULARY,
        context=LENGTH,
        width=16,
        num_layers=LAYERS,
        num_heads=2,
        num_stages=stages,
        tied_embedding=tied,
    )
    model = Transformer(config)
    return model, capture_with_constants(model, transformer_loss, batch(ROWS), precision=precision)


def batch(rows):
    ids = torch.arange(rows * LENGTH).view(rows, LENGTH) % VOCABULARY
    return ids, ids.flip(0)


def make(tied, pp, dp, zero, schedule, microbatches=4, precision=None):
    """The model, its verified plan, a batch."""
    virtual = 2 if schedule in (*VIRTUAL, "looped_bfs") else 1
    model, found = captured(tied, pp * virtual, precision)
    groups = [list(range(dp * rank, dp * (rank + 1))) for rank in range(pp)]
    strategy = pipeline(
        schedule, groups, microbatches, num_virtual_stages=virtual, zero=zero, bucket_size=0.004
    )
    rows = ROWS * dp * microbatches
    plan = piper.plan(piper.apply(replace(found.dag, batch_size=rows), strategy))
    piper.verify(plan)
    return model, plan, batch(rows)


def require_equal(plan, planned, measured):
    """Every byte, by category at the peak and in total after every instruction."""
    for mine, foretold, found in zip(plan.devices, planned, measured, strict=True):
        for i, (a, b) in enumerate(zip(foretold.curve, found.curve, strict=True)):
            assert a == b, f"device {mine.device} after {i}: {mine.instructions[i].describe()}"
        assert foretold == found


def params(cases):
    return pytest.mark.parametrize(("tied", "pp", "dp", "zero", "schedule"), cases)


@params(QUICK)
def test_a_step_uses_what_the_plan_says(tied, pp, dp, zero, schedule):
    model, plan, data = make(tied, pp, dp, zero, schedule)
    measured = measure(plan, data, model_tensors(model), ADAM)
    require_equal(plan, account(plan, adam_bytes), measured)


@pytest.mark.full
@params([case for case in MATRIX if case not in QUICK])
def test_every_step_uses_what_the_plan_says(tied, pp, dp, zero, schedule):
    test_a_step_uses_what_the_plan_says(tied, pp, dp, zero, schedule)


@pytest.mark.parametrize("zero", range(4))
def test_a_step_in_mixed_precision_uses_what_the_plan_says(zero):
    """Weights of two bytes for chunks, master weights and moments of four, or slices of these."""
    model, plan, data = make(True, 2, 2, zero, "1f1b", precision="bf16")
    planned = account(plan, adam_bytes)
    require_equal(plan, planned, measure(plan, data, model_tensors(model), ADAM))
    for mine, memory in zip(plan.devices, planned, strict=True):
        shards = [info for info in mine.slots if info.role is Role.SHARD]
        assert {info.message.dtype for info in shards} == {DType.FLOAT32}
        elements = sum(math.prod(info.message.shape) for info in shards)
        assert memory.highest[Category.SHARDS] == 4 * elements
        copies = 0 if zero == 3 else 2 * elements * (1 if zero == 0 else 2)
        assert memory.highest[Category.PARAMETERS] == copies


class Norms(nn.Module):
    """Buffers that are written, a parameter and a buffer that nothing uses, sizes that no group
    divides.
    """

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 7), nn.BatchNorm1d(7)
        self.second = nn.Linear(7, 3)
        self.unused = nn.Parameter(torch.zeros(11))
        self.register_buffer("idle", torch.zeros(5))

    def forward(self, x):
        with annotate("PP", 0):
            x = torch.relu(self.norm(self.first(x)))
        with annotate("PP", 1):
            return self.second(x)


def by_valid_rows(outputs, targets):
    loss = nn.functional.cross_entropy(outputs, targets, ignore_index=-1, reduction="sum")
    return loss, (targets >= 0).sum()


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_buffers_and_what_is_unused_count(zero):
    torch.manual_seed(0)
    model, data = Norms(), (torch.rand(8, 4), torch.arange(8) % 3)
    found = capture_with_constants(model, by_valid_rows, data)
    strategy = pipeline(
        "1f1b", [[0, 1], [2, 3]], 2, zero=zero, bucket_size=1e-4, replicated_buffers="mean"
    )
    plan = piper.plan(piper.apply(found.dag, strategy))
    sgd = OptimizerSpec(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    planned = account(plan, 1.0)
    measured = measure(plan, data, model_tensors(model), sgd, found.constants)
    require_equal(plan, planned, measured)
    buffers = sum(b.nbytes for b in model.buffers())
    assert planned[0].by_category[Category.BUFFERS] == buffers


def test_constants_and_losses_that_keep_elementwise_memory():
    torch.manual_seed(0)
    model, image = UNet(UNetConfig(width=4, image_size=8)), torch.rand(8, 3, 8, 8)
    found = capture_with_constants(model, unet_loss, (image, image))
    strategy = pipeline("interleaved_1f1b", [[0, 1], [2, 3]], 2, num_virtual_stages=2, zero=2)
    plan = piper.plan(piper.apply(found.dag, strategy))
    measured = measure(plan, (image, image), model_tensors(model), ADAM, found.constants)
    require_equal(plan, account(plan, adam_bytes), measured)


def require_as_planned(step):
    model, plan, found = step.plan()
    measured = measure(plan, step.batch(), model_tensors(model), ADAM, found.constants)
    require_equal(plan, account(plan, adam_bytes), measured)


STEPS = [
    Step("1f1b", zero=3),
    Step("1f1b", zero=3, bucket_size=1e-4, loss="weighted", clipped=True),
    Step("gpipe", zero=2, extra="offload", use=GradientUse.KEEP),
    Step("zb_h1", zero=0, loss="weighted", use=GradientUse.ADD),
    Step("zb_h1", zero=2, precision="fp16", extra="recompute"),
    Step("dualpipe", zero=3, extra="both", precision="bf16"),
    Step("dualpipe", zero=1, dp=1),
    Step("zbv", zero=3, extra="offload", use=GradientUse.ADD, clipped=True),
    Step("dualpipev", zero=2, extra="recompute", bucket_size=1e-4),
    Step("interleaved_1f1b", zero=1, precision="fp16", loss="weighted", use=GradientUse.KEEP),
    Step("interleaved_zero_bubble", zero=3, extra="both", bucket_size=1e-4),
    Step("looped_bfs", zero=3, precision="bf16", use=GradientUse.ADD),
]


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_odd_steps_use_what_the_plan_says(step):
    require_as_planned(step)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_any_step_uses_what_the_plan_says(seed):
    choose = Random(seed)
    for _ in range(20):
        require_as_planned(random_step(choose))


# --- what schedules and sharding save -----------------------------------------------------------------


def activations(schedule, microbatches, dp=1, zero=0):
    _, plan, _ = make(False, 2, dp, zero, schedule, microbatches)
    return [memory.highest[Category.ACTIVATIONS] for memory in account(plan)]


@pytest.mark.parametrize("schedule", BOUNDED)
def test_saved_activations_do_not_grow_with_the_microbatches(schedule):
    """Under schedules that split the backward, what waits for its second half included."""
    assert activations(schedule, 4) == activations(schedule, 8) == activations(schedule, 16)


@pytest.mark.parametrize("schedule", ["gpipe", "looped_bfs"])
def test_saved_activations_grow_where_all_forwards_come_first(schedule):
    few, many = activations(schedule, 4), activations(schedule, 8)
    assert all(b > 1.8 * a for a, b in zip(few, many, strict=True))


def test_under_sharding_live_activations_are_bounded_by_the_stage_depth():
    assert activations("1f1b", 2, 2, 3) == activations("1f1b", 16, 2, 3)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zbv", "dualpipev"])
def test_measured_activations_do_not_grow(schedule):
    found = []
    for microbatches in (4, 6):
        model, plan, data = make(False, 2, 1, 0, schedule, microbatches)
        measured = measure(plan, data, model_tensors(model), ADAM)
        found.append([memory.highest[Category.ACTIVATIONS] for memory in measured])
    assert found[0] == found[1]


def test_sharding_divides_what_it_says():
    whole = sum(p.nbytes for p in captured(False, 1)[0].parameters())
    trained = len(list(captured(False, 1)[0].parameters()))
    levels = [account(make(False, 1, 2, zero, "1f1b")[1], adam_bytes)[0] for zero in range(4)]
    state = [(m.by_category[Category.PARAMETERS], m.by_category[Category.SHARDS]) for m in levels]
    assert state == [(whole, 0), (whole, whole // 2), (whole, whole // 2), (0, whole // 2)]
    optimizer = [m.by_category[Category.OPTIMIZER] for m in levels]
    assert optimizer == [2 * whole + 4 * trained] + [whole + 4 * trained] * 3
    gradients = [m.highest[Category.GRADIENTS] for m in levels]
    assert gradients[0] == gradients[1] == whole


def test_only_the_state_is_left_after_a_step():
    _, plan, _ = make(True, 2, 1, 0, "1f1b")
    for mine, memory in zip(plan.devices, account(plan, adam_bytes), strict=True):
        state = {s.name: s.message.nbytes for s in mine.slots if s.role == "parameter"}
        seeds = sum(s.message.nbytes for s in mine.slots if s.role == "seed")
        optimizer = sum(map(adam_bytes, state.values()))
        in_flight = memory.curve[-1] - (sum(state.values()) + seeds + optimizer)
        # The last message that the device sent: nothing waits for it but the end of the step.
        assert in_flight in (0, ROWS * LENGTH * 16 * 4)


@pytest.mark.parametrize(
    ("zero", "schedule"), [(1, "1f1b"), *((3, schedule) for schedule in BOUNDED)]
)
def test_all_gathers_are_executed_as_often_as_the_plan_says(zero, schedule, monkeypatch):
    model, plan, data = make(False, 2, 2, zero, schedule)
    executed = Counter()
    gather = InMemoryCommunicator.all_gather

    def counting(self, out, shard):
        executed[self.rank] += 1
        return gather(self, out, shard)

    monkeypatch.setattr(InMemoryCommunicator, "all_gather", counting)
    with InProcessBackend(threads=1) as backend:
        backend.start(plan.num_devices)
        backend.load("plan", plan, signature(data))
        backend.initialise("plan", model_tensors(model), ADAM)
        backend.run("plan", [data], first_step=0)
    planned = Counter(
        instruction.members.index(mine.device)
        for mine in plan.devices
        for instruction in mine.instructions
        if isinstance(instruction, (AllGatherBucket, RefreshBucket))
    )
    assert executed == planned
    assert planned[0] > 0


# --- what is measured ---------------------------------------------------------------------------------


def test_what_nobody_holds_is_found(monkeypatch):
    model, plan, data = make(False, 1, 1, 0, "1f1b")
    leaked, update = [], ModelState.update

    def leaking(self, *args, **options):
        leaked.append(torch.zeros(1000))
        update(self, *args, **options)

    monkeypatch.setattr(ModelState, "update", leaking)
    (found,) = measure(plan, data, model_tensors(model), ADAM)
    assert found.highest[Category.OTHER] == 4000 * len(leaked) > 0
    assert account(plan)[0].highest[Category.OTHER] == 0


# --- views --------------------------------------------------------------------------------------------


def spec(*shape):
    return TensorSpec(shape, DType.FLOAT32)


def call(target, *args, results):
    return Call(target, args, (), results)


def test_views_share_the_memory_of_what_they_view():
    body = Body(
        (spec(6, 4), spec(6, 4)),
        (
            call("aten.mm.default", Ref(0), Ref(1), results=(spec(6, 12),)),
            call("aten.split.Tensor", Ref(2), 4, 1, results=(spec(6, 4),) * 3),
            call("operator.getitem", Ref(3), 1, results=(spec(6, 4),)),
            call("aten.reshape.default", Ref(0), results=(spec(24),)),
            call("aten.max.dim", Ref(1), 0, results=(spec(4), spec(4))),
            call("operator.getitem", Ref(6), 1, results=(spec(4),)),
        ),
        (4, 2, 5, 0, 7),
    )
    whole, index = Made(0, 6 * 12 * 4), Made(2, 16)
    assert output_memory(body, {}) == (whole, whole, Given(0), Given(0), index)


@pytest.mark.parametrize("name", ["transformer", "tied", "unet"])
def test_outputs_are_where_torch_puts_them(name):
    if name == "unet":
        image = torch.rand(2, 3, 8, 8)
        model = UNet(UNetConfig(width=4, image_size=8))
        dag = capture_with_constants(model, unet_loss, (image, image)).dag
    else:
        dag = captured(name == "tied", 2)[1].dag
    bindings = {dag.batch_symbol: 2}
    for body in dag.bodies.values():
        inputs = [torch.ones(s.sizes(bindings), dtype=getattr(torch, s.dtype)) for s in body.inputs]
        key = RandomKey(0, 0, 0, tuple(range(body.num_rngs)))
        with torch.no_grad():
            outputs = chunk_function(body, bindings, torch.device("cpu"))(list(inputs), key)
        memory = output_memory(body, bindings)
        places = {t.untyped_storage().data_ptr(): Given(i) for i, t in enumerate(inputs)}
        for output, expected in zip(outputs, memory, strict=True):
            storage = output.untyped_storage()
            assert places.setdefault(storage.data_ptr(), expected) == expected
            if isinstance(expected, Made):
                assert expected.nbytes == storage.nbytes()
        assert len({*places.values()}) == len(places)


@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (2, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool])
def test_frames_are_as_large_as_gloos(shape, dtype):
    assert gloo_frame(math.prod(shape) * dtype.itemsize) == _Layout(shape, dtype).size


def test_frames_are_counted_where_they_are_held():
    _, plan, _ = make(False, 2, 1, 0, "1f1b")
    bare, framed = account(plan), account(plan, frame_bytes=gloo_frame)
    for a, b in zip(bare, framed, strict=True):
        assert 0 < b.peak - a.peak <= 72 * 2 * 4
        assert a.position == b.position


def test_replicas_use_the_same():
    _, plan, _ = make(False, 2, 2, 0, "1f1b")
    assert any(isinstance(d, Replicate) for d in pipeline("1f1b", [[0, 1]], 4))
    planned = [replace(memory, device=0) for memory in account(plan, adam_bytes)]
    assert planned[0] == planned[1] != planned[2] == planned[3]


# --- offloaded activations --------------------------------------------------------------------------


OFFLOADED = [
    ("gpipe", 1, 1, 0, [piper.Offload({})]),
    ("1f1b", 2, 1, 0, [piper.Offload({"PP": 0})]),
    ("interleaved_1f1b", 2, 1, 0, [piper.Recompute({"PP": [0, 1]}), piper.Offload({})]),
    ("1f1b", 2, 2, 3, [piper.Offload({})]),
]


def offloaded(schedule, pp, dp, zero, extra, microbatches=4, **limits):
    """Like :func:`make`, with more directives."""
    virtual = 2 if schedule in (*VIRTUAL, "looped_bfs") else 1
    model, found = captured(False, pp * virtual)
    groups = [list(range(dp * rank, dp * (rank + 1))) for rank in range(pp)]
    strategy = pipeline(
        schedule, groups, microbatches, num_virtual_stages=virtual, zero=zero, bucket_size=0.004
    )
    rows = ROWS * dp * microbatches
    dag = piper.apply(replace(found.dag, batch_size=rows), [*strategy, *extra])
    plan = piper.plan(dag, **limits)
    piper.verify(plan)
    return model, plan, batch(rows)


@pytest.mark.parametrize(("schedule", "pp", "dp", "zero", "extra"), OFFLOADED)
def test_offloaded_activations_use_what_the_plan_says(schedule, pp, dp, zero, extra):
    model, plan, data = offloaded(schedule, pp, dp, zero, extra)
    planned = account(plan, adam_bytes)
    assert any(memory.highest[Category.HOST] for memory in planned)
    require_equal(plan, planned, measure(plan, data, model_tensors(model), ADAM))


def test_offloading_keeps_memory_from_growing_with_the_microbatches():
    """Under gpipe every microbatch's activations wait for the last forward: in host memory, if they
    are offloaded.
    """

    def activations(microbatches, extra):
        model, plan, data = offloaded("gpipe", 1, 1, 0, extra, microbatches)
        (planned,) = account(plan, adam_bytes)
        if microbatches < 8:
            (measured,) = measure(plan, data, model_tensors(model), ADAM)
            assert measured == planned
        return planned

    kept = {m: activations(m, []) for m in (2, 4, 8)}
    moved = {m: activations(m, [piper.Offload({})]) for m in (2, 4, 8)}
    one = kept[4].peak - kept[2].peak  # of two microbatches
    assert one > 0
    assert kept[8].peak - kept[4].peak == 2 * one
    assert moved[8].peak == moved[4].peak < kept[4].peak < kept[8].peak
    assert moved[8].highest[Category.HOST] == 2 * moved[4].highest[Category.HOST] == 4 * one


def test_host_memory_is_no_part_of_the_peak():
    _, plan, _ = offloaded("gpipe", 1, 1, 0, [piper.Offload({})])
    (memory,) = account(plan)
    on_device = sum(n for c, n in memory.by_category.items() if c is not Category.HOST)
    assert memory.by_category[Category.HOST] > 0
    assert memory.peak == on_device == max(memory.curve)


PAIRS = (
    piper.Place({}, devices=[0, 1, 2, 3]),
    piper.Replicate({}, shard_grads=True),
    piper.Shard({"EP": 0}, devices=[[0, 1], [2, 3]]),
)
APART = (
    piper.Place({"EP": None}, devices=[0, 1]),
    piper.Replicate({}, shard_grads=True),
    piper.Shard({"EP": 0}, devices=[1, 2]),
)
"""One device has tokens only, one has both, one has experts only."""


def experts(form, strategy):
    """A model with a mixture of experts, planned on devices that share its experts."""
    model = Stack(1, form)
    ids = lambda rows: torch.arange(rows * 3).view(rows, 3) % 7  # noqa: E731
    data = (ids(16), ids(16).flip(0))
    found = capture_with_constants(model, moe_loss, data)
    split = piper.Split({}, num_microbatches=2)
    plan = piper.plan(piper.apply(found.dag, [*strategy, split]))
    piper.verify(plan)
    return plan, measure(plan, data, model_tensors(model), ADAM)


@pytest.mark.parametrize("strategy", [PAIRS, APART], ids=["pairs", "apart"])
def test_a_step_with_shared_experts_uses_what_the_plan_says(strategy):
    plan, measured = experts("capacity", strategy)
    require_equal(plan, account(plan, adam_bytes), measured)


@pytest.mark.parametrize("strategy", [PAIRS, APART], ids=["pairs", "apart"])
def test_the_plan_bounds_what_a_step_with_uneven_messages_uses(strategy):
    """What is exchanged depends on the data; all else does not."""
    plan, measured = experts("dropless", strategy)
    for foretold, found in zip(account(plan, adam_bytes), measured, strict=True):
        assert all(a >= b for a, b in zip(foretold.curve, found.curve, strict=True))
        for category in set(Category) - {Category.COMMUNICATION}:
            assert foretold.highest[category] == found.highest[category]

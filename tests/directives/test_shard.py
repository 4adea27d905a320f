"""Shard: small expert regions against plain PyTorch, forced routings, what is refused and how."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from msgspec import structs
from tests.cases.equal import TOLERANCE, mse, randint, randn, rolled, sgd
from tests.equality import eager, planned
from torch import nn
from torch.nn import functional

import piper
from piper.capture import Captured, capture_with_constants
from piper.errors import CommunicationError, DirectiveError, PlacementError, RunError
from piper.ir.check import check_dag
from piper.ir.dag import Comm, Role
from piper.ir.edit import replace_nodes
from piper.models.routing import sort_by_expert
from piper.plan.model import Plan

EXPERTS, WIDTH, HIDDEN = 4, 3, 5


def staged(model: nn.Module) -> nn.Module:
    """*model* in a region, which its experts' region is in."""
    piper.annotate_module(model, "PP", 0)
    return model


STEPS = 2


@cache
def prepared(make: type[nn.Module], *arguments: object) -> tuple[nn.Module, Captured]:
    """The model that *make* makes, in float64, and its capture; the rows of a batch do not matter
    to it.
    """
    model = staged(make(*arguments)).double()
    batch = dropless_batch if issubclass(make, Dropless) else capacity_batch
    return model, capture_with_constants(model, mse, batch(8))


def assert_equal(make, strategy, batch: eager.Batch, *arguments: object, **backend: object) -> Plan:
    """Train on *batch* (rolled by one row each time) under *strategy* and in plain PyTorch; raise
    unless all is equal.
    """
    model, captured = prepared(make, *arguments)
    batches = [rolled(batch, step) for step in range(STEPS)]
    dag = replace(captured.dag, batch_size=eager.count_rows(batch))
    plan = piper.plan(piper.apply(dag, strategy))
    piper.verify(plan)
    found = planned.train(plan, captured.constants, model, batches, sgd, **backend)
    count = plan.num_replicas * plan.num_microbatches
    worst = planned.compare(found, eager.train(model, mse, batches, count, sgd))
    assert worst.worst <= TOLERANCE, worst
    return plan


PAIR = [piper.Place({}, devices=[0, 1]), piper.Replicate({})]
QUAD = [piper.Place({}, devices=[0, 1, 2, 3]), piper.Replicate({})]


class Dropless(nn.Module):
    """Each row goes to the expert that ``chosen`` says; number EXPERTS: to none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))
        self.scale = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        routed = sort_by_expert(self.scale(x), chosen[:, None], EXPERTS)
        with piper.annotate("EP", 0):
            hidden = functional.silu(piper.grouped_mm(routed.rows, self.up, routed.counts))
            rows = piper.grouped_mm(hidden, self.down, routed.counts)
        return self.scale(routed.unsort(rows)) + x


def dropless_batch(rows: int, chosen: torch.Tensor | None = None) -> tuple[object, torch.Tensor]:
    chosen = torch.zeros(rows, dtype=torch.int64) if chosen is None else chosen
    return (randn(rows, WIDTH, seed=1), chosen), randn(rows, WIDTH, seed=2)


ROUTINGS = {
    "uniform": lambda rows: torch.arange(rows) % EXPERTS,
    "random": lambda rows: randint(EXPERTS, rows),
    "all to one expert": lambda rows: torch.full((rows,), 2),
    "none to one device": lambda rows: torch.arange(rows) % 2,
    "some to none": lambda rows: randint(EXPERTS + 1, rows),
    "none at all in one microbatch": lambda rows: (torch.arange(rows) >= rows // 2) * EXPERTS,
}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_dropless(routing: str):
    strategy = [*PAIR, piper.Shard({"EP": 0}), piper.Split({}, num_microbatches=2)]
    rows = 16
    plan = assert_equal(
        Dropless, strategy, dropless_batch(rows, ROUTINGS[routing](rows)), poison=True
    )
    assert {info.experts for mine in plan.devices for info in mine.slots} == {
        None,
        (0, 2),
        (1, 2),
    }


def test_messages_may_take_any_time():
    strategy = [*PAIR, piper.Shard({"EP": 0}), piper.Split({}, num_microbatches=2)]
    batch = dropless_batch(16, ROUTINGS["random"](16))
    assert_equal(Dropless, strategy, batch, delay=0.002, poison=True)


def test_room_for_tokens_is_what_was_asked_for():
    shard = piper.Shard({"EP": 0}, capacity_factor=1.5)
    strategy = [*PAIR, shard, piper.Split({}, num_microbatches=2)]
    plan = assert_equal(Dropless, strategy, dropless_batch(16, ROUTINGS["uniform"](16)))
    shapes = {
        plan.devices[0].slots[slot].message.shape
        for i in plan.devices[0].instructions
        if i.op == "exchange_rows" and not i.back
        for slot in i.outputs
    }
    assert shapes == {(6, WIDTH)}  # 1.5 times the 4 rows of a microbatch, not 2 times


def test_too_many_tokens_name_the_region_and_by_how_many():
    shard = piper.Shard({"EP": 0}, capacity_factor=1.25)
    strategy = [*PAIR, shard, piper.Split({}, num_microbatches=2)]
    batch = dropless_batch(16, ROUTINGS["all to one expert"](16))
    with pytest.raises(RunError, match=r"EP=0.*received 8 tokens.*3 more than the 5") as caught:
        assert_equal(Dropless, strategy, batch)
    assert not isinstance(caught.value, CommunicationError)


class Residual(Dropless):
    """What the region adds to a row, it would add to those that no expert has."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        routed = sort_by_expert(self.scale(x), chosen[:, None], EXPERTS)
        with piper.annotate("EP", 0):
            rows = piper.grouped_mm(routed.rows, self.up, routed.counts).tanh()
            rows = piper.grouped_mm(rows, self.down, routed.counts) + routed.rows
        return self.scale(routed.unsort(rows)) + x


def test_rows_without_an_expert_must_come_out_as_zeros():
    strategy = [*PAIR, piper.Shard({"EP": 0}), piper.Split({}, num_microbatches=2)]
    assert_equal(Residual, strategy, dropless_batch(16, ROUTINGS["random"](16)))
    with pytest.raises(RunError, match=r"counts are of 0 of 4 rows.*not known to be zero"):
        assert_equal(Residual, strategy, dropless_batch(16, torch.full((16,), EXPERTS)))


class Capacity(nn.Module):
    """``x[B, E, width]``: row b has one token for each expert; so an expert has B of them."""

    def __init__(self, form: str = "module") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.form = form
        self.before = nn.Linear(WIDTH, WIDTH)
        self.experts = Layers()
        if form == "module":
            piper.annotate_module(self.experts, "EP", 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x).tanh()
        if self.form == "module":
            return self.experts(x.transpose(0, 1)).transpose(0, 1) + x
        if self.form == "merged":
            flat = x.transpose(0, 1).reshape(-1, WIDTH) * 2
            with piper.annotate("EP", 0):
                out = self.experts(flat.view(EXPERTS, -1, WIDTH))
            return out.transpose(0, 1) + x
        with piper.annotate("EP", 0):  # sizes of a tensor from outside
            experts, tokens = x.shape[1], x.shape[0]
            out = self.experts(x.transpose(0, 1).reshape(experts, tokens, -1))
            out = out.reshape(experts * tokens, WIDTH).view(experts, tokens, WIDTH)
        return out.transpose(0, 1) + x


class Layers(nn.Module):
    """Two layers with biases; a gain that all experts share."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * HIDDEN))
        self.bias = nn.Parameter(torch.randn(EXPERTS, 1, 2 * HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))
        self.shift = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.gain = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.baddbmm(self.bias, x, self.up).chunk(2, -1)
        hidden = functional.gelu(gate) * up
        hidden = hidden / (hidden.square().mean(-1, keepdim=True) + 1).sqrt()
        return (torch.bmm(hidden, self.down) + self.shift[:, None]) * self.gain


def capacity_batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return randn(rows, EXPERTS, WIDTH, seed=1), randn(rows, EXPERTS, WIDTH, seed=2)


@pytest.mark.parametrize("form", ["module", "merged", "sizes from tensors"])
def test_capacity(form: str):
    shard = piper.Shard({"EP": 0}, replicated=["*gain"])
    strategy = [*PAIR, shard, piper.Split({}, num_microbatches=2)]
    plan = assert_equal(Capacity, strategy, capacity_batch(8), form, poison=True)
    held = {i.name: i.message.shape for i in plan.devices[1].slots if i.role is Role.PARAMETER}
    assert held["experts.up"] == (EXPERTS // 2, WIDTH, 2 * HIDDEN)
    assert held["experts.gain"] == (WIDTH,)


@pytest.mark.parametrize(
    "strategy",
    [
        [piper.Shard({"EP": 0}, devices=[0, 1], replicated=["*gain"]), *PAIR[1:]],
        [piper.Split({}, num_microbatches=2), *PAIR],
        [*PAIR, piper.Recompute({})],
        [piper.Place({}, devices=[0, 1]), piper.Replicate({}, shard_params=True)],
        [piper.Place({}, devices=[0, 1]), piper.Replicate({"EP": None})],
    ],
    ids=["first", "after split", "recomputed", "rest sharded", "no replicate of its own"],
)
def test_the_place_in_the_program_does_not_matter(strategy):
    if not isinstance(strategy[0], piper.Shard):
        strategy = [*strategy, piper.Shard({"EP": 0, "PASS": "F"}, replicated=["*gain"])]
    else:
        strategy = [*strategy[:1], piper.Place({"EP": None}, devices=[0, 1]), *strategy[1:]]
    assert_equal(Capacity, strategy, capacity_batch(8))


def test_a_group_of_its_own():
    """The experts live on other devices than the rest."""
    strategy = [
        piper.Place({"EP": None}, devices=[0, 1]),
        piper.Place({"EP": 0}, devices=[2, 3]),
        piper.Replicate({"EP": None}),
        piper.Shard({"EP": 0}),
        piper.Split({}, num_microbatches=2),
    ]
    plan = assert_equal(Dropless, strategy, dropless_batch(16, ROUTINGS["random"](16)))
    assert {d for c in plan.dag.comms() if "rows" in c.label for d in c.participants} == {2, 3}


@pytest.mark.parametrize("zero", [0, 2])
def test_gradients_are_reduced_over_replicas_of_the_same_experts(zero: int):
    replicate = piper.Replicate(
        {}, shard_optimizer=zero == 1, shard_grads=zero == 2, shard_params=zero == 3
    )
    strategy = [
        QUAD[0],
        replicate,
        piper.Shard({"EP": 0}, devices=[[0, 1], [2, 3]], replicated=["*gain"]),
        piper.Split({}, num_microbatches=2),
    ]
    plan = assert_equal(Capacity, strategy, capacity_batch(16))
    groups = {
        comm.groups
        for comm in plan.dag.comms()
        if comm.work.kind in ("all_reduce", "reduce_scatter") and "experts.up" in names(plan, comm)
    }
    assert groups == {((0, 2), (1, 3))}
    assert plan.dag.expert_groups["experts.up"] == ((0, 1), (2, 3))


def names(plan, comm: Comm) -> set[str]:
    return {plan.dag.values[v].name for v in comm.inputs}


# --- what a region may do -------------------------------------------------------------------------


def elementwise(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    a = functional.silu(x) + functional.gelu(x) * torch.sigmoid(-x) - x.tanh().abs()
    b = torch.where(a > 0.1, a.clamp(max=2.0), torch.zeros_like(a)) + functional.softplus(x)
    c = (b.square() + 1).sqrt().reciprocal() + (x.exp() + 1).log() * 0.5 - functional.elu(x)
    return c + functional.leaky_relu(x) + functional.hardtanh(x) / (b.square() + 2)


def shapes(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    a, *rest = x.unbind(-1)
    b = torch.stack([a, *rest[::-1]], -1).flip(-1)
    c = torch.cat([b, x[..., :1]], -1).unsqueeze(0).squeeze(0)
    c = functional.pad(c, (1, 0)).narrow(-1, 1, WIDTH)
    d = c.permute(1, 2, 0).transpose(0, 1).reshape(WIDTH, -1).t().reshape(-1, x.shape[0], WIDTH)
    return d.transpose(0, 1) * torch.ones(x.shape[0], 1, WIDTH, dtype=x.dtype) + x[..., 1:2]


def reductions(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    a = x.softmax(-1) * x.log_softmax(-1).detach() + x.mean(-1, keepdim=True)
    b = x.logsumexp(-1)[..., None] + x.amax(-1, keepdim=True) - x.cumsum(-1)
    return a * b + x.sum(-1, keepdim=True).expand(-1, -1, WIDTH)


def products(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = torch.einsum("ecd,edf->ecf", x, model.weights.softmax(-1))
    norms = model.weights.square().sum((1, 2), keepdim=True).sqrt()
    return torch.baddbmm(y, x, model.weights.transpose(1, 2)) / norms + y * model.weights[:, :1]


@pytest.mark.parametrize("body", [elementwise, shapes, reductions, products])
def test_what_works_on_each_experts_tokens_is_sharded(body):
    strategy = [*PAIR, piper.Shard({"EP": 0}), piper.Split({}, num_microbatches=2)]
    plan = assert_equal(Region, strategy, capacity_batch(12), body)
    assert plan.dag.expert_groups == {"weights": ((0, 1),)}


# --- what is refused ------------------------------------------------------------------------------


class Region(nn.Module):
    """``x[B, E, width]`` through *body*, a function of ``[E, B, width]`` and the weights, as an
    expert region.
    """

    def __init__(self, body, experts: int = EXPERTS) -> None:
        super().__init__()
        self.body, self.experts = body, experts
        self.weights = nn.Parameter(torch.randn(experts, WIDTH, WIDTH))
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x * 2).transpose(0, 1).contiguous()
        with piper.annotate("EP", 0):
            out = self.body(self, torch.bmm(x, self.weights))
        return (out + x).transpose(0, 1)


def written(model: Region, x: torch.Tensor) -> torch.Tensor:
    model.seen.add_(x.detach().sum((0, 1)))
    return x


REFUSED = {
    "softmax over experts": (lambda _, x: x.softmax(0), r"_softmax.*along experts"),
    "norm over tokens": (lambda _, x: x / x.sum(1, keepdim=True).exp(), r"sum over tokens"),
    "mean over tokens": (lambda _, x: x - x.mean(1, keepdim=True), r"mean.*over experts or tokens"),
    "a neighbour's tokens": (lambda _, x: x + x.flip(1), r"flip.*along experts"),
    "some experts": (lambda _, x: torch.cat([x[:2] * 2, x[2:]]), r"some experts or tokens"),
    "constants by expert": (
        lambda _, x: x * torch.tensor([1.0, 2, 3, 4], dtype=x.dtype)[:, None, None],
        r"aten.mul.*literal size",
    ),
    "literal size": (lambda _, x: x.reshape(2, 2, -1, WIDTH).relu().reshape(x.shape), "literal"),
    "no rule": (lambda _, x: x.cumprod(-1), r"aten.cumprod.*no rule"),
    "dropout": (lambda _, x: functional.dropout(x, 0.5), "random numbers"),
    "parameter": (lambda m, x: x * m.gain, r"'gain' float64\[3\].*replicated=\['gain'\]"),
    "buffer": (written, "seen"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_region_that_mixes_is_refused_by_the_operation(what: str):
    body, reason = REFUSED[what]
    dag = piper.capture(staged(Region(body)).double(), mse, capacity_batch(4))
    with pytest.raises(DirectiveError, match=reason) as caught:
        piper.apply(dag, [*PAIR, piper.Shard({"EP": 0})])
    assert "EP" in str(caught.value)


def test_experts_that_the_devices_do_not_divide():
    dag = piper.capture(
        staged(Region(lambda _, x: x, experts=3)).double(),
        mse,
        (randn(4, 3, WIDTH), randn(4, 3, WIDTH)),
    )
    with pytest.raises(DirectiveError, match=r"3 experts, which 2 devices cannot share"):
        piper.apply(dag, [*PAIR, piper.Shard({"EP": 0})])


def identity():
    return piper.capture(staged(Region(lambda _, x: x)).double(), mse, capacity_batch(4))


def test_devices_that_are_not_the_regions():
    for devices in ([0, 2], [[0], [1, 2]], [[0, 1], [1, 0]]):
        with pytest.raises(PlacementError, match=r"partition|distinct|equal sizes"):
            piper.apply(identity(), [*PAIR, piper.Shard({"EP": 0}, devices=devices)])


def test_nobody_placed_it():
    with pytest.raises(PlacementError, match="not placed yet"):
        piper.apply(identity(), [piper.Shard({"EP": 0})])


def test_sharded_twice():
    with pytest.raises(DirectiveError, match="sharded twice: by directive 2"):
        piper.apply(identity(), [*PAIR, piper.Shard({"EP": 0}), piper.Shard({"EP": 0})])


def test_no_parameters():
    dag = piper.capture(staged(Plain()).double(), mse, (randn(4, WIDTH), randn(4, WIDTH)))
    with pytest.raises(DirectiveError, match="no parameters"):
        piper.apply(dag, [*PAIR, piper.Shard({"EP": 0})])


class Plain(nn.Module):
    """A region without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        with piper.annotate("EP", 0):
            x = x.tanh()
        return self.layer(x)


def test_no_value_crosses_the_border_without_an_all_to_all():
    dag = piper.apply(identity(), [*PAIR, piper.Shard({"EP": 0})])
    check_dag(dag)
    exchanged = next(c for c in dag.comms() if c.work.kind == "all_to_all" and not c.work.back)
    reader = next(c for c in dag.chunks() if exchanged.outputs[0] in c.inputs)
    origin = {exchanged.outputs[0]: exchanged.inputs[0]}
    inputs = tuple(origin.get(v, v) for v in reader.inputs)
    changed = replace_nodes(dag, {reader.id: structs.replace(reader, inputs=inputs)}).dag
    with pytest.raises(DirectiveError, match=r"crosses from 'F PP=0' to 'F PP=0 EP=0'.*all-to-all"):
        check_dag(changed)


def test_one_device_shares_nothing():
    strategy = [*PAIR, piper.Shard({"EP": 0}, devices=[[0], [1]])]
    plan = assert_equal(Capacity, strategy, capacity_batch(8))
    assert not plan.dag.expert_groups

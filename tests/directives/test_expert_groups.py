"""Shard: experts on other devices than the rest of the model's, more of them, fewer, or some of the
same.
"""

import pytest
import torch
from tests.cases.equal import adamw, randn
from tests.directives.test_shard import (
    EXPERTS,
    HIDDEN,
    ROUTINGS,
    WIDTH,
    Capacity,
    Dropless,
    Residual,
    assert_equal,
    capacity_batch,
    dropless_batch,
    prepared,
)
from tests.verify.plans import checks, drop, edit, find, swap, texts
from torch import nn
from torch.nn import functional

import piper
from piper.errors import DirectiveError, PlacementError, RunError
from piper.ir.dag import Comm, Role
from piper.models.routing import sort_by_expert
from piper.ops.all_to_all import Ends, ExchangeExperts
from piper.plan.model import Plan
from piper.simulate import simulate


def strategy(dense: list[int], experts, *, microbatches: int = 2, **shard: object):
    return [
        piper.Place({"EP": None}, devices=dense),
        piper.Replicate({}),
        piper.Shard({"EP": 0}, devices=experts, replicated=["*gain"], **shard),
        piper.Split({}, num_microbatches=microbatches),
    ]


def exchanges(plan: Plan) -> list[Comm]:
    return [comm for comm in plan.dag.comms() if comm.work.kind.startswith("all_to_all")]


# --- who sends what to whom -----------------------------------------------------------------------


def test_tokens_go_straight_to_the_devices_of_their_experts():
    plan = assert_equal(Capacity, strategy([0], [1, 2]), capacity_batch(8))
    assert not [comm for comm in plan.dag.comms() if comm.work.kind == "transfer"]
    assert {comm.groups for comm in exchanges(plan)} == {((1, 2, 0),)}
    assert {comm.work.ends for comm in exchanges(plan)} == {Ends((0, 1), (2,))}
    for device, part in ((0, None), (1, (0, 2)), (2, (1, 2))):
        held = [i for i in plan.devices[device].slots if i.name == "experts.up"]
        assert {i.experts for i in held if i.role is Role.PARAMETER} == ({part} if part else set())
    # Two of four experts, four tokens of each: those of the one replica, and no more.
    received = [
        i.messages[0].numel
        for i in plan.devices[1].instructions
        if i.op == "exchange_experts" and i.outputs
    ]
    assert received == [EXPERTS // 2 * 4 * WIDTH] * len(received) != []


def test_no_device_without_tokens_or_experts_is_given_any():
    plan = assert_equal(Dropless, strategy([0, 1], [0, 1, 2, 3]), dropless_batch(16))
    for device in (2, 3):
        made = {i.op for i in plan.devices[device].instructions}
        assert {"exchange_rows", "exchange_counts", "compute"} <= made
        assert "load_input" not in made
        assert "report" not in made
    assert plan.num_replicas == 2
    assert plan.dag.expert_groups == {
        "up": ((0, 1, 2, 3),),
        "down": ((0, 1, 2, 3),),
    }
    assert not [c for c in plan.dag.comms() if "up" in {plan.dag.values[v].name for v in c.inputs}]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("dense", "experts"), [([0], [1, 2]), ([1, 0], [1, 0, 2, 3])])
def test_every_routing(routing: str, dense, experts):
    batch = dropless_batch(16, ROUTINGS[routing](16))
    assert_equal(Dropless, strategy(dense, experts), batch, poison=True, delay=0.001)


@pytest.mark.parametrize("form", ["module", "merged", "sizes from tensors"])
def test_every_layout_of_what_enters(form: str):
    plan = assert_equal(Capacity, strategy([0, 1], [2, 0, 3, 1]), capacity_batch(8), form)
    held = {i.name: i.message.shape for i in plan.devices[3].slots if i.role is Role.PARAMETER}
    assert held["experts.up"] == (1, WIDTH, 2 * HIDDEN)
    assert held["experts.gain"] == (WIDTH,)


class Between(Dropless):
    """Experts between two stages, of which the first routes; the second puts the rows back."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        torch.manual_seed(1)
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weights = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        with piper.annotate("ST", 0):
            routed = sort_by_expert(self.before(x), chosen[:, None], EXPERTS)
        with piper.annotate("EP", 0):
            rows = functional.silu(piper.grouped_mm(routed.rows, self.weights, routed.counts))
        with piper.annotate("ST", 1):
            return self.after(routed.unsort(rows))


STAGES = {
    "apart": ([0], [1], [2, 3]),
    "with the first": ([0], [1], [0, 2]),
    "with both": ([0, 1], [2, 3], [1, 2]),
    "with the second": ([0, 1], [2, 3], [4, 3, 5, 6]),
    "fewer": ([0, 1], [2, 3], [4]),
    "lists": ([0, 1, 2, 3], [4, 5, 6, 7], [[8, 0], [9, 2]]),
}


@pytest.mark.parametrize("where", STAGES)
def test_between_two_stages(where: str):
    first, second, experts = STAGES[where]
    staged = [
        piper.Place({"ST": 0}, devices=first),
        piper.Place({"ST": 1}, devices=second),
        piper.Replicate({}, shard_grads=True),
        piper.Shard({"EP": 0}, devices=experts),
        piper.Split({}, num_microbatches=2),
    ]
    batch = dropless_batch(16, ROUTINGS["random"](16))
    plan = assert_equal(Between, staged, batch, poison=True)
    lists = experts if isinstance(experts[0], list) else [experts]
    shared = {"weights": tuple(map(tuple, lists))} if len(lists[0]) > 1 else {}
    assert plan.dag.expert_groups == shared


# --- together with what else there is -------------------------------------------------------------


class Weighted(nn.Module):
    """Experts, and a loss that is weighted: rows without a target do not count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = Capacity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("ST", 0):
            return self.inner(x)


def weighted_loss(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    valid = (targets > -0.5).to(outputs.dtype)
    return ((outputs - targets).square() * valid).sum(), valid.sum()


@pytest.mark.parametrize(
    ("dense", "experts"), [([0], [1, 2]), ([0, 1], [0, 1, 2, 3]), ([0, 1], [1, 2])]
)
def test_a_weighted_loss_clipped(dense, experts):
    """The total weight and the norm reach the experts' devices, which have no part in the loss."""
    report = piper.check(
        Weighted(),
        weighted_loss,
        strategy(dense, experts),
        capacity_batch(8),
        optimizer=adamw,
        max_grad_norm=0.5,
    )
    report.require()
    assert report.max_grad_error <= 1e-10


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("experts", [[2, 0, 3, 1], [1, 2]])
def test_what_every_device_of_the_experts_holds_is_sharded_over_them(zero, experts):
    place, _, shard, split = strategy([0, 1], experts)
    replicate = piper.Replicate(
        {}, shard_optimizer=zero == 1, shard_grads=zero == 2, shard_params=zero == 3
    )
    plan = assert_equal(Capacity, [place, replicate, shard, split], capacity_batch(8))
    assert plan.dag.shards["experts.gain"] == (tuple(experts),)
    assert plan.dag.shards["before.weight"] == ((0, 1),)
    assert "experts.up" not in plan.dag.shards


def test_gradients_of_several_steps():
    with piper.compile(
        Weighted().double(),
        weighted_loss,
        strategy([0, 1], [0, 1, 2, 3]),
        capacity_batch(8),
        optimizer=adamw,
        max_grad_norm=0.5,
        backend="inprocess",
    ) as trainer:
        plain = Weighted().double()
        optimizer = adamw(list(plain.parameters()))
        batches = [
            (randn(8, EXPERTS, WIDTH, seed=s), randn(8, EXPERTS, WIDTH, seed=s + 9)) for s in (1, 2)
        ]
        for x, y in batches:
            total, weight = weighted_loss(plain(x), y)
            (total / weight).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        trainer.step(*batches[0], update=False)
        assert trainer.step(*batches[1]).grad_norm == pytest.approx(float(norm), rel=1e-10)
        state = trainer.state_dict()
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-12)
        total, weight = weighted_loss(plain(batches[0][0]), batches[0][1])
        assert trainer.evaluate(*batches[0]).loss == pytest.approx(
            float((total / weight).detach()), rel=1e-10
        )


def test_the_order_of_directives_does_not_matter_but_for_the_place_of_the_rest():
    place, replicate, shard, split = strategy([0], [0, 1])
    for program in (
        [replicate, place, shard, split],
        [split, place, shard, replicate, piper.Recompute({})],
        [place, split, shard, piper.Offload({})],
    ):
        assert_equal(Capacity, program, capacity_batch(8))


def test_simulated():
    """The one device with tokens sends what both others receive."""
    plan = assert_equal(Capacity, strategy([0], [1, 2]), capacity_batch(8))
    (meeting, *_) = (
        i.rendezvous() for i in plan.devices[1].instructions if i.op == "exchange_experts"
    )
    assert meeting.nbytes == 2 * meeting.messages[0].nbytes
    assert simulate(plan, "A100").seconds > 0


# --- what is refused ------------------------------------------------------------------------------


def refused(program, match: str, error: type[Exception] = PlacementError) -> None:
    with pytest.raises(error, match=match):
        piper.plan(piper.apply(prepared(Capacity)[1].dag, program))


def test_a_region_of_another_size_is_placed_by_its_shard():
    place, *rest = strategy([0], [1, 2])
    refused(
        [place, piper.Place({"EP": 0}, devices=[1, 2]), *rest],
        r"equal sizes.*only an expert region may be on a group of another size, to which its Shard puts it",
    )
    refused(
        [piper.Place({}, devices=[0, 1]), piper.Replicate({}), *strategy([0], [1, 2])[2:]],
        r"on devices \[0, 1\].*lists \[\[1, 2\]\].*placed by no Place, it goes to the devices of the lists",
    )


def test_the_rest_is_placed_first():
    place, replicate, shard, split = strategy([0], [1, 2])
    refused(
        [shard, place, replicate, split],
        r"devices \[0\].*rest of the model had 2 replicas, or was to have, here it has 1; put the Shard after",
    )


@pytest.mark.parametrize(
    ("dense", "experts", "match"),
    [
        ([0, 1], [[2], [3], [4]], r"3 lists of devices.*cannot share the work for the 2 replicas"),
        ([0, 1], [1, 0, 2, 3], r"devices 1 and 0 are in both groups, but in different order"),
        ([0, 1], [[1, 2], [0, 3]], r"\[1, 2\] with \[0\], \[0, 3\] with \[1\].*share devices"),
        ([0, 1], [[0, 2], [3, 1]], r"overlap in different ways.*share the experts within one list"),
        ([0, 1, 2], [[3, 4], [5, 6]], r"2 lists of devices.*3 replicas"),
    ],
)
def test_groups_that_cannot_exchange(dense, experts, match):
    refused(strategy(dense, experts), match)


def test_experts_that_do_not_divide():
    refused(strategy([0], [1, 2, 3]), r"4 experts, which 3 devices cannot share", DirectiveError)


def test_stages_of_different_sizes_around():
    staged = [
        piper.Place({"ST": 0}, devices=[0]),
        piper.Place({"ST": 1}, devices=[1, 2]),
        piper.Replicate({}),
        piper.Shard({"EP": 0}, devices=[3, 4]),
    ]
    captured = prepared(OnlyBetween)[1]
    with pytest.raises(PlacementError, match=r"\[0\].*\[1, 2\] have different numbers of replicas"):
        piper.apply(captured.dag, staged)


class OnlyBetween(nn.Module):
    """Two stages that exchange nothing but through the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("ST", 0):
            x = (x * 2).transpose(0, 1).contiguous()
        with piper.annotate("EP", 0):
            x = torch.bmm(x, self.weights)
        with piper.annotate("ST", 1):
            return x.transpose(0, 1) * 3


def test_too_many_tokens_and_rows_without_an_expert_are_errors_there_too():
    everything = ROUTINGS["all to one expert"](16)
    with pytest.raises(
        RunError, match=r"device group \[2, 3, 0, 1\] received 8 tokens.*3 more than the 5"
    ):
        assert_equal(
            Dropless,
            strategy([0, 1], [2, 3, 0, 1], capacity_factor=1.25),
            dropless_batch(16, everything),
        )
    with pytest.raises(RunError, match=r"counts are of 0 of 8 rows.*not known to be zero"):
        assert_equal(
            Residual,
            strategy([0], [1, 2]),
            dropless_batch(16, torch.full((16,), EXPERTS)),
        )


def test_damaged_exchanges_are_found():
    plan = assert_equal(Capacity, strategy([0], [1, 2]), capacity_batch(8))
    at = find(plan, 0, ExchangeExperts)
    for fields, says in (
        ({"ends": Ends((0, 2), (1,))}, "expected ends Ends(holders=(0, 1), sources=(2,))"),
        ({"ends": None}, "expected ends"),
        ({"back": True}, "expected back False, found True"),
        ({"expert_dim": 0, "token_dim": 0}, "_dim"),
    ):
        assert says in texts(edit(plan, 0, at, **fields), "fidelity")
    assert {"fidelity", "matching"} <= checks(drop(plan, 1, find(plan, 1, ExchangeExperts)))
    one, two = (find(plan, 1, ExchangeExperts, k) for k in (0, 1))
    assert checks(swap(plan, 1, one, two))

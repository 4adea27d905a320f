"""Recomputation changes no number: bit for bit what the strategy computes without it, and equal to
single-process training.
"""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from tests.cases.equal import mse, randint, randn, sgd
from torch import nn
from torch.nn import functional

import piper
from piper.directives.base import Directive
from piper.ir.dag import Chunk, Dag, Pass, Role
from piper.models import (
    Transformer,
    TransformerConfig,
    UNet,
    UNetConfig,
    transformer_loss,
    unet_loss,
)
from piper.ops.compute import Compute
from piper.plan.model import Plan

pytestmark = pytest.mark.timeout(240)

ATTENTION = "scaled_dot_product_attention"


def transformer(**changes) -> nn.Module:
    sizes = {"vocab_size": 17, "context": 6, "width": 8, "num_layers": 2, "num_heads": 2}
    torch.manual_seed(0)
    return Transformer(TransformerConfig(**{**sizes, "num_stages": 2, **changes}))


def tokens(rows: int = 8):
    return randint(17, rows, 6), randint(17, rows, 6, seed=1)


def train(model, loss_fn, strategy, batch, steps: int = 2):
    """Losses, parameters and buffers after some steps from the model's weights."""
    with piper.compile(
        model, loss_fn, strategy, batch, optimizer=sgd, seed=3, backend="inprocess"
    ) as trainer:
        losses = [trainer.step(*batch).loss for _ in range(steps)]
        return losses, trainer.state_dict()


def assert_same(
    model: nn.Module,
    loss_fn,
    strategy: Sequence[Directive],
    batch,
    *recompute: Directive,
    at: int | None = None,
) -> None:
    """*strategy* with and without *recompute*, which is put in at position *at* (default: last)."""
    at = len(strategy) if at is None else at
    changed = [*strategy[:at], *recompute, *strategy[at:]]
    report = piper.check(model, loss_fn, changed, batch, optimizer=sgd, seed=3)
    report.require()
    losses, state = train(model, loss_fn, changed, batch)
    expected_losses, expected_state = train(model, loss_fn, strategy, batch)
    assert losses == expected_losses
    assert state.keys() == expected_state.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected_state.items())


@pytest.mark.parametrize("at", [0, None], ids=["before all", "after all"])
@pytest.mark.parametrize(
    "save",
    [[], ["matmul"], [ATTENTION, "native_dropout"]],
    ids=["nothing saved", "products saved", "attention and dropout saved"],
)
def test_dropout_draws_the_same_masks(save, at):
    strategy = piper.strategies.pipeline("1f1b", [[0], [1]], 4)
    model = transformer(dropout=0.3)
    assert_same(model, transformer_loss, strategy, tokens(), piper.Recompute({}, save=save), at=at)


def test_each_region_as_it_likes():
    strategy = piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 2)
    recompute = [piper.Recompute({"PP": 0}), piper.Recompute({"PP": 1, "MB": 0}, save=["addmm"])]
    assert_same(transformer(dropout=0.3), transformer_loss, strategy, tokens(), *recompute)


def test_tied_weights_under_an_interleaved_schedule():
    model = transformer(num_layers=4, num_stages=4, tied_embedding=True, dropout=0.2)
    strategy = piper.strategies.pipeline("interleaved_1f1b", [[0], [1]], 4, num_virtual_stages=2)
    assert_same(model, transformer_loss, strategy, tokens(), piper.Recompute({"PP": [0, 2, 3]}))


@pytest.mark.parametrize("save", [[], ["matmul"]], ids=["nothing saved", "products saved"])
def test_sharded_parameters(save):
    """ZeRO-3: what the recomputation reads (biases, too) is gathered for the backward."""
    model = transformer(tied_embedding=True, dropout=0.2)
    strategy = [
        *piper.placements.chain([[0, 1], [2, 3]]),
        piper.Replicate({}, shard_params=True, bucket_size=0.001),
        piper.Split({}, num_microbatches=2),
        *piper.schedules.one_f_one_b(num_stages=2, num_microbatches=2),
    ]
    assert_same(model, transformer_loss, strategy, tokens(), piper.Recompute({}, save=save))


@pytest.mark.parametrize("at", [0, None], ids=["before all", "after all"])
def test_skip_connections(at):
    torch.manual_seed(0)
    model = UNet(UNetConfig(channels=2, width=4, image_size=4))
    batch = (randn(4, 2, 4, 4).float(), randn(4, 2, 4, 4, seed=1).float())
    strategy = piper.strategies.pipeline("1f1b", [[0], [1], [2], [3]], 4)
    assert_same(model, unet_loss, strategy, batch, piper.Recompute({}), at=at)


class Counting(nn.Module):
    """BatchNorm, and a count of what a stage saw that its result depends on: written once per
    microbatch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)
        self.norm_a, self.norm_b = nn.BatchNorm1d(4), nn.BatchNorm1d(2)
        self.register_buffer("load", torch.zeros(4))

    def forward(self, x):
        with piper.annotate("PP", 0):
            h = self.norm_a(self.a(x)).tanh()
            h = h * (1.0 + self.load) + h.square()
            self.load += (h.detach() > 0).to(h.dtype).mean(0)
            h = h.sigmoid() * self.load
        with piper.annotate("PP", 1):
            return self.norm_b(self.b(h)).exp()


@pytest.mark.parametrize("at", [0, None], ids=["before all", "after all"])
@pytest.mark.parametrize("save", [[], ["mm", "tanh"]], ids=["nothing saved", "some saved"])
def test_side_effects_happen_once(save, at):
    torch.manual_seed(0)
    model = Counting()
    batch = (randn(12, 3).float(), randn(12, 2, seed=1).float())
    strategy = piper.strategies.pipeline("1f1b", [[0], [1]], 4)
    assert_same(model, mse, strategy, batch, piper.Recompute({}, save=save), at=at)


class Nested(nn.Module):
    """Regions inside regions (each stage is cut into several chunks), frozen weights, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.inner = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.last = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.inner[0].requires_grad_(False)
        self.last[1].weight.requires_grad_(False)

    def forward(self, x):
        for stage in range(2):
            with piper.annotate("PP", stage):
                h = self.first[stage](x).tanh()
                with piper.annotate("EP", 0):
                    g = functional.dropout(self.inner[stage](h).exp(), 0.3, self.training)
                x = self.last[stage](h * g).sigmoid() * functional.dropout(h, 0.3, self.training)
        return x


@pytest.mark.parametrize("filter_", [{}, {"EP": None}, {"EP": 0}], ids=["all", "outer", "inner"])
def test_regions_of_several_chunks(filter_):
    torch.manual_seed(0)
    batch = (randn(8, 4).float(), randn(8, 4, seed=1).float())
    strategy = piper.strategies.pipeline("gpipe", [[0], [1]], 2)
    assert_same(Nested(), mse, strategy, batch, piper.Recompute(filter_))


def test_forward_and_backward_on_different_devices():
    """What the forward reads goes to the backward's device, and the parameters are held there."""
    torch.manual_seed(0)
    batch = (randn(8, 4).float(), randn(8, 4, seed=1).float())
    strategy = [
        piper.Place({"PASS": "F"}, devices=[0]),
        piper.Place({"PASS": "B"}, devices=[1]),
        piper.Split({}, num_microbatches=2),
    ]
    assert_same(Nested(), mse, strategy, batch, piper.Recompute({}))


def test_a_model_without_regions():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 4))
    batch = (randn(8, 4).float(), randn(8, 4, seed=1).float())
    strategy = [piper.Split({}, num_microbatches=2)]
    assert_same(model, mse, strategy, batch, piper.Recompute({}))


def test_evaluation_has_nothing_to_recompute():
    """Evaluation has no backward, and no dropout that could be saved."""
    model, batch = transformer(dropout=0.3), tokens()
    found = []
    for recompute in ([], [piper.Recompute({}, save=["native_dropout"])]):
        strategy = [*piper.strategies.pipeline("1f1b", [[0], [1]], 4), *recompute]
        with piper.compile(
            model, transformer_loss, strategy, batch, optimizer=sgd, backend="inprocess"
        ) as trainer:
            found.append(trainer.evaluate(*batch).loss)
    assert found[0] == found[1]


# --- what a plan does and keeps -------------------------------------------------------------------


def saved_bytes(dag: Dag) -> int:
    """Bytes of what the forward chunks of one microbatch make."""
    bindings = {str(dag.batch_symbol): 1}
    return sum(
        dag.values[value].spec.nbytes(bindings)
        for chunk in dag.chunks()
        if chunk.pass_ is Pass.FORWARD and dag.microbatch(chunk.tags) == 0
        for value in chunk.outputs
    )


def peak_bytes(plan: Plan) -> list[int]:
    """Per device, the most bytes of activations and their gradients at any time."""
    peaks = []
    for device in plan.devices:
        sizes = [s.message.nbytes if s.role is Role.ACTIVATION else 0 for s in device.slots]
        live: set[int] = set()
        peak = 0
        for instruction in device.instructions:
            live.update(instruction.writes())
            peak = max(peak, sum(sizes[slot] for slot in live))
            live.difference_update(instruction.frees())
        peaks.append(peak)
    return peaks


def calls(plan: Plan, pass_: Pass) -> Counter[str]:
    """How often each operator runs in a pass, all devices together."""
    found: Counter[str] = Counter()
    for device in plan.devices:
        for instruction in device.instructions:
            if isinstance(instruction, Compute):
                node = plan.dag.nodes[instruction.node]
                assert isinstance(node, Chunk)
                if node.pass_ is pass_:
                    body = plan.dag.bodies[instruction.body]
                    found.update(c.target.split(".")[1] for c in body.calls)
    return found


def test_what_is_kept_and_what_is_run_again():
    model = transformer(width=16, num_layers=4, dropout=0.3)
    dag = piper.capture(model, transformer_loss, tokens())
    strategy = piper.strategies.pipeline("1f1b", [[0], [1]], 4)
    plans = {
        name: piper.plan(piper.apply(dag, [*strategy, *recompute]))
        for name, recompute in (
            ("none", []),
            ("products", [piper.Recompute({}, save=["matmul", ATTENTION])]),
            ("all", [piper.Recompute({})]),
        )
    }
    for plan in plans.values():
        piper.verify(plan)
    saved = [saved_bytes(plan.dag) for plan in plans.values()]
    hidden, loss = 6 * 16 * 4, 4
    assert saved[0] > 1.5 * saved[1] > 10 * saved[2]
    assert saved[2] == hidden + loss  # what the stages hand on, and the loss
    peaks = [peak_bytes(plan) for plan in plans.values()]
    assert all(a > b > c for a, b, c in zip(*peaks, strict=True))

    forward = [calls(plan, Pass.FORWARD) for plan in plans.values()]
    backward = [calls(plan, Pass.BACKWARD) for plan in plans.values()]
    blocks = 4 * 4  # in as many microbatches
    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    assert [f["addmm"] for f in forward] == [4 * blocks] * 3
    assert [b["addmm"] for b in backward] == [0, 0, 4 * blocks]
    assert [b[kernel] for b in backward] == [0, 0, blocks]
    assert [b["gelu"] for b in backward] == [0, blocks, blocks]
    assert [b["native_dropout"] for b in backward] == [0, 2 * blocks + 4, 2 * blocks + 4]


def test_the_forward_comes_first_without_any_order():
    """On one device, with nothing but a split: no backward before its forward, whose inputs would
    stay.
    """
    dag = piper.capture(transformer(), transformer_loss, tokens())
    plan = piper.plan(piper.apply(dag, [piper.Split({}, num_microbatches=4), piper.Recompute({})]))
    piper.verify(plan)
    labels = [
        plan.dag.nodes[i.node].label for i in plan.devices[0].instructions if isinstance(i, Compute)
    ]
    for label in labels:
        if label.startswith("B "):
            assert labels.index(f"F {label[2:]}") < labels.index(label)

"""Mixtures of experts in situations that users of other systems ran into."""

import copy

import pytest
import torch
from tests.cases.equal import TOLERANCE, adamw, assert_equal, randint, sgd
from tests.equality import eager, planned
from torch import nn
from torch.nn import functional

import piper
from piper.api.programs import Programs, model_tensors
from piper.backends.inprocess import InProcessBackend
from piper.capture import capture_with_constants
from piper.models import MoEConfig, moe_loss
from piper.models.moe import Experts, Mixture
from piper.runtime.batch import signature
from piper.runtime.optimizer import OptimizerSpec
from piper.runtime.snapshot import StateSnapshot

VOCABULARY, LENGTH = 7, 4


def config(**changes) -> MoEConfig:
    sizes = {"vocab_size": VOCABULARY, "width": 4, "num_layers": 1, "num_heads": 1}
    return MoEConfig(**{**sizes, "num_experts": 4, "expert_width": 3, "dense_width": 6, **changes})


class Dense(nn.Module):
    """A layer without experts or an auxiliary loss."""

    def __init__(self, settings: MoEConfig) -> None:
        super().__init__()
        self.layer = nn.Linear(settings.width, settings.width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x).tanh(), x.new_zeros(())


class Stack(nn.Module):
    """A mixture per stage, between an embedding and a head; the first *dense* stages have a layer
    instead.
    """

    def __init__(self, num_stages: int = 1, dense: int = 0, **changes) -> None:
        super().__init__()
        settings = config(**changes)
        torch.manual_seed(5)
        self.embedding = nn.Embedding(VOCABULARY, settings.width)
        self.mixtures = nn.ModuleList(
            Dense(settings) if i < dense else Mixture(settings, i) for i in range(num_stages)
        )
        self.head = nn.Linear(settings.width, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for stage, mixture in enumerate(self.mixtures):
            with piper.annotate("PP", stage):
                if stage == 0:
                    x, auxiliary = self.embedding(ids), torch.zeros((), dtype=torch.float64)
                out, loss = mixture(x)
                x, auxiliary = x + out, auxiliary + loss
                if stage == len(self.mixtures) - 1:
                    x = self.head(x)
        return x, auxiliary


def batch(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return randint(VOCABULARY, rows, LENGTH, seed=seed), randint(
        VOCABULARY, rows, LENGTH, seed=seed + 1
    )


QUAD = [
    piper.Place({}, devices=[0, 1, 2, 3]),
    piper.Replicate({}, replicated_buffers="sum"),
    piper.Shard({"EP": "*"}, devices=[[0, 1], [2, 3]]),
]


APART = [
    piper.Place({"EP": None}, devices=[0, 1]),
    piper.Replicate({}, replicated_buffers="sum"),
    piper.Shard({"EP": "*"}, devices=[2, 0, 3, 1]),
]


class DenseLoop(Experts):
    """Every expert on every token; what is not its own is cut out."""

    def forward(self, x: torch.Tensor, counts: torch.Tensor | None = None) -> torch.Tensor:
        assert counts is not None
        owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
        out = torch.zeros_like(x)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            gate, value = (x @ up).chunk(2, dim=-1)
            mine = (functional.silu(gate) * value) @ down
            out = out + torch.where((owner == expert)[:, None], mine, 0.0)
        return out


def test_case_5_gradients_are_those_of_a_dense_loop():
    """EP2 × DP2: neither expert nor dense gradients are scaled by the number of devices that share
    experts.
    """
    model = Stack().double()
    dense = copy.deepcopy(model)
    for mixture in dense.mixtures:
        mixture.experts.__class__ = DenseLoop
    batches = [batch(16, seed=s) for s in range(2)]
    strategy = [*QUAD, piper.Split({}, num_microbatches=2)]
    program = Programs(model, moe_loss, strategy).training(batches[0])
    found = planned.train(program.plan, program.constants, model, batches, sgd)
    expected = eager.train(dense, moe_loss, batches, 8, sgd)
    assert planned.compare(found, expected).worst <= TOLERANCE
    assert all(g.abs().max() > 0 for g in expected[0].gradients.values())


def test_case_11_counters_count_once():
    """The router counts each expert's tokens, on every replica, though it is recomputed."""
    model = Stack(count_tokens=True, capacity_factor=1.0)
    strategy = [*QUAD, piper.Split({}, num_microbatches=2), piper.Recompute({})]
    plan = assert_equal(model, moe_loss, strategy, batch(16))
    assert "mixtures.0.expert_tokens" in plan.dag.buffer_updates


def test_case_28_a_dense_stage_before_one_with_an_auxiliary_loss():
    """The auxiliary loss counts once per microbatch, not M times; stages without experts take part
    in no all-to-all.
    """
    model = Stack(2, dense=1, balance_weight=1.0, z_weight=0.5)
    strategy = [
        *piper.placements.chain([[0, 1], [2, 3]]),
        piper.Replicate({}, shard_grads=True),
        piper.Shard({"EP": "*"}),
        piper.Split({}, num_microbatches=4),
        *piper.schedules.one_f_one_b(2, 4),
    ]
    plan = assert_equal(model, moe_loss, strategy, batch(16))
    assert {d for c in plan.dag.comms() if "rows" in c.label for d in c.participants} == {2, 3}


def compiled(model: nn.Module, strategy, rows: int):
    return piper.compile(
        model,
        moe_loss,
        [*strategy, piper.Split({}, num_microbatches=2)],
        batch(rows),
        optimizer=adamw,
        backend="inprocess",
        verify_capture=False,
    )


def test_case_18_state_moves_between_layouts():
    """Four stages, shared experts without and with sharded optimizer, one process, experts on more
    devices: each step under the next, from the state of the one before. All equal one process
    throughout, Adam's moments included. Each runs the same eight microbatches.
    """
    model = Stack(num_stages=4).double()
    alone = ([piper.Place({}, devices=[0])], 8)
    layouts = [
        (piper.placements.chain([[0], [1], [2], [3]]), 8),
        (QUAD, 2),
        ([QUAD[0], piper.Replicate({}, shard_optimizer=True), QUAD[2]], 2),
        alone,
        (APART, 4),
        (QUAD, 2),
    ]
    batches = [batch(16, seed=10 + step) for step in range(len(layouts))]
    captured = capture_with_constants(model, moe_loss, batches[0])
    expected = []
    with started(captured, model, *alone) as backend:
        for step, each in enumerate(batches):
            backend.run("step", [each], first_step=step)
            expected.append(entries(backend.snapshot()))
    state = None
    for step, (layout, each) in enumerate(zip(layouts, batches, strict=True)):
        with started(captured, model, *layout) as backend:
            if state is not None:
                backend.restore(state)
            backend.run("step", [each], first_step=step)
            state = backend.snapshot()
        found = entries(state)
        assert found.keys() == expected[step].keys()
        for key, tensor in expected[step].items():
            error = (found[key] - tensor).norm() / tensor.norm().clamp(1e-6)
            assert error <= TOLERANCE, (step, key)


def test_case_18_checkpoints_fit_every_layout_of_the_experts(tmp_path):
    """Saved by devices that share experts, loaded by one device, and back; then all go on alike."""
    model = Stack(num_stages=1).double()
    layouts = {
        "shared": [*QUAD, piper.Split({}, num_microbatches=2)],
        "alone": [piper.Place({}, devices=[0]), piper.Split({}, num_microbatches=8)],
    }
    batches = [batch(16, seed=20 + step) for step in range(3)]

    def train(layout, some, start=None, end=None):
        with piper.compile(
            model, moe_loss, layouts[layout], batches[0], optimizer=adamw, backend="inprocess"
        ) as trainer:
            if start is not None:
                trainer.load(tmp_path / start)
            losses = [trainer.step(*each).loss for each in some]
            if end is not None:
                trainer.save(tmp_path / end)
            return losses, trainer.state_dict()

    expected, state = train("alone", batches)
    first, _ = train("shared", batches[:1], end="one")
    second, _ = train("alone", batches[1:2], start="one", end="two")
    third, found = train("shared", batches[2:], start="two")
    assert first + second + third == pytest.approx(expected, rel=TOLERANCE)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        error = (found[name].double() - tensor).norm() / tensor.double().norm().clamp(1e-6)
        assert error <= TOLERANCE, name


def started(captured, model: nn.Module, strategy, microbatches: int) -> InProcessBackend:
    """A backend that is ready to train *model*."""
    split = piper.Split({}, num_microbatches=microbatches)
    plan = piper.plan(piper.apply(captured.dag, [*strategy, split]))
    piper.verify(plan)
    backend = InProcessBackend(threads=1)
    backend.start(plan.num_devices)
    backend.load("step", plan, signature(batch(16)), captured.constants)
    backend.initialise("step", model_tensors(model), OptimizerSpec(adamw))
    return backend


def entries(state: StateSnapshot) -> dict[str, torch.Tensor]:
    """Parameters, buffers and the optimizer's tensors, in float64."""
    assert state.optimizer is not None
    found = {**state.parameters, **state.buffers}
    for name, own in state.optimizer.state.items():
        found |= {f"{key} of {name}": torch.as_tensor(value) for key, value in own.items()}
    return {name: tensor.double() for name, tensor in found.items()}


def test_case_30_evaluation_between_steps_at_another_size():
    model = Stack(capacity_factor=1.5).double()

    def train(evaluations: bool) -> dict[str, object]:
        with compiled(model, QUAD, 16) as trainer:
            trainer.step(*batch(16))
            if evaluations:
                found = trainer.evaluate(*batch(32, seed=3)).loss
                parts = [eager.rows(part, 0, 32) for part in batch(32, seed=3)]
                probe = copy.deepcopy(model).eval()
                probe.load_state_dict(
                    {k: v for k, v in trainer.state_dict().items() if k in model.state_dict()}
                )
                wanted = sum(
                    float(moe_loss(probe(ids), targets).detach())
                    for ids, targets in zip(*(part.split(2) for part in parts), strict=True)
                )
                assert found == pytest.approx(wanted / 16, rel=1e-12)
            trainer.step(*batch(16, seed=7))
            return trainer.state_dict()

    with_, without = train(evaluations=True), train(evaluations=False)
    assert with_.keys() == without.keys()
    for key, tensor in without.items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(with_[key], tensor), key


@pytest.mark.parametrize("shared", [[0], pytest.param([1], marks=pytest.mark.full), [2]])
def test_a_weighted_loss_with_all_experts_on_one_device(shared):
    """The total weight is there already where that is one of the devices of the rest."""

    def loss(outputs, targets):
        (logits, auxiliary), count = outputs, targets.numel()
        logits, targets = logits.flatten(0, 1), targets.flatten()
        total = functional.cross_entropy(logits, targets, reduction="sum")
        return total + auxiliary * count, count

    strategy = [
        piper.Place({"EP": None}, [0, 1]),
        piper.Shard({"EP": "*"}, shared),
        piper.Replicate({"EP": None}),
        piper.Split({}, num_microbatches=2),
    ]
    assert_equal(Stack().double(), loss, strategy, batch(8))

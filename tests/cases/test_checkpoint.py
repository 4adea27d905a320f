"""A checkpoint that is loaded under another layout than it was saved under."""

import copy

import pytest
import torch
from tests.cases.equal import mse, randn
from tests.equality import eager
from torch import nn

import piper
from piper.schedules import one_f_one_b

pytestmark = pytest.mark.timeout(120)

MICROBATCHES = 4
"""In all, so that every layout draws the same random numbers and sums in the same order but for the
reductions.
"""

BEFORE, AFTER = 3, 2


class Model(nn.Module):
    """Four stages. ``shared`` is in the first and the last; ``count`` is written by the forward;
    sizes that no group divides; ``late`` is first used after the checkpoint, ``frozen`` never
    trained.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 5)])
        self.norm, self.last = nn.LayerNorm(5), nn.Linear(5, 2)
        self.shared, self.gain = nn.Parameter(torch.randn(5)), nn.Parameter(torch.tensor(1.5))
        self.late = nn.Parameter(torch.randn(2))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, use_late):
        for stage, layer in enumerate(self.layers):
            with piper.annotate("PP", stage):
                x = self.dropout(layer(x).tanh())
                x = x * self.shared if stage == 0 else x
        with piper.annotate("PP", 3):
            y = self.last(self.norm(x + self.shared.tanh() + self.frozen)) * self.gain
            return y + self.late if use_late else y + 0 * self.late


def strategy(groups, **replicate):
    microbatches = MICROBATCHES // len(groups[0])
    replicated = [piper.Replicate({}, **replicate)] if len(groups[0]) > 1 else []
    split = piper.Split({}, num_microbatches=microbatches)
    per_group = 4 // len(groups)
    placed = [piper.Place({"PP": s}, devices=groups[s // per_group]) for s in range(4)]
    return [*placed, *replicated, split]


LAYOUTS = {
    "single": [piper.Split({}, num_microbatches=MICROBATCHES)],
    "pp4": [*strategy([[0], [1], [2], [3]]), *one_f_one_b(4, MICROBATCHES)],
    "pp2 dp2": strategy([[0, 1], [2, 3]], bucket_size=1e-4),
    "pp2 zero1": strategy([[0, 1], [2, 3]], shard_optimizer=True),
    "pp2 zero3": strategy([[0, 1], [2, 3]], shard_params=True),
    "hybrid": strategy([[0, 1, 2, 3]], devices=[[0, 1], [2, 3]], shard_params=True),
}

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2, eps=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}

GROUPS = [{"names": ["*.bias", "gain"], "weight_decay": 0.3}]


def rate(step):
    """Of no two steps the same."""
    return 1 / (1 + step)


def batch_of(step):
    return (randn(8, 3, seed=step), step >= BEFORE), randn(8, 2, seed=step + 100)


def compiled(layout, optimizer="adamw", *, dropout=0.0, disturb=0.0, **options):
    """A trainer with other weights and another seed than the one that saves has: all that matters
    must come from the checkpoint.
    """
    model = Model(dropout).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(disturb)
    given = {"seed": 3, "backend": "inprocess", "lr_schedule": rate, "param_groups": GROUPS}
    given |= {"optimizer": OPTIMIZERS[optimizer], "max_grad_norm": 0.5, **options}
    return piper.compile(model, mse, LAYOUTS[layout], batch_of(0), verify_capture=False, **given)


def snapshot_of(trainer):
    """All of the state by name."""
    found = trainer._backend.snapshot()
    tensors = {("parameter", n): t for n, t in found.parameters.items()}
    tensors |= {("buffer", n): t for n, t in found.buffers.items()}
    for name, entries in found.optimizer.state.items():
        tensors |= {(name, key): value for key, value in entries.items()}
    return tensors, found.optimizer.groups


def assert_same(found, expected):
    """Bitwise."""
    (tensors, groups), (wanted, wanted_groups) = found, expected
    assert tensors.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert tensors[key].dtype == tensor.dtype, key
        assert torch.equal(tensors[key], tensor), key
    assert groups == wanted_groups


def in_plain_pytorch(optimizer):
    """Losses of all steps, and the parameters after the last."""
    model = Model().double()
    named = dict(model.named_parameters())
    first = [p for n, p in named.items() if n.endswith(".bias") or n == "gain"]
    rest = [named[n] for n in named if not (n.endswith(".bias") or n in ("gain", "frozen"))]
    inner = OPTIMIZERS[optimizer]([{"params": first, "weight_decay": 0.3}, {"params": rest}])
    base = [group["lr"] for group in inner.param_groups]

    class Scheduled:
        done = 0

        def zero_grad(self, **options):
            inner.zero_grad(**options)

        def step(self):
            for group, lr in zip(inner.param_groups, base, strict=True):
                group["lr"] = lr * rate(self.done)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            inner.step()
            self.done += 1

    scheduled = Scheduled()
    batches = [batch_of(step) for step in range(BEFORE + AFTER)]
    steps = [eager.one_step(model, mse, batch, MICROBATCHES, scheduled) for batch in batches]
    return [step.loss for step in steps], eager.state_of(model)


def _there_and_back():
    quick = [("adamw", "pp4", "pp2 zero3"), ("nadam", "hybrid", "single")]
    quick += [("sgd", "pp2 zero1", "pp4")]
    pairs = [(a, b) for a in LAYOUTS for b in LAYOUTS]
    for optimizer in OPTIMIZERS:
        for pair in pairs:
            case = (optimizer, *pair)
            yield pytest.param(*case, marks=() if case in quick else pytest.mark.full)


@pytest.mark.parametrize(("optimizer", "source", "target"), list(_there_and_back()))
def test_training_goes_on_under_another_layout(optimizer, source, target, tmp_path):
    """Parameters, moments, step counts and learning rates, there and back: the steps that follow
    are those of plain PyTorch without interruption.
    """
    losses, state = in_plain_pytorch(optimizer)
    with compiled(source, optimizer) as first:
        found = [first.step(*batch_of(step)).loss for step in range(BEFORE)]
        first.save(tmp_path / "there")
        saved = snapshot_of(first)
        with compiled(target, optimizer, disturb=0.1, seed=9) as second:
            second.load(tmp_path / "there")
            assert_same(snapshot_of(second), saved)
            assert_copies_agree(second)
            second.save(tmp_path / "back")
            assert second.steps_done == BEFORE
            found += [second.step(*batch_of(BEFORE + step)).loss for step in range(AFTER)]
            after = second.state_dict()
        first.step(*batch_of(0))
        first.load(tmp_path / "back")
        assert_same(snapshot_of(first), saved)
        assert_copies_agree(first)
    assert found == pytest.approx(losses, rel=1e-11)
    for name, tensor in state.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-10, atol=1e-12, msg=name)


def assert_copies_agree(trainer):
    """Every device that holds a whole parameter holds the same."""
    first = {}
    for held in trainer._backend.copies():
        for name, tensor in held.parameters.items():
            assert torch.equal(first.setdefault(name, tensor), tensor), name


@pytest.mark.parametrize("layout", ["pp2 zero3", pytest.param("pp4", marks=pytest.mark.full)])
def test_going_on_under_the_same_layout_is_bitwise_the_same(layout, tmp_path):
    """Random numbers included: they follow from the seed and the step, which are saved."""
    with compiled(layout, dropout=0.3) as trainer:
        for step in range(BEFORE):
            trainer.step(*batch_of(step))
        trainer.save(tmp_path / "saved")
        expected = [trainer.step(*batch_of(BEFORE + step)).loss for step in range(AFTER)]
        wanted = snapshot_of(trainer)
    with compiled(layout, dropout=0.3, disturb=0.1, seed=9) as trainer:
        trainer.load(tmp_path / "saved")
        found = [trainer.step(*batch_of(BEFORE + step)).loss for step in range(AFTER)]
        assert found == expected
        assert_same(snapshot_of(trainer), wanted)


class Counting(nn.Module):
    """A batch norm that the steps update, and a buffer that no ``state_dict`` has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x):
        with piper.annotate("PP", 0):
            x = self.norm(self.first(x))
        with piper.annotate("PP", 1):
            self.seen += 1
            return self.second(x) + self.seen


@pytest.mark.parametrize("devices", [1, 2])
def test_buffers_that_steps_write(devices, tmp_path):
    model = Counting().double()
    batches = [(randn(8, 3, seed=s), randn(8, 2, seed=s + 50)) for s in range(4)]
    placed = [piper.Place({"PP": s}, devices=[s % devices]) for s in range(2)]
    how = [*placed, piper.Split({}, num_microbatches=2)]

    def make():
        adam = OPTIMIZERS["adamw"]
        given = copy.deepcopy(model)
        return piper.compile(given, mse, how, batches[0], optimizer=adam, backend="inprocess")

    expected = eager.train(model, mse, batches, 2, OPTIMIZERS["adamw"])
    with make() as trainer:
        for batch in batches[:2]:
            trainer.step(*batch)
        trainer.save(tmp_path / "saved")
    with make() as trainer:
        trainer.load(tmp_path / "saved")
        found = [trainer.step(*batch).loss for batch in batches[2:]]
        assert found == pytest.approx([step.loss for step in expected[2:]], rel=1e-11)
        buffers = trainer._backend.snapshot().buffers
        for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "seen"):
            torch.testing.assert_close(buffers[name], expected[-1].state[name], rtol=1e-11, atol=0)


HALF = piper.Precision(
    compute=torch.float16, loss_scale=piper.LossScale(init=2.0**8, growth_interval=2)
)


@pytest.mark.parametrize(("source", "target"), [("pp2 zero3", "pp4")])
def test_master_weights_and_the_scale_of_the_loss(source, target, tmp_path):
    def make(layout, **options):
        model = Model().float()
        batch = ((batch_of(0)[0][0].float(), False), batch_of(0)[1].float())
        given = {"optimizer": OPTIMIZERS["adamw"], "backend": "inprocess", "precision": HALF}
        return piper.compile(
            model, mse, LAYOUTS[layout], batch, verify_capture=False, **given, **options
        )

    def run(trainer, steps):
        batches = [((batch_of(s)[0][0].float(), False), batch_of(s)[1].float()) for s in steps]
        return [trainer.step(*batch) for batch in batches]

    with make(source) as trainer:
        run(trainer, range(3))
        trainer.save(tmp_path / "saved")
        saved, scaler = snapshot_of(trainer), trainer.loss_scaler.state_dict()
        expected = run(trainer, range(3, 5))
    assert scaler == {"scale": 2.0**9, "good_steps": 1}
    with make(target) as trainer:
        trainer.load(tmp_path / "saved")
        assert trainer.loss_scaler.state_dict() == scaler
        assert_same(snapshot_of(trainer), saved)
        found = run(trainer, range(3, 5))
    assert saved[0]["parameter", "gain"].dtype == torch.float32
    assert [r.loss_scale for r in found] == [r.loss_scale for r in expected]
    assert [r.loss for r in found] == pytest.approx([r.loss for r in expected], rel=1e-2)

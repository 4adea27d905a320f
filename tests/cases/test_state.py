"""Parameters and buffers that are special: unused, frozen, shared, not persistent, written by the
forward.
"""

import copy

import pytest
import torch
from tests.cases.equal import adamw, assert_equal, mse, randn, sgd
from tests.equality import eager, planned
from torch import nn

import piper
from piper.errors import DirectiveError, PlacementError, StateError

pytestmark = pytest.mark.timeout(90)


class Branching(nn.Module):
    """A second branch in stage 1 that a flag of the batch turns on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.branch = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x, *, branch):
        with piper.annotate("PP", 0):
            h = self.first(x).tanh()
        with piper.annotate("PP", 1):
            return self.second(h) + self.branch(h) if branch else self.second(h)


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_parameter_that_this_step_does_not_use(optimizer, replicas):
    """No gradient means no update: no weight decay, no momentum, no count of steps. (A zero
    gradient would move it.)
    """
    torch.manual_seed(0)
    model = Branching().double()
    groups = [list(range(replicas)), list(range(replicas, 2 * replicas))]
    strategy = piper.strategies.pipeline("1f1b", groups, 2)
    batches = [
        ({"x": randn(8, 3, seed=s), "branch": used}, randn(8, 2, seed=9 + s))
        for s, used in enumerate([True, False, False, True])
    ]
    plain = copy.deepcopy(model)
    reference = optimizer(list(plain.parameters()))
    with piper.compile(
        model, mse, strategy, batches[0], optimizer=optimizer, backend="inprocess"
    ) as trainer:
        for batch in batches:
            before = trainer.state_dict()["branch.weight"].clone()
            loss = trainer.step(*batch).loss
            expected = eager.one_step(plain, mse, batch, 2 * replicas, reference)
            assert loss == pytest.approx(expected.loss, rel=1e-12)
            state = trainer.state_dict()
            for name, tensor in expected.state.items():
                torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-12)
            moved = not torch.equal(before, state["branch.weight"])
            assert moved == batch[0]["branch"]


class SometimesTied(nn.Module):
    """A flag makes stage 1 use the weight of stage 0 too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, *, tied):
        with piper.annotate("PP", 0):
            h = self.first(x).tanh()
        with piper.annotate("PP", 1):
            return self.second(h) + self.first(h) if tied else self.second(h)


@pytest.mark.parametrize("flags", [(True, False, True), (False, True, False)])
def test_a_weight_that_a_stage_uses_in_some_steps_only(flags):
    """The copy that a step leaves out would be out of date at the next one: equal, or refused at
    that step, never silently stale.
    """
    torch.manual_seed(0)
    model = SometimesTied().double()
    batches = [
        ({"x": randn(8, 3, seed=s), "tied": tied}, randn(8, 3, seed=9 + s))
        for s, tied in enumerate(flags)
    ]
    expected = eager.train(model, mse, batches, 2, sgd)
    strategy = piper.strategies.pipeline("1f1b", [[0], [1]], 2)
    with piper.compile(
        model, mse, strategy, batches[0], optimizer=sgd, backend="inprocess"
    ) as trainer:
        assert trainer.step(*batches[0]).loss == pytest.approx(expected[0].loss, rel=1e-12)
        try:
            losses = [trainer.step(*batch).loss for batch in batches[1:]]
        except StateError as error:
            assert "first." in str(error)  # noqa: PT017 (equal or refused)
            same = trainer.step(*batches[0]).loss  # the trainer goes on with what it can do
            (_, wanted) = eager.train(model, mse, [batches[0]] * 2, 2, sgd)
            assert same == pytest.approx(wanted.loss, rel=1e-12)
        else:
            assert losses == pytest.approx([step.loss for step in expected[1:]], rel=1e-12)


class Mixed(nn.Module):
    """A frozen stage, a stage without parameters, a trained stage, and one with both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 4).requires_grad_(False)
        self.trained = nn.Linear(4, 4)
        self.both = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        self.both[0].requires_grad_(False)

    def forward(self, x):
        with piper.annotate("PP", 0):
            h = self.frozen(x).tanh()
        with piper.annotate("PP", 1):
            h = h.square() + 1.0
        with piper.annotate("PP", 2):
            h = self.trained(h).tanh()
        with piper.annotate("PP", 3):
            return self.both(h)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_stages_without_trained_parameters(schedule, replicas):
    groups = [[s * replicas + r for r in range(replicas)] for s in range(4)]
    strategy = piper.strategies.pipeline(schedule, groups, 4)
    batch = (randn(8, 3), randn(8, 2, seed=1))
    assert_equal(Mixed(), mse, strategy, batch, optimizer=adamw)


def test_frozen_tensors_do_not_change():
    model = Mixed()
    strategy = piper.strategies.pipeline("1f1b", [[0], [1], [2], [3]], 4)
    batch = (randn(8, 3).float(), randn(8, 2, seed=1).float())
    with piper.compile(
        model, mse, strategy, batch, optimizer=adamw, backend="inprocess"
    ) as trainer:
        trainer.step(*batch)
        state = trainer.state_dict()
    changed = {n for n, t in model.state_dict().items() if not torch.equal(t, state[n])}
    assert changed == {n for n, p in model.named_parameters() if p.requires_grad}


class Rotary(nn.Module):
    """A table that three stages read; not part of the state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.register_buffer("table", torch.arange(20.0).reshape(5, 4).cos(), persistent=False)
        self.register_buffer("kept", torch.ones(4))

    def forward(self, x):
        for stage, linear in enumerate(self.stages):
            with piper.annotate("PP", stage):
                x = linear(x * self.table + self.kept).tanh()
        return x


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_buffer_that_several_stages_read(replicas):
    groups = [[s * replicas + r for r in range(replicas)] for s in range(3)]
    strategy = piper.strategies.pipeline("1f1b", groups, 2)
    batch = (randn(8, 5, 4), randn(8, 5, 4, seed=1))
    assert_equal(Rotary(), mse, strategy, batch)
    model = Rotary().double()
    with piper.compile(model, mse, strategy, batch, optimizer=sgd, backend="inprocess") as trainer:
        trainer.step(*batch)
        assert trainer.state_dict().keys() == model.state_dict().keys()
        assert "table" not in trainer.state_dict()


class TiedFourTimes(nn.Module):
    """One weight, used by every stage, in two of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        with piper.annotate("PP", 0):
            h = self.b(self.a(x).tanh())
        with piper.annotate("PP", 1):
            h = self.a(h).tanh()
        with piper.annotate("PP", 2):
            return self.b(self.b(h).tanh())


class Borrowed(nn.Module):
    """Stage 1 reads a weight that only stage 0 trains: without a gradient, or in the forward
    only.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        with piper.annotate("PP", 0):
            h = self.a(x).tanh()
        with piper.annotate("PP", 1):
            if self.how == "detached":
                return self.b(h) * self.a.weight.detach().sum()
            with torch.no_grad():
                target = self.a(h)
            return self.b(h) * target


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("how", ["detached", "no_grad"])
def test_a_stage_reads_a_weight_that_another_one_trains(how, replicas):
    """Its copy gets no gradient of its own and must still follow."""
    groups = [list(range(replicas)), list(range(replicas, 2 * replicas))]
    strategy = piper.strategies.pipeline("1f1b", groups, 2)
    batch = (randn(8, 3), randn(8, 3, seed=1))
    assert_equal(Borrowed(how), mse, strategy, batch, steps=3)


def test_forward_and_backward_on_different_devices():
    """Every saved tensor crosses; the forward's copy of each weight must be updated too."""
    strategy = [
        piper.Place({"PASS": "F"}, devices=[0]),
        piper.Place({"PASS": "B"}, devices=[1]),
        piper.Split({}, num_microbatches=2),
    ]
    batch = (randn(8, 3), randn(8, 3, seed=1))
    assert_equal(TiedFourTimes(), mse, strategy, batch, steps=3)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_one_weight_in_every_stage(replicas, optimizer):
    groups = [[s * replicas + r for r in range(replicas)] for s in range(3)]
    strategy = piper.strategies.pipeline("1f1b", groups, 4)
    batch = (randn(8, 3), randn(8, 3, seed=1))
    plan = assert_equal(
        TiedFourTimes(), mse, strategy, batch, optimizer=optimizer, steps=3, poison=True
    )
    assert plan.num_devices == 3 * replicas


class Norms(nn.Module):
    """BatchNorm in both stages: buffers that the forward writes, one of them an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)
        self.norm_a, self.norm_b = nn.BatchNorm1d(4), nn.BatchNorm1d(2)

    def forward(self, x):
        with piper.annotate("PP", 0):
            h = self.norm_a(self.a(x)).tanh()
        with piper.annotate("PP", 1):
            return self.norm_b(self.b(h))


def test_running_statistics_pass_from_microbatch_to_microbatch():
    strategy = piper.strategies.pipeline("1f1b", [[0], [1]], 4)
    assert_equal(Norms(), mse, strategy, (randn(12, 3), randn(12, 2, seed=1)), steps=3)


def test_replicas_that_write_a_buffer_need_a_choice():
    batch = (randn(12, 3), randn(12, 2, seed=1))
    with pytest.raises(DirectiveError, match=r"norm_a\.running_mean.*replicated_buffers"):
        assert_equal(Norms(), mse, piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 2), batch)


@pytest.mark.parametrize("choice", ["first", "mean"])
def test_replicated_buffers(choice):
    """``first``: the statistics of replica 0's microbatches. ``mean``: those of every replica,
    averaged; counts stay counts.
    """
    torch.manual_seed(0)
    model = Norms().double()
    batch = (randn(12, 3), randn(12, 2, seed=1))
    strategy = piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 2, replicated_buffers=choice)
    program = piper.api.programs.Programs(model, mse, strategy).training(batch)
    (found,) = planned.train(program.plan, {}, model, [batch], sgd)
    (whole,) = eager.train(model, mse, [batch], 4, sgd)
    ends = []
    for half in (0, 6):
        replica = copy.deepcopy(model)
        for start in (half, half + 3):
            replica(batch[0][start : start + 3])
        ends.append(dict(replica.named_buffers()))
    for held in found.state:
        for name, tensor in held.items():
            wanted = whole.state[name]
            if name in ends[0]:
                wanted = ends[0][name]
                if choice == "mean" and wanted.is_floating_point():
                    wanted = (ends[0][name] + ends[1][name]) / 2
            torch.testing.assert_close(tensor, wanted, rtol=1e-10, atol=1e-12)
    assert found.loss == pytest.approx(whole.loss, rel=1e-12)


def test_a_written_buffer_that_another_device_reads():
    """Equal, or refused by name."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x):
            with piper.annotate("PP", 0):
                h = self.a(x)
                self.seen.add_(h.detach().sum(0))
            with piper.annotate("PP", 1):
                return self.b(h) * self.seen.tanh()

    batch = (randn(8, 3), randn(8, 3, seed=1))
    together = [piper.Split({}, num_microbatches=4)]
    assert_equal(Model(), mse, together, batch)
    try:
        assert_equal(Model(), mse, piper.strategies.pipeline("1f1b", [[0], [1]], 4), batch)
    except PlacementError as error:
        assert "seen" in str(error)  # noqa: PT017 (equal or refused)


def test_an_order_that_contradicts_the_sequence_of_a_buffer_is_refused():
    strategy = [
        piper.Split({}, num_microbatches=2),
        piper.Order([[{"PP": 0, "MB": 1, "PASS": "F"}], [{"PP": 0, "MB": 0, "PASS": "F"}]]),
    ]
    with pytest.raises(piper.errors.OrderError, match="cycle"):
        assert_equal(Norms(), mse, strategy, (randn(12, 3), randn(12, 2, seed=1)))

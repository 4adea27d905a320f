"""``step(update=False)``: several backward calls, then one update, against the same in plain
PyTorch.
"""

import copy
import math
from collections import Counter

import pytest
import torch
from tests.api.test_clipping import Model, sgd, strategy, weighted
from tests.cases.equal import mse, randint, randn
from tests.equality import eager, expert_matrix
from torch import nn

import piper
from piper.devices.memory import InMemoryCommunicator
from piper.errors import BatchError, FilterError
from piper.models import moe_loss

pytestmark = pytest.mark.timeout(120)

GROUPS = [[0, 1], [2, 3]]
COUNT = 4
"""Microbatches in all."""

PATTERN = [False, False, True, True, False, True]
"""Which calls update."""


def batch_of(call: int, rows: int = 8) -> eager.Batch:
    return randn(rows, 3, seed=call), randn(rows, 2, seed=call + 100)


class Plain:
    """Plain PyTorch: each call divides its own gradients by its own weight and adds them to
    ``.grad``.
    """

    def __init__(self, model, loss_fn, count=COUNT, max_norm=None, norm_type=2.0, optimizer=sgd):
        self.model, self.loss_fn, self.count = copy.deepcopy(model).double(), loss_fn, count
        self.max_norm, self.norm_type = max_norm, norm_type
        self.optimizer = optimizer([p for p in self.model.parameters() if p.requires_grad])
        self.norm = None

    def step(self, batch, *, update=True) -> float:
        size = eager.count_rows(batch[0]) // self.count
        cuts = [(m * size, (m + 1) * size) for m in range(self.count)]
        parts = [tuple(eager.rows(t, *cut) for t in batch) for cut in cuts]
        found = [self.loss_fn(eager.call(self.model, x), y) for x, y in parts]
        pairs = [f if isinstance(f, tuple) else (f, torch.tensor(1.0)) for f in found]
        total = sum(weight for _, weight in pairs)
        loss = sum(own for own, _ in pairs) / total
        loss.backward()
        if update:
            if self.max_norm is not None:
                parameters = self.model.parameters()
                self.norm = nn.utils.clip_grad_norm_(parameters, self.max_norm, self.norm_type)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def compiled(model, loss_fn, how, batch, **options):
    given = {"optimizer": sgd, "backend": "inprocess", **options}
    return piper.compile(copy.deepcopy(model).double(), loss_fn, how, batch, **given)


def assert_state(trainer, plain: Plain) -> None:
    state = trainer.state_dict()
    for name, tensor in eager.state_of(plain.model).items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-13, msg=name)


def assert_accumulates_equal(model, loss_fn, how, *, count=COUNT, norm=None, **options):
    plain = Plain(model, loss_fn, count, *(norm or ()))
    if norm is not None:
        options |= {"max_grad_norm": norm[0], "norm_type": norm[1]}
    with compiled(model, loss_fn, how, batch_of(0), **options) as trainer:
        for call, update in enumerate(PATTERN):
            before = trainer.state_dict()
            result = trainer.step(*batch_of(call), update=update)
            assert result.loss == pytest.approx(
                plain.step(batch_of(call), update=update), rel=1e-11
            )
            assert trainer.steps_done == sum(PATTERN[: call + 1])
            if update:
                assert_state(trainer, plain)
                if norm is not None:
                    assert result.grad_norm == pytest.approx(float(plain.norm), rel=1e-11)
            else:
                assert result.grad_norm is None
                assert all(torch.equal(before[n], t) for n, t in trainer.state_dict().items())
        for parameter in trainer._backend.copies():
            for name, tensor in parameter.parameters.items():
                torch.testing.assert_close(
                    tensor, eager.state_of(plain.model)[name], rtol=1e-10, atol=1e-13
                )


@pytest.mark.parametrize("loss_fn", [mse, weighted])
@pytest.mark.parametrize(
    "flags", [{}, {"shard_optimizer": True}, {"shard_grads": True}, {"shard_params": True}]
)
@pytest.mark.parametrize("tied", [False, True])
def test_two_backwards_and_one_update(loss_fn, flags, tied):
    """Earlier gradients are not rescaled by later calls: case 12 of those that other frameworks get
    wrong.
    """
    how = strategy(GROUPS, bucket_size=1e-4, **flags)
    assert_accumulates_equal(Model(3.0, tied=tied), loss_fn, how)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("loss_fn", [mse, weighted])
@pytest.mark.parametrize("flags", [{}, {"shard_optimizer": True}, {"shard_grads": True}])
def test_the_sum_is_clipped(norm_type, loss_fn, flags):
    how = strategy(GROUPS, **flags)
    model = Model(30.0, tied=True)
    assert_accumulates_equal(model, loss_fn, how, norm=(0.3, norm_type))


def hybrid(**flags):
    """Four replicas: sharded within pairs, replicated across."""
    return [piper.Replicate({}, GROUPS, **flags), piper.Split({}, num_microbatches=2)]


@pytest.mark.parametrize("flags", [{"shard_optimizer": True}, {"shard_params": True}])
def test_slices_of_several_groups(flags):
    model = Model(3.0, tied=True)
    assert_accumulates_equal(model, weighted, hybrid(**flags), count=8, norm=(0.3, 2.0))


@pytest.mark.parametrize("flags", [{}, {"shard_optimizer": True}, {"shard_grads": True}])
def test_experts(flags):
    """Each device keeps gradients of the experts that it holds."""
    model = expert_matrix.Stack(2, "dropless")
    shard = piper.Shard({"EP": "*"}, devices=[[0, 1], [2, 3]])
    how = [piper.Place({}, [0, 1, 2, 3]), piper.Replicate({}, **flags), shard]
    how.append(piper.Split({}, num_microbatches=2))
    plain = Plain(model, moe_loss, 8)
    batches = [randint(expert_matrix.VOCABULARY, 16, 3, seed=s) for s in range(8)]
    with compiled(model, moe_loss, how, (batches[0], batches[0])) as trainer:
        for x, y, update in zip(batches, batches[1:], PATTERN, strict=False):
            trainer.step(x, y, update=update)
            plain.step((x, y), update=update)
        assert_state(trainer, plain)


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "flags", [pytest.param({}, marks=pytest.mark.full), {"shard_optimizer": True}]
)
def test_processes(flags):
    how = strategy(GROUPS, bucket_size=1e-4, **flags)
    assert_accumulates_equal(Model(3.0, tied=True), weighted, how, norm=(0.3, 2.0), backend="ray")


# --- what is sent -----------------------------------------------------------------------------------


@pytest.fixture
def reductions(monkeypatch):
    """What members of reductions gave since the list was cleared: kind and number of elements."""
    seen: list[tuple[str, int]] = []

    def counting(kind):
        real = getattr(InMemoryCommunicator, kind)

        def counted(self, *tensors):
            seen.append(
                (kind, tensors[-1].numel() if kind == "reduce_scatter" else tensors[0].numel())
            )
            return real(self, *tensors)

        return counted

    for kind in ("all_reduce", "reduce_scatter"):
        monkeypatch.setattr(InMemoryCommunicator, kind, counting(kind))
    return seen


def reduced_by_calls(reductions, loss_fn, how) -> list[Counter]:
    """What the calls of a step without accumulation, two that keep, and the updating one reduce."""
    found = []
    with compiled(Model(3.0, tied=True), loss_fn, how, batch_of(0)) as trainer:
        for call, update in enumerate((True, False, False, True)):
            reductions.clear()
            trainer.step(*batch_of(call), update=update)
            found.append(Counter(reductions))
    return found


LEVELS = [{}, {"shard_optimizer": True}, {"shard_grads": True}, {"shard_params": True}]


@pytest.mark.parametrize("flags", LEVELS)
def test_reductions_of_a_step_happen_in_the_call_that_updates(reductions, flags):
    """ZeRO-2 and 3 cut every microbatch's gradients into slices; only the tied parameter's are
    added up over the stages, once.
    """
    alone, *kept, last = reduced_by_calls(reductions, mse, strategy(GROUPS, **flags))
    assert alone == last
    assert alone.total() > 0
    for call in kept:
        assert not [kind for kind, _ in call if kind == "all_reduce"]
        if flags.keys() <= {"shard_optimizer"}:
            assert not call
        else:
            scatters = {k: n for k, n in alone.items() if k[0] == "reduce_scatter"}
            assert call == Counter(scatters)


@pytest.mark.parametrize("flags", LEVELS[:2])
def test_a_weighted_loss_adds_up_its_weight_in_every_call(reductions, flags):
    """Each call's gradients are divided by its own weight: a scalar, on each of four devices."""
    alone, *kept, last = reduced_by_calls(reductions, weighted, strategy(GROUPS, **flags))
    assert alone == last
    assert all(call.keys() == {("all_reduce", 1)} for call in kept)


@pytest.mark.parametrize("flags", LEVELS[1:])
def test_sums_over_groups_that_shard_happen_once(reductions, flags):
    alone, *kept, last = reduced_by_calls(reductions, mse, hybrid(**flags))
    assert alone == last
    assert all(kind == "reduce_scatter" for call in kept for kind, _ in call)


@pytest.mark.parametrize("zero", range(4))
def test_reductions_start_before_the_backward_is_over(zero):
    """The kept gradients are added at once, not where the updates are: else nothing would hide the
    reductions.
    """
    how = [
        piper.Place({}, [0, 1]),
        piper.Replicate(
            {}, shard_optimizer=zero == 1, shard_grads=zero == 2, shard_params=zero == 3
        ),
    ]
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)), nn.Linear(3, 2))
    for i, layer in enumerate(model):
        piper.annotate_module(layer, "LAYER", i)
    with compiled(model, mse, how, batch_of(0)) as trainer:
        trainer.step(*batch_of(0), update=False)
        trainer.step(*batch_of(1))
        program = trainer.program.plan.devices[0].instructions
    roles = [m.role if (m := i.rendezvous()) else i.op for i in program]
    first = next(n for n, role in enumerate(roles) if role in ("all_reduce", "reduce_scatter"))
    assert roles[first:].count("compute") >= 3


# --- what changes from call to call -------------------------------------------------------------------


@pytest.mark.parametrize("groups", [[[0]], [[0], [1]], [[0, 1]]])
def test_on_few_devices(groups):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    piper.annotate_module(model[0], "PP", 0)
    piper.annotate_module(model[2], "PP", len(groups) - 1)
    count = 2 * len(groups[0])
    assert_accumulates_equal(model, mse, strategy(groups), count=count)


@pytest.mark.parametrize("as_function", [True, False])
def test_fit_begins_with_what_was_kept(as_function):
    model, how = Model(3.0), strategy(GROUPS, shard_grads=True)
    plain = Plain(model, mse)
    with compiled(model, mse, how, batch_of(0)) as trainer:
        trainer.step(*batch_of(7), update=False)
        plain.step(batch_of(7), update=False)
        data = batch_of if as_function else iter([batch_of(s) for s in range(3)])
        results = trainer.fit(data, 3)
        losses = [plain.step(batch_of(s)) for s in range(3)]
        assert [r.step for r in results] == [0, 1, 2]
        assert [r.loss for r in results] == pytest.approx(losses, rel=1e-11)
        assert_state(trainer, plain)


def test_evaluation_and_other_shapes_between():
    """Each call's loss is a mean over its own rows; evaluating keeps what is kept."""
    model, how = Model(3.0), strategy(GROUPS)
    plain = Plain(model, mse)
    with compiled(model, mse, how, batch_of(0)) as trainer:
        for rows in (8, 12):
            trainer.step(*batch_of(rows, rows), update=False)
            plain.step(batch_of(rows, rows), update=False)
            trainer.evaluate(*batch_of(1, 16))
        trainer.step(*batch_of(3))
        plain.step(batch_of(3))
        assert_state(trainer, plain)


def test_loading_weights_drops_what_was_kept():
    model, how = Model(3.0), strategy(GROUPS, shard_params=True)
    plain = Plain(model, mse)
    with compiled(model, mse, how, batch_of(0)) as trainer:
        state = trainer.state_dict()
        trainer.step(*batch_of(1), update=False)
        trainer.load_state_dict(state)
        for call in (2, 3):
            trainer.step(*batch_of(call), update=call == 3)
            plain.step(batch_of(call), update=call == 3)
        assert_state(trainer, plain)


class Branches(nn.Module):
    """The second layer has a gradient only where the constant says so."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x, both):
        return self.first(x) + self.second(x) if both else self.first(x)


def test_a_gradient_that_begins_late_or_ends_early():
    x, y = batch_of(0)
    whole, part = ((x, True), y), ((x, False), y)
    model = Branches()
    plain = Plain(model, mse, 2)
    with compiled(model, mse, [piper.Split({}, num_microbatches=2)], whole) as trainer:
        for batch, update in ((part, False), (whole, True), (part, True)):
            trainer.step(*batch, update=update)
            plain.step(batch, update=update)
            assert_state(trainer, plain)
        trainer.step(*whole, update=False)
        with pytest.raises(BatchError, match=r"'second.* has a gradient from step.update=False"):
            trainer.step(*part)


class Shared(nn.Module):
    """Stage 1 reads the weight of stage 0, and contributes to its gradient where *both* says so."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.head = nn.Parameter(torch.randn(3)), nn.Linear(3, 2)

    def forward(self, x, both):
        with piper.annotate("PP", 0):
            h = (x * self.shared).tanh()
        with piper.annotate("PP", 1):
            return self.head(h + (self.shared if both else self.shared.detach()))


@pytest.mark.parametrize("kept", [[False], [True], [False, True], [True, False]])
@pytest.mark.parametrize("last", [False, True])
def test_a_stage_that_contributes_in_some_calls(kept, last):
    """Each device keeps what it made; the updating call reduces it wherever it is, or refuses to
    lose it.
    """
    model, how = Shared(), strategy([[0, 1], [2, 3]])
    batches = [((batch_of(c)[0], both), batch_of(c)[1]) for c, both in enumerate([*kept, last])]
    plain = Plain(model, mse)
    with compiled(model, mse, how, batches[0]) as trainer:
        for batch in batches[:-1]:
            trainer.step(*batch, update=False)
            plain.step(batch, update=False)
        if any(kept) and not last:
            message = r"'shared' has a gradient from step.update=False. on device 2, which computes"
            with pytest.raises(BatchError, match=message):
                trainer.step(*batches[-1])
            return
        trainer.step(*batches[-1])
        plain.step(batches[-1])
        assert_state(trainer, plain)
        for copies in trainer._backend.copies():
            for name, tensor in copies.parameters.items():
                wanted = eager.state_of(plain.model)[name]
                torch.testing.assert_close(tensor, wanted, rtol=1e-10, atol=1e-13)


def test_every_call_draws_random_numbers_of_its_own():
    """Dropout under another strategy drops the same elements; two calls of one optimizer step drop
    different ones.
    """
    model = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5), nn.Linear(64, 2))
    piper.annotate_module(model[0], "PP", 0)
    piper.annotate_module(model[2], "PP", 1)
    losses, states = [], []
    for how in ([piper.Split({}, num_microbatches=2)], strategy([[0], [1]])):
        with compiled(model, mse, how, batch_of(0)) as trainer:
            calls = [trainer.step(*batch_of(0), update=update).loss for update in (False, True)]
            losses.append(calls)
            states.append(trainer.state_dict())
    assert losses[0][0] != losses[0][1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kind", ["refresh", "all_reduce", "reduce_scatter"])
def test_an_order_may_name_communication_that_only_the_update_has(kind):
    flags = {"all_reduce": {}, "refresh": {"shard_optimizer": True}}
    how = strategy(GROUPS, **flags.get(kind, {"shard_optimizer": True}))
    how.append(piper.Order([[{"PASS": "B"}], [{"COMM": kind}]]))
    assert_accumulates_equal(Model(3.0), mse, how)


def test_an_order_that_names_unknown_communication_is_refused():
    how = [*strategy(GROUPS), piper.Order([[{"COMM": "refersh"}]])]
    with pytest.raises(FilterError, match="is unknown"):
        compiled(Model(3.0), mse, how, batch_of(0))

"""Half backwards in the situations that other frameworks get wrong. The matrix is
tests/equality/test_split_backward.py.
"""

import pytest
import torch
from tests.cases.equal import assert_equal, mse, randn
from tests.equality.split_matrix import KINDS, WIDTH, Normed, Stages, model_of
from tests.support.zero_bubble import order, zb_h1
from torch import nn

import piper
from piper.errors import CaptureError, OrderError

pytestmark = pytest.mark.timeout(120)


def steps(text: str) -> list[tuple[str, int]]:
    """``"F0 BI0 BW0"``: pass and microbatch of each step."""
    return [(word.rstrip("0123456789"), int(word.lstrip("FBIW"))) for word in text.split()]


def vectors(rows: int):
    return randn(rows, WIDTH), randn(rows, WIDTH, seed=1)


class Hooked(nn.Module):
    """A hook on an activation's gradient, and one on a module's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b.register_full_backward_hook(_double)

    def forward(self, x):
        h = self.a(x).tanh()
        h.register_hook(_halve)
        return self.b(h)


def _halve(grad):
    return grad * 0.5


def _double(_module, inputs, _outputs):
    return (inputs[0] * 2.0,)


@pytest.mark.parametrize("zero", [{}, {"shard_grads": True}, {"shard_params": True}], ids=str)
def test_hooks_and_data_parallelism(zero):
    """No backward of autograd runs that could skip a hook or a reduction."""
    torch.manual_seed(0)
    strategy = [
        *piper.placements.chain([[0, 1], [2, 3]]),
        piper.Replicate({}, **zero),
        piper.Split({}, num_microbatches=3),
        *zb_h1(2, 3),
    ]
    assert_equal(Stages(2, lambda _: Hooked()), mse, strategy, vectors(12))


def test_a_parameter_hook_is_refused():
    model = Stages(2, lambda _: Hooked())
    model.blocks[1].a.weight.register_hook(_halve)
    with pytest.raises(CaptureError, match=r"blocks\.1\.a\.weight"):
        piper.capture(model, mse, tuple(t.float() for t in vectors(4)))


def test_gradients_sent_late_and_in_another_order():
    """Stage 1 runs two BI before stage 0 takes either; each gradient must be its own
    microbatch's.
    """
    strategy = [
        *piper.placements.chain([[0], [1], [2]]),
        piper.Split({}, num_microbatches=4),
        order(0, steps("F0 F1 F2 F3 BW1 BW0 BW3 BW2")),
        order(1, steps("F0 F1 F2 F3 BI0 BI1 BW1 BI2 BI3 BW0 BW3 BW2")),
        order(2, steps("F0 F1 BI1 BI0 F2 F3 BW0 BI3 BW3 BI2 BW1 BW2")),
    ]
    assert_equal(Stages(3, lambda _: Normed()), mse, strategy, vectors(8), delay=0.002, poison=True)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("F0 BW1 F1 BW0", "F0 F1 BI0 BI1 BW0 BW1"),
        ("F0 F1 BW1 BW0", "F0 BI0 BW0 F1 BI1 BW0"),
        ("F0 F1 BW0 BW1", "F0 BW0 BI0 F1 BI1 BW1"),
    ],
    ids=["stages wait for each other", "the same half twice", "weights before inputs"],
)
def test_crossed_orders_are_refused_with_a_picture(first, second):
    strategy = [
        *piper.placements.chain([[0], [1]]),
        piper.Split({}, num_microbatches=2),
        order(0, steps(first)),
        order(1, steps(second)),
    ]
    with pytest.raises(OrderError, match=r"cycle(.|\n)*before(.|\n)*directive \d"):
        assert_equal(Stages(2, lambda _: Normed()), mse, strategy, vectors(4))


def test_batch_norm_writes_its_buffers_once_per_microbatch():
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            return self.norm(self.linear(x)).exp()

    strategy = [
        *piper.placements.chain([[0], [1]]),
        piper.Split({}, num_microbatches=3),
        *zb_h1(2, 3),
    ]
    assert_equal(Stages(2, lambda _: Norm()), mse, strategy, vectors(12))


def two_ways() -> list[piper.Order]:
    """DualPipe on two ranks: 0 and 1 flow down, 2 and 3 up. Each rank is the first stage of one
    flow and the last of the other; a forward of one overlaps a backward of the other.
    """

    def rank(near: tuple[int, int], far: tuple[int, int]) -> piper.Order:
        def step(pass_: str, stage: int, m: int):
            return {"PP": stage, "MB": m, "PASS": pass_}

        (a, b), (c, d) = near, far
        groups = [
            [step("F", 0, a)],
            [step("F", 0, b)],
            [step("F", 1, c)],
            [step("BI", 1, c)],
            [step("F", 1, d), step("B", 0, a)],
            [step("BI", 1, d)],
            [step("BW", 1, c)],
            [step("BI", 0, b)],
            [step("BW", 1, d)],
            [step("BW", 0, b)],
        ]
        return piper.Order(groups)

    return [rank((0, 1), (2, 3)), rank((2, 3), (0, 1))]


ZERO = [{}, {"shard_optimizer": True}, {"shard_grads": True}, {"shard_params": True}]


@pytest.mark.parametrize(
    ("kind", "zero", "replicas"),
    [
        *(("normed", zero, replicas) for zero in ZERO for replicas in (1, 2)),
        ("tied", ZERO[0], 1),
        ("tied", ZERO[3], 2),
    ],
    ids=str,
)
def test_two_flows(kind, zero, replicas):
    """Each stage's parameters are on two groups, one per direction; their contributions are summed
    over both.
    """
    groups = [list(range(g * replicas, (g + 1) * replicas)) for g in range(2)]
    strategy = [
        piper.Split({}, num_microbatches=4),
        *piper.placements.two_way(groups, 4),
        piper.Replicate({}, bucket_size=2e-4, **zero),
        *two_ways(),
    ]
    plan = assert_equal(
        model_of(kind, 2), KINDS[kind].loss_fn, strategy, KINDS[kind].batch(4 * replicas * 2)
    )
    assert len(plan.dag.overlaps) == 2


def test_evaluation_and_accumulated_gradients():
    """A strategy of half backwards evaluates, too (there is no backward then), and adds up
    gradients over steps.
    """
    model = model_of("normed", 2)
    strategy = [
        *piper.placements.chain([[0], [1]]),
        piper.Split({}, num_microbatches=2),
        *zb_h1(2, 2),
    ]
    batch = vectors(8)
    halves = [tuple(t[:4] for t in batch), tuple(t[4:] for t in batch)]
    found = []
    # The mean over eight rows is half the sum of the means over four.
    for parts, rate in ((halves, 1e-2), ([batch], 2e-2)):
        with piper.compile(
            model,
            mse,
            strategy,
            parts[0],
            optimizer=lambda ps, rate=rate: torch.optim.SGD(ps, lr=rate),
            backend="inprocess",
        ) as trainer:
            loss = trainer.evaluate(*batch).loss
            for inputs, targets in parts[:-1]:
                trainer.step(inputs, targets, update=False)
            trainer.step(*parts[-1])
            found.append((loss, trainer.state_dict()))
    (loss, state), (expected_loss, expected) = found
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    before = model.state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-12)
        assert not torch.equal(tensor, before[name])

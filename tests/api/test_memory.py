"""What compile says to the planner about memory."""

import pytest
import torch
from tests.cases.equal import mse, randn
from torch import nn

import piper
from piper.api.memory import frame_bytes, optimizer_bytes
from piper.backends.inprocess import InProcessBackend
from piper.errors import ConfigError, MemoryBudgetError
from piper.ops.compute import Compute
from piper.ops.p2p import PostReceive
from piper.plan.account import account, adam_bytes, gloo_frame
from piper.runtime.optimizer import OptimizerSpec


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])

    def forward(self, x):
        for stage, layer in enumerate(self.layers):
            with piper.annotate("PP", stage):
                x = layer(x).tanh()
        return x


def adam(parameters):
    return torch.optim.Adam(parameters)


def compiled(backend="inprocess", **options):
    batch = (randn(16, 16), randn(16, 16, seed=1))
    strategy = [*piper.strategies.pipeline("gpipe", [[0], [1]], 4), piper.Offload({})]
    return piper.compile(
        Two().double(), mse, strategy, batch, optimizer=adam, backend=backend, **options
    )


def posted_first(trainer):
    """Receives (of gradients) that device 0 posts before its first chunk."""
    found = trainer.program.plan.devices[0].instructions
    first = next(n for n, i in enumerate(found) if isinstance(i, Compute))
    return sum(isinstance(i, PostReceive) for i in found[:first])


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (adam, adam_bytes),
        (lambda ps: torch.optim.AdamW(ps, amsgrad=True), lambda n: 3 * n + 4),
        (lambda ps: torch.optim.SGD(ps, lr=0.1), lambda n: 0),
        (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), lambda n: n),
    ],
)
def test_the_optimizers_state_is_sized_by_trying(build, expected):
    found = optimizer_bytes(OptimizerSpec(build))
    assert [found(n) for n in (4, 1000, 2**30)] == [expected(n) for n in (4, 1000, 2**30)]


def test_the_group_that_keeps_the_most_counts():
    groups = ({"names": ["a.*"], "momentum": 0.9}, {"names": ["b.*"]})
    spec = OptimizerSpec(lambda ps: torch.optim.SGD(ps, lr=0.1), groups)
    assert optimizer_bytes(spec)(100) == 100
    assert optimizer_bytes(None)(100) == 0


def test_messages_between_processes_have_frames():
    assert frame_bytes("ray") is gloo_frame
    assert frame_bytes("inprocess") is int
    assert frame_bytes(InProcessBackend()) is int


def test_a_step_within_the_budget_runs():
    with compiled() as usual:
        peak = max(memory.peak for memory in account(usual.program.plan, adam_bytes))
        assert posted_first(usual) == 4
    with compiled(memory_budget=peak - 1) as trainer:
        assert max(m.peak for m in account(trainer.program.plan, adam_bytes)) < peak
        batch = (randn(16, 16), randn(16, 16, seed=1))
        assert trainer.step(*batch).loss > 0


def test_bounds_are_the_users_if_given():
    with compiled(receive_bytes=0, gather_bytes="1MiB", fetch_bytes=5) as trainer:
        assert posted_first(trainer) == 0


class Untouched(InProcessBackend):
    def start(self, num_devices):
        raise AssertionError("a worker was started")


def test_what_does_not_fit_is_refused_before_a_worker_starts():
    with pytest.raises(MemoryBudgetError, match="would do"):
        compiled(Untouched(), memory_budget="1KiB")
    with pytest.raises(ConfigError, match="memory_budget: expected bytes"):
        compiled(Untouched(), memory_budget="plenty")
    with pytest.raises(ConfigError, match="fetch_bytes: expected bytes"):
        compiled(Untouched(), fetch_bytes="-1")

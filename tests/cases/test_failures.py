"""A worker fails: the driver says what, where, soon, and leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.cases import exploding
from tests.cases.equal import assert_equal, sgd

import piper
from piper.backends.inprocess import InProcessBackend
from piper.errors import RunError, StateError

ROOT = Path(__file__).parents[2]
MICROBATCHES = 4
STRATEGY = piper.strategies.pipeline("1f1b", [[0], [1]], MICROBATCHES)
SOON = 15.0
"""Seconds from the failure to the exception on the driver."""


def trainer(backend) -> piper.Trainer:
    return piper.compile(
        exploding.Exploding(),
        exploding.loss_fn,
        STRATEGY,
        exploding.batch(8, None),
        optimizer=sgd,
        backend=backend,
    )


@pytest.mark.timeout(60)
def test_the_model_is_fine_without_the_bad_index():
    assert_equal(exploding.Exploding(), exploding.loss_fn, STRATEGY, exploding.batch(8, None))


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("inprocess", marks=pytest.mark.timeout(60)),
        pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.timeout(300)]),
    ],
)
def test_a_worker_raises_in_the_backward_of_one_microbatch(backend):
    """Microbatch 2, stage 1. The other worker waits for its gradient: it must not wait for ever,
    nor hide the cause.
    """
    threads = threading.active_count()
    with trainer(backend) as running:
        running.step(*exploding.batch(8, None))
        began = time.monotonic()
        with pytest.raises(RunError) as caught:
            running.step(*exploding.batch(8, 5))
        assert time.monotonic() - began < SOON
        text = str(caught.value)
        assert re.search(r"device 1, node B PP=1 MB=2, microbatch 2", text), text
        assert "IndexError" in text or "index out of range" in text
        assert "embedding" in text
        with pytest.raises((RunError, StateError), match="closed"):
            running.step(*exploding.batch(8, None))
    if backend == "inprocess":
        assert threading.active_count() == threads


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_worker_is_killed_in_the_middle_of_a_run():
    """SIGKILL: no exception, no goodbye. The driver raises soon and no process of the run is
    left.
    """
    with trainer("ray") as running:
        running.step(*exploding.batch(8, None))
        workers = _actors()
        assert len(workers) == 2
        killer = threading.Timer(1.0, os.kill, (workers[1], signal.SIGKILL))
        killer.start()
        began = time.monotonic()
        with pytest.raises(RunError, match=r"device \d"):
            running.fit(lambda _step: exploding.batch(8, None), 10**6)
        assert time.monotonic() - began < 1.0 + SOON
    deadline = time.monotonic() + 20.0
    while _actors() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not _actors()


def _actors() -> list[int]:
    """Process ids of Ray actors of ours that are descendants of this process."""
    listed = subprocess.run(
        ["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()[1:]
    parents: dict[int, int] = {}
    named: list[int] = []
    for line in listed:
        pid, parent, command = line.split(None, 2)
        parents[int(pid)] = int(parent)
        if "_Actor" in command:
            named.append(int(pid))

    def ours(pid: int) -> bool:
        while pid in parents:
            if pid == os.getpid():
                return True
            pid = parents[pid]
        return False

    return sorted(pid for pid in named if ours(pid))


QUIET = """
import torch, piper
from piper.models import MLP, MLPConfig, mlp_loss
torch.manual_seed(0)
model = MLP(MLPConfig(in_features=3, width=4, out_features=2, num_layers=8, num_stages=8))
groups = [[0], [1], [2], [3]]
strategy = [*piper.placements.v_shape(groups), piper.Split({}, num_microbatches=2)]
batch = (torch.randn(4, 3), torch.randn(4, 2))
with piper.compile(model, mlp_loss, strategy, batch, backend="%s",
                   optimizer=lambda p: torch.optim.SGD(p, lr=0.1)) as trainer:
    print(repr(trainer.step(*batch).loss), repr(mlp_loss(model(batch[0]), batch[1]).item()))
"""


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("inprocess", marks=pytest.mark.timeout(100)),
        pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.timeout(300)]),
    ],
)
def test_the_true_loss_and_no_noise(backend):
    """A V over four workers: the loss is made on the first device. One line on stdout, at most one
    per warning on stderr.
    """
    ran = subprocess.run(
        [sys.executable, "-c", QUIET % backend],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    (line,) = ran.stdout.splitlines()
    found, expected = map(float, line.split())
    assert found == pytest.approx(expected, rel=1e-5)
    noise = [text for text in ran.stderr.splitlines() if text.strip()]
    assert len(noise) <= 1, ran.stderr


@pytest.mark.timeout(60)
def test_a_peer_that_never_comes_is_an_error_after_the_time_limit():
    """A device that is busy for longer than the limit: the waiting one gives up by name, instead of
    waiting for ever.
    """

    def slow(step: int):
        if step == 1 and threading.current_thread().name.endswith(" 0"):
            time.sleep(3.0)
        return exploding.batch(8, None)

    with trainer(InProcessBackend(timeout=1.0)) as running:
        began = time.monotonic()
        with pytest.raises(RunError, match=r"did not complete within 1 s"):
            running.fit(slow, 3)
        assert time.monotonic() - began < SOON


@pytest.mark.timeout(60)
def test_numbers_that_are_not_finite_are_passed_on_as_they_are():
    """An infinite input gives the loss that PyTorch gives, not an exception and not a smaller
    number.
    """
    (x, index), y = exploding.batch(8, None)
    with trainer("inprocess") as running:
        x[3] = torch.inf
        y[0] = torch.nan
        assert torch.tensor(running.step((x, index), y).loss).isnan()
        assert running.state_dict()["stages.1.bias"].isnan().any()

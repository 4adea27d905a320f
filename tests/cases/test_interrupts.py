"""Ctrl-C ends a call of a trainer between two steps; a second one ends it at once."""

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.errors import Interrupted, StateError
from piper.runtime.worker import Worker

F = torch.nn.functional


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = self.a(x)
        with piper.annotate("PP", 1):
            return self.b(h)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)


def trainer() -> piper.Trainer:
    return piper.compile(
        Model(),
        F.mse_loss,
        piper.strategies.pipeline("1f1b", [[0], [1]], 2),
        batch(0),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        backend="inprocess",
    )


def press(noted: int) -> None:
    """Ctrl-C while the main thread waits for the workers, which are the callers."""
    os.kill(os.getpid(), signal.SIGINT)
    while getattr(getattr(signal.getsignal(signal.SIGINT), "__self__", None), "_noted", 9) < noted:
        time.sleep(0.001)


def pressing(step: int, presses: int = 1) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Data on whose way to the workers Ctrl-C is pressed in *step*."""
    pressed = threading.Lock()  # several devices ask for the batch

    def data(asked: int) -> tuple[Tensor, Tensor]:
        on_worker = threading.current_thread() is not threading.main_thread()
        if asked == step and on_worker and pressed.acquire(blocking=False):
            for number in range(1, presses + 1):
                press(number if number < presses else 0)
        return batch(asked)

    return data


def equal(found: piper.Trainer, steps: int) -> bool:
    with trainer() as expected:
        expected.fit(batch, steps)
        state = expected.state_dict()
    return all(torch.equal(tensor, state[n]) for n, tensor in found.state_dict().items())


def test_fit_ends_after_the_step_and_goes_on_from_there(tmp_path):
    seen: list[int] = []
    with trainer() as mine:
        with pytest.raises(Interrupted, match="can be used as before") as caught:
            mine.fit(pressing(3), 5000, lambda results: seen.extend(r.step for r in results))
        done = mine.steps_done
        assert 4 <= done < 5000
        assert [r.step for r in caught.value.results] == seen == [*range(done)]
        mine.save(tmp_path / "saved")
        assert equal(mine, done)
        mine.fit(batch, 2)
        assert equal(mine, done + 2)
        mine.load(tmp_path / "saved")
        assert mine.steps_done == done
        assert equal(mine, done)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_is_the_users_keyboard_interrupt():
    assert issubclass(Interrupted, KeyboardInterrupt)


def test_a_second_ctrl_c_aborts():
    with trainer() as mine:
        with pytest.raises(KeyboardInterrupt) as caught:
            mine.fit(pressing(1, presses=2), 5)
        assert not isinstance(caught.value, Interrupted)
        with pytest.raises(StateError, match="closed after KeyboardInterrupt"):
            mine.step(*batch(0))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_the_users_own_data_leaves_the_trainer_usable():
    def stream():
        for step in range(9):
            if step == 3:
                signal.raise_signal(signal.SIGINT)
            yield batch(step)

    with trainer() as mine:
        with pytest.raises(Interrupted) as caught:
            mine.fit(stream(), 9)
        assert mine.steps_done == len(caught.value.results)
        assert equal(mine, mine.steps_done)


@pytest.mark.parametrize(
    ("method", "call", "steps"),
    [
        ("run", lambda t, _: t.step(*batch(1)), 2),
        ("run", lambda t, _: t.evaluate(*batch(1)), 1),
        ("profile", lambda t, _: t.profile(*batch(0), steps=1), 2),
        ("snapshot", lambda t, _: t.state_dict(), 1),
        ("write_file", lambda t, path: t.save(path / "c"), 1),
        ("restore", lambda t, _: t.load_state_dict(Model().state_dict()), 1),
    ],
)
def test_ctrl_c_in_any_call_leaves_the_trainer_usable(monkeypatch, tmp_path, method, call, steps):
    with trainer() as mine:
        mine.step(*batch(0))
        whole, pressed = getattr(Worker, method), threading.Lock()

        def interrupted(self, *arguments, **keywords):
            if pressed.acquire(blocking=False):
                press(0)
            return whole(self, *arguments, **keywords)

        monkeypatch.setattr(Worker, method, interrupted)
        with pytest.raises(Interrupted):
            call(mine, tmp_path)
        assert pressed.locked()
        assert mine.steps_done == steps
        assert mine.step(*batch(steps)).step == steps
        if method == "write_file":
            assert piper.Checkpoint.open(tmp_path / "c").step == 1


def test_kept_gradients_survive(monkeypatch):
    with trainer() as mine:
        whole, pressed = Worker.run, threading.Lock()

        def interrupted(self, *arguments, **keywords):
            if pressed.acquire(blocking=False):
                press(0)
            return whole(self, *arguments, **keywords)

        monkeypatch.setattr(Worker, "run", interrupted)
        with pytest.raises(Interrupted):
            mine.step(*batch(0), update=False)
        with pytest.raises(StateError, match="update=False"):
            mine.save("/nowhere/at/all")
        mine.step(*batch(1))
        found = mine.state_dict()
    with trainer() as expected:
        expected.step(*batch(0), update=False)
        expected.step(*batch(1))
        assert all(torch.equal(t, found[n]) for n, t in expected.state_dict().items())


def test_a_handler_of_the_users_own_is_called_after_the_step():
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: seen.append(number))
    try:
        with trainer() as mine:
            assert len(mine.fit(pressing(1), 3)) == 3
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]


def test_a_closed_trainer_says_so():
    mine = trainer()
    mine.close()
    mine.close()
    for call in (
        lambda: mine.step(*batch(0)),
        lambda: mine.evaluate(*batch(0)),
        lambda: mine.fit(batch, 1),
        lambda: mine.fit([batch(0)], 1),
        mine.state_dict,
        lambda: mine.load_state_dict({}),
        lambda: mine.copy_to(Model()),
        lambda: mine.save("/nowhere/at/all"),
        lambda: mine.load("/nowhere/at/all"),
        lambda: mine.profile(*batch(0)),
    ):
        with pytest.raises(
            StateError, match="this trainer is closed: it was closed; compile a new"
        ):
            call()


def test_a_trainer_that_nobody_refers_to_closes_itself(monkeypatch):
    mine = trainer()
    backend, closed = mine._backend, []
    monkeypatch.setattr(type(backend), "_stop", lambda self: closed.extend([self]))
    del mine
    assert closed == [backend]

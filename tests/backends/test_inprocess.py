"""Hand-made plans on threads, against plain PyTorch."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.backends import plans

from piper.backends.inprocess import InProcessBackend
from piper.errors import BatchError, CommunicationError, ConfigError, RunError, StateError
from piper.runtime.batch import Signature, signature
from piper.runtime.optimizer import OptimizerSpec
from piper.runtime.snapshot import OptimizerSnapshot, StateSnapshot

PIPELINE_ROWS = plans.ROWS * plans.MICROBATCHES


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adam(params):
    return torch.optim.Adam(params, lr=0.05, eps=0.1)


def started(plan, rows, *, optimizer=momentum, **options) -> InProcessBackend:
    backend = InProcessBackend(**{"timeout": 20.0, **options})
    backend.start(2)
    backend.load("train", plan, signature(plans.batch(0, rows)))
    backend.initialise("train", plans.weights(), OptimizerSpec(optimizer))
    return backend


def losses(result) -> list[float]:
    return [sum(s.values["loss"].values()) / len(s.values["loss"]) for s in result.steps]


@pytest.mark.parametrize("optimizer", [momentum, adam])
@pytest.mark.parametrize(
    ("plan", "rows"), [(plans.pipeline, PIPELINE_ROWS), (plans.replicas, 2 * PIPELINE_ROWS)]
)
def test_training_equals_plain_pytorch(plan, rows, optimizer):
    with started(plan(), rows, optimizer=optimizer) as backend:
        result = backend.run("train", [plans.batch(s, rows) for s in range(4)], first_step=0)
        state = backend.snapshot()
    expected, weights = plans.eager(4, rows, optimizer)
    assert losses(result) == pytest.approx(expected, rel=1e-12)
    assert [step.step for step in result.steps] == [0, 1, 2, 3]
    assert all(step.seconds > 0 for step in result.steps)
    for name, weight in weights.items():
        torch.testing.assert_close(state.parameters[name], weight, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("plan", "rows"), [(plans.pipeline, PIPELINE_ROWS), (plans.replicas, 2 * PIPELINE_ROWS)]
)
def test_random_delays_change_nothing(plan, rows, seed):
    batches = [plans.batch(s, rows) for s in range(3)]
    with started(plan(), rows) as backend:
        backend.run("train", batches, first_step=0)
        expected = backend.snapshot().parameters
    with started(plan(), rows, delay=0.02, delay_seed=seed, poison=True) as backend:
        backend.run("train", batches, first_step=0)
        found = backend.snapshot().parameters
    for name, weight in expected.items():
        assert torch.equal(found[name], weight)


def test_data_as_a_function_is_called_by_those_who_load_inputs():
    callers: set[str] = set()

    def data(step):
        callers.add(threading.current_thread().name)
        return plans.batch(step, PIPELINE_ROWS)

    with started(plans.pipeline(), PIPELINE_ROWS) as backend:
        result = backend.run("train", data, first_step=0, num_steps=3)
        found = backend.snapshot().parameters
    expected, weights = plans.eager(3, PIPELINE_ROWS, momentum)
    assert losses(result) == pytest.approx(expected, rel=1e-12)
    assert callers == {"piper device 0", "piper device 1"}
    assert result.stopped_at is None
    torch.testing.assert_close(found["w1"], weights["w1"], rtol=1e-12, atol=1e-14)


def changing(step):
    return plans.batch(step, PIPELINE_ROWS if step != 2 else 2)


@pytest.mark.parametrize("data", [changing, [changing(s) for s in range(4)]])
def test_a_batch_of_another_shape_stops_the_run_before_its_step(data):
    with started(plans.pipeline(), PIPELINE_ROWS) as backend:
        result = backend.run("train", data, first_step=0, num_steps=4)
        found = backend.snapshot().parameters
        assert [step.step for step in result.steps] == [0, 1]
        assert result.stopped_at == 2
        assert result.signature == signature(changing(2))
        again = backend.run("train", changing, first_step=3, num_steps=1)
        assert [step.step for step in again.steps] == [3]
    _, weights = plans.eager(2, PIPELINE_ROWS, momentum)
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-12, atol=1e-14)


def test_a_constant_that_changes_stops_the_run_too():
    def data(step):
        x, t = plans.batch(step, PIPELINE_ROWS)
        return x, {"t": t, "mode": "b" if step == 1 else "a"}

    plan = plans.pipeline()
    backend = InProcessBackend(timeout=20.0)
    backend.start(2)
    found = signature(data(0))
    # the hand-made plan has no leaf named targets.t: only the signature matters here
    backend.load("train", plan, found)
    backend.initialise("train", plans.weights(), OptimizerSpec(momentum))
    result = backend.run("train", [data(1)], first_step=1)
    assert result.stopped_at == 1
    assert "expected targets.mode = 'a', found targets.mode = 'b'" in found.difference(
        result.signature
    )
    backend.close()


def test_an_exception_on_one_device_is_the_drivers_and_ends_the_others():
    bad = plans.with_body(plans.pipeline(), 1, 7, plans.BAD_BODY)
    backend = started(bad, PIPELINE_ROWS, timeout=300.0)
    began = time.monotonic()
    with pytest.raises(RunError) as caught:
        backend.run("train", [plans.batch(0, PIPELINE_ROWS)], first_step=0)
    assert time.monotonic() - began < 10
    text = str(caught.value)
    assert not isinstance(caught.value, CommunicationError)
    assert "device 1, node B PP=1 MB=1, microbatch 1, instruction `compute" in text
    assert "is invalid for input of size 12" in text
    assert "Traceback" in text
    assert isinstance(caught.value.__cause__, RunError)
    assert "invalid for input" in str(caught.value.__cause__.__cause__)
    with pytest.raises(RunError, match="cannot be used: it was closed after RunError: device 1"):
        backend.run("train", [plans.batch(0, PIPELINE_ROWS)], first_step=0)
    backend.close()


def test_data_that_raises_is_named():
    def data(step):
        raise LookupError("no more rows")

    with (
        started(plans.pipeline(), PIPELINE_ROWS) as backend,
        pytest.raises(
            RunError, match="the batch of step 5 could not be loaded: LookupError: no more"
        ),
    ):
        backend.run("train", data, first_step=5, num_steps=1)


def test_devices_that_wait_for_each_other_time_out():
    plan = plans.pipeline()
    first, second = plan.devices
    without = type(first)(first.device, first.slots, ())
    plan = plans.replace(plan, devices=(without, second))
    backend = started(plan, PIPELINE_ROWS, timeout=0.5)
    with pytest.raises(CommunicationError, match="receive from member 0 of 'p2p:0>1'"):
        backend.run("train", [plans.batch(0, PIPELINE_ROWS)], first_step=0)
    backend.close()


def test_state_moves_between_layouts():
    steps = [plans.batch(s, 2 * PIPELINE_ROWS) for s in range(4)]
    with started(plans.replicas(), 2 * PIPELINE_ROWS, optimizer=adam) as backend:
        backend.run("train", steps[:2], first_step=0)
        middle = backend.snapshot()
        backend.run("train", steps[2:], first_step=2)
        expected = backend.snapshot()
    assert set(middle.optimizer.state) == {"w0", "w1"}
    assert set(middle.optimizer.state["w0"]) == {"step", "exp_avg", "exp_avg_sq"}
    with started(plans.replicas(), 2 * PIPELINE_ROWS, optimizer=adam) as backend:
        backend.restore(middle)
        backend.run("train", steps[2:], first_step=2)
        found = backend.snapshot()
    assert torch.equal(found.parameters["w0"], expected.parameters["w0"])
    # the same into a pipeline: half the rows there, so compare the state that arrived
    with started(plans.pipeline(), PIPELINE_ROWS, optimizer=adam) as backend:
        backend.restore(middle)
        arrived = backend.snapshot()
    for name in ("w0", "w1"):
        assert torch.equal(arrived.parameters[name], middle.parameters[name])
        for key, value in middle.optimizer.state[name].items():
            assert torch.equal(arrived.optimizer.state[name][key], value)


def test_a_snapshot_is_a_copy():
    with started(plans.pipeline(), PIPELINE_ROWS) as backend:
        before = backend.snapshot().parameters["w0"]
        kept = before.clone()
        backend.run("train", [plans.batch(0, PIPELINE_ROWS)], first_step=0)
        assert torch.equal(before, kept)
        before.zero_()
        assert backend.snapshot().parameters["w0"].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("w0"), "missing parameter 'w0'"),
        (lambda p: p.update(w2=p["w1"]), r"unexpected parameter 'w2' \(did you mean 'w"),
        (
            lambda p: p.update(w0=torch.zeros(2)),
            r"'w0': expected float64\[4, 4\], found float32\[2\]",
        ),
    ],
)
def test_a_snapshot_that_does_not_fit_changes_nothing(change, message):
    with started(plans.pipeline(), PIPELINE_ROWS) as backend:
        before = backend.snapshot()
        parameters = {n: t + 1 for n, t in before.parameters.items()}
        change(parameters)
        with pytest.raises(StateError, match=message):
            backend.restore(StateSnapshot(parameters, {}, None))
        after = backend.snapshot()
        assert all(torch.equal(after.parameters[n], t) for n, t in before.parameters.items())


def test_an_optimizer_with_other_groups_is_refused():
    with started(plans.pipeline(), PIPELINE_ROWS) as backend:
        before = backend.snapshot()
        wrong = OptimizerSnapshot({}, (*before.optimizer.groups, {}))
        with pytest.raises(StateError, match="2 parameter groups, this one has 1"):
            backend.restore(StateSnapshot(before.parameters, {}, wrong))


def test_weights_may_be_made_on_the_workers():
    asked: list[tuple[str, ...]] = []

    def make(names):
        asked.append(tuple(names))
        return {name: plans.weights()[name] for name in names}

    backend = InProcessBackend(timeout=20.0)
    backend.start(2)
    backend.load("train", plans.pipeline(), signature(plans.batch(0, PIPELINE_ROWS)))
    backend.initialise("train", make, OptimizerSpec(momentum))
    assert sorted(asked) == [("w0",), ("w1",)]
    assert torch.equal(backend.snapshot().parameters["w1"], plans.weights()["w1"])
    backend.close()


def test_mistakes_of_the_driver_are_named():
    backend = InProcessBackend()
    with pytest.raises(ConfigError, match="at least 1 device, found 0"):
        backend.start(0)
    backend.start(3)
    with pytest.raises(ConfigError, match="plan is for 2 devices, the backend has 3"):
        backend.load("train", plans.pipeline(), Signature(()))
    with pytest.raises(StateError, match="initialise first"):
        backend.snapshot()
    backend.close()
    with pytest.raises(RunError, match="it was closed"):
        backend._call_all("load", [])
    backend.close()

    with started(plans.pipeline(), PIPELINE_ROWS) as backend:
        with pytest.raises(BatchError, match="num_steps is 2, but there are 1 batches"):
            backend.run("train", [plans.batch(0, PIPELINE_ROWS)], first_step=0, num_steps=2)
        with pytest.raises(ConfigError, match="num_steps is needed"):
            backend.run("train", changing, first_step=0)
        with pytest.raises(StateError, match="no initial value for 'w0'"):
            backend.initialise("train", {}, None)


def test_the_drivers_number_of_threads_is_left_alone():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with started(plans.pipeline(), PIPELINE_ROWS, threads=1) as backend:
            backend.run("train", [plans.batch(0, PIPELINE_ROWS)], first_step=0)
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


INTERRUPTED = """
import sys, threading, time
from tests.backends import plans
from tests.backends.test_inprocess import PIPELINE_ROWS, started

def data(step):
    if step == 1 and threading.current_thread().name.endswith("0"):
        sys.stdout.write("waiting\\n")
        sys.stdout.flush()
        while not hub._aborted:
            time.sleep(0.01)
    return plans.batch(step, PIPELINE_ROWS)

backend = started(plans.pipeline(), PIPELINE_ROWS, timeout=300.0)
hub = backend._hub
backend.run("train", data, first_step=0, num_steps=3)
"""


def test_ctrl_c_wakes_devices_that_wait_and_ends_the_program():
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, err = process.communicate(timeout=30)
        assert time.monotonic() - began < 10
    finally:
        process.kill()
    assert err.rstrip().endswith("KeyboardInterrupt"), err
    assert process.returncode != 0


def test_neither_the_package_nor_the_backend_loads_ray():
    program = (
        "import sys, tests.backends.test_inprocess as t; "
        "b = t.started(t.plans.pipeline(), t.PIPELINE_ROWS); b.close(); assert 'ray' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

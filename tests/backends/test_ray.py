"""Hand-made plans on Ray actors. Nothing may be left behind, whatever happens."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.backends import plans
from tests.backends.test_inprocess import PIPELINE_ROWS, adam, changing, losses, momentum
from tests.backends.test_inprocess import started as started_inprocess

from piper.backends import make_backend
from piper.errors import CommunicationError, ConfigError, RunError
from piper.runtime.batch import signature
from piper.runtime.optimizer import OptimizerSpec

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def cluster():
    """A Ray that the program itself initialised."""
    import ray

    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


def started(plan, rows, optimizer=momentum):
    backend = make_backend("ray", threads=1)
    backend.start(2)
    try:
        backend.load("train", plan, signature(plans.batch(0, rows)))
        backend.initialise("train", plans.weights(), OptimizerSpec(optimizer))
    except BaseException:
        backend.close()
        raise
    return backend


def test_training_equals_plain_pytorch(cluster):
    rows = PIPELINE_ROWS
    with started(plans.pipeline(), rows, adam) as backend:
        first = backend.run("train", [plans.batch(s, rows) for s in range(2)], first_step=0)
        middle = backend.snapshot()
        second = backend.run("train", lambda s: plans.batch(s, rows), first_step=2, num_steps=2)
        last = backend.snapshot()
        backend.restore(middle)
        again = backend.run("train", lambda s: plans.batch(s, rows), first_step=2, num_steps=2)
        stopped = backend.run("train", changing, first_step=2, num_steps=5)
        assert not stopped.steps
        assert (stopped.stopped_at, stopped.signature) == (2, signature(changing(2)))
        after = backend.snapshot()
    expected, weights = plans.eager(4, rows, adam)
    assert losses(first) + losses(second) == pytest.approx(expected, rel=1e-12)
    assert losses(again) == losses(second)
    for name, weight in weights.items():
        torch.testing.assert_close(last.parameters[name], weight, rtol=1e-12, atol=1e-14)
        assert torch.equal(after.parameters[name], last.parameters[name])
    assert cluster.is_initialized(), "the program's own Ray is left running"


def test_replicas_give_the_same_bits_as_threads(cluster):
    rows = 2 * PIPELINE_ROWS
    batches = [plans.batch(s, rows) for s in range(3)]
    with started_inprocess(plans.replicas(), rows) as backend:
        expected = losses(backend.run("train", batches, first_step=0))
        weights = backend.snapshot().parameters
    with started(plans.replicas(), rows) as backend:
        found = losses(backend.run("train", batches, first_step=0))
        state = backend.snapshot().parameters
    assert found == expected
    assert all(torch.equal(state[name], weight) for name, weight in weights.items())


def test_an_exception_on_a_worker_is_the_drivers(cluster):
    backend = started(plans.with_body(plans.pipeline(), 1, 7, plans.BAD_BODY), PIPELINE_ROWS)
    began = time.monotonic()
    with pytest.raises(RunError) as caught:
        backend.run("train", [plans.batch(0, PIPELINE_ROWS)], first_step=0)
    assert time.monotonic() - began < 15
    assert not isinstance(caught.value, CommunicationError)
    text = str(caught.value)
    assert "device 1, node B PP=1 MB=1, microbatch 1, instruction `compute" in text
    assert "shape '[4000]' is invalid for input of size 12" in text
    assert "Traceback" in text
    assert "v4 = f_aten_view_default" in text, "the failing line of the chunk's code"
    with pytest.raises(RunError, match="cannot be used"):
        backend.snapshot()


def dies_once(folder: Path):
    """Data that writes each worker's process id to *folder*; whoever gets to step 2 first kills
    itself.
    """

    def data(step):
        (folder / str(os.getpid())).touch()
        if step == 2:
            try:
                os.close(os.open(folder / "victim", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return plans.batch(step, PIPELINE_ROWS)

    return data


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_worker_is_named_and_the_others_stop(cluster, tmp_path):
    backend = started(plans.pipeline(), PIPELINE_ROWS)
    began = time.monotonic()
    with pytest.raises(RunError, match=r"device [01]: its worker process died") as caught:
        backend.run("train", dies_once(tmp_path), first_step=0, num_steps=5)
    assert time.monotonic() - began < 15
    assert not isinstance(caught.value, CommunicationError)
    pids = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a worker is left behind"
        time.sleep(0.1)


def test_more_devices_than_the_cluster_has(cluster):
    backend = make_backend("ray")
    with pytest.raises(ConfigError, match=r"needs 4 devices of 1 CPUs each, .* has 3 CPUs"):
        backend.start(4)
    backend.close()


SCRIPT = """
import os, sys, time
from pathlib import Path
from piper.backends import make_backend
from piper.runtime.batch import signature
from piper.runtime.optimizer import OptimizerSpec
from tests.backends import plans
from tests.backends.test_inprocess import PIPELINE_ROWS, momentum

folder, ending = Path(sys.argv[1]), sys.argv[2]

def data(step):
    (folder / str(os.getpid())).touch()
    if step == 1 and ending == "interrupt":
        time.sleep(100)
    if step == 1 and ending == "raise":
        raise LookupError("no rows")
    return plans.batch(step, PIPELINE_ROWS)

backend = make_backend("ray", threads=1)
backend.start(2)
backend.load("train", plans.pipeline(), signature(plans.batch(0, PIPELINE_ROWS)))
backend.initialise("train", plans.weights(), OptimizerSpec(momentum))
backend.run("train", data, first_step=0, num_steps=3)
print("ran")
"""


def marked(mark: str) -> list[int]:
    """Living processes that inherited *mark* in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environ = (path / "environ").read_bytes()
        except OSError:
            continue
        if mark.encode() in environ and alive(int(path.name)):
            found.append(int(path.name))
    return found


@pytest.mark.parametrize("ending", ["exit", "raise", "interrupt"])
def test_no_process_survives_the_driver(tmp_path, ending):
    mark = f"PIPER_TEST_MARK={tmp_path}"
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path), ending],
        env={**os.environ, "PIPER_TEST_MARK": str(tmp_path)},
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if ending == "interrupt":
            deadline = time.monotonic() + 90
            while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
                time.sleep(0.1)
            time.sleep(1.0)  # into the second step
            process.send_signal(signal.SIGINT)
            deadline = time.monotonic() + 15
        out, err = process.communicate(timeout=90)
        if ending == "interrupt":
            assert time.monotonic() < deadline
    finally:
        process.kill()
    expected = {"exit": "", "raise": "LookupError: no rows", "interrupt": "KeyboardInterrupt"}
    assert expected[ending] in err
    assert ("ran" in out) == (ending == "exit")
    assert (process.returncode == 0) == (ending == "exit"), err
    assert len(list(tmp_path.iterdir())) == 2, err
    deadline = time.monotonic() + 10
    while left := marked(mark):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.2)

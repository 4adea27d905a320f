import io
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file
from tests.cli.conftest import SECTIONS

from piper.cli.train import report
from piper.training.config import load_config
from piper.training.loop import Ending, Outcome
from piper.training.metrics import HeldOutRecord, TrainRecord, read_metrics

RAY = SECTIONS["train"].replace("inprocess", "ray")


def trained(folder):
    return [r for r in read_metrics(folder / "metrics.jsonl") if isinstance(r, TrainRecord)]


def test_the_result_is_shown_and_written(piper, write, tmp_path):
    train = SECTIONS["train"] + '\nout_dir = "out"\nreference_steps = 3'
    result = piper("train", write(train=train))
    assert result.exit_code == 0, result.output
    out = result.stdout
    assert out.index("step 2: held-out loss") < out.index("step 4:") < out.index("step 5:")
    assert "finished after 5 steps" in out
    assert "train loss" in out
    assert "held-out loss" in out
    assert "one process on the same batches, the first 3 of 5 steps: max |difference|" in out
    assert "2 devices" in out
    assert "held-out text, continued by the model" in out
    assert len(trained(tmp_path / "out")) == 5
    assert load_file(tmp_path / "out" / "model.safetensors")


def test_a_run_is_resumed(piper, write, tmp_path):
    train = SECTIONS["train"] + '\nout_dir = "out"\nreference_steps = 0\ncheckpoint_every = 2'
    result = piper("train", write(train=train.replace("steps = 5", "steps = 2")))
    assert result.exit_code == 0, result.output
    assert "checkpoint written to" in result.stdout
    again = piper("train", write(train=train))
    assert again.exit_code == 1
    assert "checkpoints of an earlier run" in again.stderr
    resumed = piper("train", write(train=train), "--resume", "out")
    assert resumed.exit_code == 0, resumed.output
    assert "finished after 5 steps" in resumed.stdout
    assert [record.step for record in trained(tmp_path / "out")] == [1, 2, 3, 4, 5]


def test_there_is_nothing_to_resume(piper, write, tmp_path):
    result = piper("train", write(), "--resume", "nowhere")
    assert result.exit_code == 1
    assert "nowhere: expected a checkpoint, or the folder of a run" in result.stderr


@pytest.fixture
def reported(write):
    """What is printed about an outcome."""

    def reported(outcome):
        console = Console(width=100, record=True, file=io.StringIO())
        report(load_config(write()), outcome, console)
        return console.export_text()

    return reported


def outcome(**fields):
    records = [
        TrainRecord(step=step, loss=4.0 - step, seconds=0.5, tokens_per_second=64.0)
        for step in (1, 2)
    ]
    given = {
        "ending": Ending.FINISHED,
        "out_dir": Path("runs/latest"),
        "trained": tuple(records),
        "held_out": (HeldOutRecord(step=2, loss=2.5),),
        **fields,
    }
    return Outcome(**given)


def test_losses_and_the_end_are_reported(reported):
    text = reported(outcome(ending=Ending.TIME))
    assert "out of time after 2 steps" in text
    assert "train loss 2.500 nats per byte (mean of the last 2 steps)" in text
    assert "held-out loss 2.500 nats per byte" in text
    assert "max |difference|" not in text


def test_the_comparison_says_how_long_it_is(reported):
    whole = reported(outcome(reference=(3.0, 2.25)))
    assert "one process on the same batches, all steps: max |difference| 2.5e-01" in whole
    part = reported(outcome(reference=(3.0,)))
    assert "the first 1 of 2 steps: max |difference| 0.0e+00" in part


def test_a_run_without_a_step_has_a_report(reported):
    text = reported(outcome(ending=Ending.INTERRUPTED, trained=(), held_out=()))
    assert "interrupted after 0 steps" in text


def test_bytes_that_are_no_text_do_not_reach_the_terminal(reported):
    text = reported(outcome(prompt=bytes(range(128)), sample=bytes(range(128, 256))))
    assert all(c.isprintable() or c == "\n" for c in text)


def interrupted(path, folder, presses=1):
    """Starts ``piper train`` in a session of its own, presses Ctrl-C once it trains; exit status,
    output, survivors.
    """
    command = [sys.executable, "-c", "from piper.cli.main import app; app()", "train", str(path)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        start_new_session=True,
    )
    metrics = folder / "out" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for _ in range(presses):
        os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output, survivors(process.pid)


def survivors(session, patience=10.0):
    """Processes of a session that are still there after a while: Ray's helpers take a moment to
    go.
    """
    deadline = time.monotonic() + patience
    while True:
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                state = (path / "stat").read_text().rpartition(")")[2].split()
                name = (path / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            if int(state[3]) == session and state[0] != "Z":
                found.append(name)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "backend", ["inprocess", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.full])]
)
def test_ctrl_c_writes_what_there_is_and_leaves_no_process(write, tmp_path, backend):
    train = f"""
steps = 1000000
batch_size = 4
seq_len = 8
backend = "{backend}"
out_dir = "out"
"""
    status, output, left = interrupted(write(train=train), tmp_path)
    assert status == 130, output
    assert "interrupted after" in output
    assert "Traceback" not in output
    assert load_file(tmp_path / "out" / "model.safetensors")
    assert left == []


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_two_workers_of_a_local_ray(write, tmp_path):
    path = write(train=RAY + '\nout_dir = "out"')
    command = [sys.executable, "-c", "from piper.cli.main import app; app()", "train", str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished after 5 steps" in done.stdout
    difference = float(done.stdout.rpartition("max |difference| ")[2].split()[0])
    assert difference < 1e-5
    assert len(trained(tmp_path / "out")) == 5


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_more_devices_than_the_cluster_has(piper, write):
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        result = piper("train", write(train=RAY))
    finally:
        ray.shutdown()
    assert result.exit_code == 1
    assert "needs 2 devices" in result.stderr
    assert "has 1 CPUs in all" in result.stderr


def test_a_loss_that_is_no_number_ends_the_run(piper, write, tmp_path):
    """With one clear message; neither the model nor a checkpoint is written, and earlier
    checkpoints can be resumed.
    """
    train = SECTIONS["train"].replace("steps = 5", "steps = 50") + '\nout_dir = "out"'
    checkpoints = "\ncheckpoint_every = 1\nkeep_checkpoints = 100"
    path = write(optimizer='name = "sgd"\nlr = 1e30', train=train + checkpoints)
    result = piper("train", path)
    assert result.exit_code == 1
    assert "diverged after" in result.output
    assert "the loss is no finite number any more" in result.output
    assert not (tmp_path / "out" / "model.safetensors").exists()
    records = read_metrics(tmp_path / "out" / "metrics.jsonl")
    losses = [r.loss for r in records]
    assert [math.isfinite(loss) for loss in losses] == [True] * (len(losses) - 1) + [False]
    saved = [int(p.name[-8:]) for p in (tmp_path / "out" / "checkpoints").glob("step-*")]
    assert max(saved) <= records[-1].step - 1
    again = piper("train", path, "--resume", "out")
    assert "diverged after" in again.output

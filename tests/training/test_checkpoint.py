"""Runs that stop and go on."""

import json
import shutil
import signal

import msgspec
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from tests.cli.conftest import started
from tests.training.test_loop import TEXT, TOLERANCE, Interrupting, workers

import piper
from piper.api import checkpoint as api
from piper.errors import CheckpointError, ConfigError
from piper.runtime.checkpoint.index import Index, seal
from piper.training import loop
from piper.training.checkpoint import find_checkpoint, saved_steps
from piper.training.config import RunConfig
from piper.training.loop import Ending, Outcome, train
from piper.training.metrics import HeldOutRecord, TrainRecord, read_metrics
from piper.training.sections import (
    DataSection,
    SGDSection,
    StrategySection,
    TrainSection,
    TransformerSection,
)
from piper.training.watcher import Silent

__all__ = ["started"]  # a fixture

ONE = StrategySection(schedule="gpipe", groups=((0,),), num_microbatches=1)
SHARDED = StrategySection(schedule="1f1b", groups=((0, 1), (2, 3)), num_microbatches=2, zero=3)


@pytest.fixture(autouse=True)
def short_samples(monkeypatch):
    monkeypatch.setattr(loop, "SAMPLE_BYTES", 1)


def configured(folder, strategy=ONE, model=None, **options):
    """A run of five steps in ``folder / "out"``."""
    (folder / "text.txt").write_text(TEXT)
    settings = {
        "steps": 5,
        "batch_size": 4,
        "seq_len": 8,
        "warmup_steps": 3,
        "eval_every": 2,
        "eval_batches": 2,
        "reference_steps": 0,
        "backend": "inprocess",
        "out_dir": str(folder / "out"),
        **{name: str(v) if name == "resume" else v for name, v in options.items()},
    }
    sizes = {"num_layers": 2, "width": 16, "num_heads": 2, "mlp_ratio": 2, **(model or {})}
    return RunConfig(
        model=TransformerSection(**sizes),
        data=DataSection(files=(str(folder / "text.txt"),), held_out=0.25),
        strategy=strategy,
        optimizer=SGDSection(lr=0.5, momentum=0.9),
        train=TrainSection(**settings),
    )


@pytest.fixture
def configure(tmp_path):
    return lambda *args, **options: configured(tmp_path, *args, **options)


class StopsAt(Silent):
    """Presses Ctrl-C when a checkpoint of this step was written."""

    def __init__(self, step=None):
        self.step, self.paths = step, []

    def saved(self, path):
        self.paths.append(path.name)
        if path.name == f"step-{self.step:08d}":
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out"


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.fixture(scope="module", autouse=True)
def float64():
    """Also for the runs that several tests look at."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of five steps without checkpoints: what came of it, and its weights."""
    folder = tmp_path_factory.mktemp("whole")
    outcome = train(configured(folder))
    assert not (folder / "out" / "checkpoints").exists()
    return outcome, load_file(folder / "out" / "model.safetensors")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The same run, with a checkpoint after each step, stopped by Ctrl-C after the fourth; its
    folder.
    """
    folder, watcher = tmp_path_factory.mktemp("stopped"), StopsAt(4)
    outcome = train(configured(folder, checkpoint_every=1), watcher)
    assert outcome.ending is Ending.INTERRUPTED
    assert [record.step for record in outcome.trained] == [1, 2, 3, 4]
    assert watcher.paths == [f"step-{step:08d}" for step in (1, 2, 3, 4)]
    return folder / "out"


def test_the_last_checkpoints_are_kept(stopped):
    assert names(stopped) == ["step-00000003", "step-00000004"]
    for step, path in saved_steps(stopped / "checkpoints").items():
        assert piper.Checkpoint.open(path).step == step
    assert find_checkpoint(stopped).name == "step-00000004"
    assert find_checkpoint(stopped / "checkpoints").name == "step-00000004"


@pytest.mark.parametrize("then", [SHARDED, pytest.param(ONE, marks=pytest.mark.full)])
def test_a_run_that_goes_on_is_the_run_without_interruption(
    configure, folder, whole, stopped, then
):
    """Under another strategy and in another folder; the metrics are those of one run, whose steps
    behind the checkpoint are done again.
    """
    without, expected = whole
    checkpoint = stopped / "checkpoints" / "step-00000003"
    options = {"checkpoint_every": 4, "reference_steps": 4, "model": {"num_stages": 2}}
    before = (stopped / "metrics.jsonl").read_bytes()
    outcome = train(configure(then, **options, resume=checkpoint))
    assert outcome.ending is Ending.FINISHED
    assert [r.step for r in outcome.trained] == [1, 2, 3, 4, 5]
    losses = [r.loss for r in outcome.trained]
    assert losses == pytest.approx([r.loss for r in without.trained], rel=TOLERANCE)
    assert [r.step for r in outcome.held_out] == [2, 4, 5]
    losses = [r.loss for r in outcome.held_out]
    assert losses == pytest.approx([r.loss for r in without.held_out], rel=TOLERANCE)
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert (tensor - expected[name]).norm() <= TOLERANCE * expected[name].norm()
    records = read_metrics(folder / "metrics.jsonl")
    assert [r for r in records if isinstance(r, TrainRecord)] == list(outcome.trained)
    assert [r for r in records if isinstance(r, HeldOutRecord)] == list(outcome.held_out)
    assert names(folder) == ["step-00000004", "step-00000005"]
    assert len(outcome.reference) == 4
    assert outcome.max_difference <= TOLERANCE
    assert names(stopped) == ["step-00000003", "step-00000004"]
    assert (stopped / "metrics.jsonl").read_bytes() == before


@pytest.mark.full
@pytest.mark.parametrize(("reference_steps", "found"), [(4, 0), (9, 5)])
def test_the_reference_where_earlier_metrics_are_lost(
    configure, folder, stopped, reference_steps, found
):
    shutil.copytree(stopped, folder)
    (folder / "metrics.jsonl").unlink()
    outcome = train(configure(reference_steps=reference_steps, resume=folder))
    assert [record.step for record in outcome.trained] == [5]
    assert len(outcome.reference) == found
    assert outcome.max_difference is None if not found else outcome.max_difference <= TOLERANCE


def test_a_difference_is_that_of_the_same_steps():
    record = TrainRecord(step=3, loss=2.0, seconds=1.0, tokens_per_second=1.0)
    outcome = Outcome(
        ending=Ending.FINISHED,
        out_dir=None,
        trained=(record,),
        held_out=(),
        reference=(9.0, 9.0, 2.5),
    )
    assert outcome.max_difference == 0.5


def test_a_second_ctrl_c_leaves_the_last_checkpoint(configure, folder, stopped, monkeypatch):
    """Even while the next one is being written. What a killed run left half written is removed
    before.
    """
    shutil.copytree(stopped, folder)
    partial = folder / "checkpoints" / ".partial-step-00000005-0a1b2c3d"
    partial.mkdir()
    (partial / "device-0000.safetensors").write_bytes(b"half")
    content = {p.name: p.read_bytes() for p in find_checkpoint(folder).iterdir()}

    def interrupted(*arguments, **keywords):
        assert not partial.exists()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(api, "merge_files", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(configure(checkpoint_every=1, steps=9, resume=folder), Interrupting(1))
    assert names(folder) == ["step-00000003", "step-00000004"]
    assert {p.name: p.read_bytes() for p in find_checkpoint(folder).iterdir()} == content
    assert workers() == []


# --- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, r"train.seed: expected 0, as in the run of .*, found 1"),
        ({"max_grad_norm": 2.0}, r"train.max_grad_norm: expected None.*found 2.0"),
        ({"precision": "bf16"}, r"train.precision: expected None.*found 'bf16'"),
        ({"model": {"tied_embedding": True}}, r"model.tied_embedding: expected False.*found True"),
        ({"steps": 4}, r"expected more than the 4 steps .* found 4: nothing is left"),
    ],
)
def test_another_run_is_not_continued(configure, stopped, folder, options, message, started):
    with pytest.raises(ConfigError, match=message):
        train(configure(**options, resume=stopped))
    assert started == []
    assert not folder.exists()


def test_another_optimizer_is_another_run(configure, stopped):
    config = replace(configure(resume=stopped), optimizer=SGDSection(lr=0.25, momentum=0.9))
    with pytest.raises(ConfigError, match=r"optimizer.lr: expected 0.5.*found 0.25"):
        train(config)


def test_another_text_is_another_run(configure, stopped, tmp_path):
    config = configure(resume=stopped)
    (tmp_path / "text.txt").write_text("another text\n" * 500)
    with pytest.raises(ConfigError, match=r"data.text: expected 'crc32 .*found 'crc32"):
        train(config)


def test_a_run_does_not_mix_with_another_in_its_folder(configure, stopped, folder, started):
    shutil.copytree(stopped, folder)
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"checkpoints of an earlier run.*piper train --resume"):
        train(configure())
    with pytest.raises(ConfigError, match="checkpoints of an earlier run"):
        train(configure(resume=stopped))
    path = folder / "checkpoints" / "step-00000003"
    with pytest.raises(ConfigError, match="later checkpoints than step-00000003"):
        train(configure(resume=path))
    assert started == []
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert names(folder) == ["step-00000003", "step-00000004"]


def test_nothing_to_resume_from(configure, tmp_path):
    with pytest.raises(ConfigError, match="expected a checkpoint, or the folder of a run"):
        train(configure(resume=tmp_path))


def test_a_checkpoint_of_another_program(configure, stopped, tmp_path):
    path = shutil.copytree(find_checkpoint(stopped), tmp_path / "mine")
    index = json.loads((path / "index.json").read_text())
    index["metadata"] = {}
    (path / "index.json").write_bytes(seal(msgspec.convert(index, Index)))
    with pytest.raises(ConfigError, match=r"one that Trainer\.save wrote"):
        train(configure(resume=path))


def test_a_damaged_checkpoint_leaves_no_worker(configure, stopped, tmp_path):
    path = shutil.copytree(find_checkpoint(stopped), tmp_path / "damaged")
    (path / "device-0000.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="truncated"):
        train(configure(resume=path))
    assert workers() == []

import signal
import threading

import pytest
import torch
from safetensors.torch import load_file

from piper.directives.strategy import load_strategy
from piper.errors import ConfigError, SplitError
from piper.models.transformer import Transformer, transformer_loss
from piper.plan.codec import load_plan
from piper.training.config import load_config
from piper.training.loop import Ending, Outcome, train
from piper.training.metrics import HeldOutRecord, TrainRecord, read_metrics
from piper.training.model import make_model
from piper.training.watcher import Silent
from piper.verify import verify

TEXT = "".join(f"the {i}th line counts {i * i}\n" for i in range(200))
TOLERANCE = 1e-11


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def configure(tmp_path):
    """A run of 5 steps on 4 devices, with lines of its own in some sections."""

    def configure(*, model="", strategy=None, train=""):
        (tmp_path / "text.txt").write_text(TEXT)
        chosen = strategy or 'schedule = "1f1b"\ngroups = [[0, 1], [2, 3]]\nnum_microbatches = 2'
        path = tmp_path / "run.toml"
        path.write_text(f"""
[model]
num_layers = 2
width = 16
num_heads = 2
mlp_ratio = 2
{model}
[data]
files = ["text.txt"]
held_out = 0.25
[strategy]
{chosen}
[optimizer]
name = "sgd"
lr = 0.5
momentum = 0.9
[train]
steps = 5
batch_size = 4
seq_len = 8
warmup_steps = 3
eval_every = 2
eval_batches = 2
backend = "inprocess"
out_dir = "{tmp_path / "out"}"
{train}
""")
        return load_config(path)

    return configure


def eager(config):
    """Losses, weights and held-out loss of the run's training, in plain PyTorch."""
    data, model = config.batches(), make_model(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(config.train.steps):
        optimizer.param_groups[0]["lr"] = 0.5 * min(1.0, (step + 1) / 3)
        inputs, targets = data(step)
        loss = transformer_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        held_out = [transformer_loss(model(x), y).item() for x, y in data.held_out_batches(2)]
    return losses, model.state_dict(), sum(held_out) / len(held_out)


@pytest.mark.parametrize("tied", ["false", "true"])
def test_a_run_is_training_in_one_process(configure, tmp_path, tied):
    config = configure(model=f"tied_embedding = {tied}")
    outcome = train(config)
    losses, weights, held_out = eager(config)
    assert outcome.ending is Ending.FINISHED
    assert [record.loss for record in outcome.trained] == pytest.approx(losses, rel=TOLERANCE)
    assert outcome.held_out[-1].loss == pytest.approx(held_out, rel=TOLERANCE)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert set(saved) == set(weights)
    for name, expected in weights.items():
        assert (saved[name] - expected).norm() <= TOLERANCE * expected.norm()
    Transformer(config.transformer()).load_state_dict(saved)


def test_the_reference_repeats_the_run(configure):
    config = configure(train="reference_steps = 3")
    outcome = train(config)
    assert list(outcome.reference) == pytest.approx(eager(config)[0][:3], rel=TOLERANCE)
    assert outcome.max_difference <= TOLERANCE


def test_clipping_is_that_of_one_process(configure, tmp_path):
    config = configure(train="max_grad_norm = 0.1")
    outcome = train(config)
    assert outcome.max_difference <= TOLERANCE
    assert all(record.grad_norm > 0.1 for record in outcome.trained)
    assert outcome.trained[-1].loss != pytest.approx(eager(config)[0][-1], rel=1e-6)
    records = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [r for r in records if isinstance(r, TrainRecord)] == list(outcome.trained)


def test_the_reference_is_as_long_as_the_run_at_most(configure):
    assert len(train(configure()).reference) == 5
    assert train(configure(train="reference_steps = 0")).max_difference is None


def test_a_difference_is_measured():
    records = [
        TrainRecord(step=i, loss=loss, seconds=1.0, tokens_per_second=1.0)
        for i, loss in [(1, 3.0), (2, 2.0), (3, 9.0)]
    ]

    def difference(*reference):
        return Outcome(
            ending=Ending.FINISHED,
            out_dir=None,
            trained=tuple(records),
            held_out=(),
            reference=reference,
        ).max_difference

    assert difference(3.25, 1.5) == 0.5
    assert difference(3.0, float("nan")) == float("inf")


def test_the_held_out_loss_is_taken_at_intervals_and_at_the_end(configure, tmp_path):
    outcome = train(configure())
    assert [record.step for record in outcome.held_out] == [2, 4, 5]
    assert [record.step for record in outcome.trained] == [1, 2, 3, 4, 5]
    records = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [r for r in records if isinstance(r, TrainRecord)] == list(outcome.trained)
    assert [r for r in records if isinstance(r, HeldOutRecord)] == list(outcome.held_out)


def test_strategy_and_plan_are_written(configure, tmp_path):
    config = configure()
    train(config)
    assert load_strategy(tmp_path / "out" / "strategy.json") == config.strategy.directives()
    plan = load_plan(tmp_path / "out" / "plan")
    verify(plan)
    assert (plan.num_devices, plan.num_replicas, plan.num_microbatches) == (4, 2, 2)


def test_a_run_replaces_the_files_of_an_earlier_one(configure, tmp_path):
    train(configure())
    one = 'schedule = "1f1b"\ngroups = [[0]]\nnum_microbatches = 1'
    outcome = train(configure(strategy=one))
    files = sorted(path.name for path in (tmp_path / "out" / "plan").iterdir())
    assert files == ["device-0000.json", "manifest.json"]
    assert len(read_metrics(tmp_path / "out" / "metrics.jsonl")) == 5 + len(outcome.held_out)


def test_the_sample_continues_held_out_text(configure):
    outcome = train(configure())
    assert outcome.prompt
    assert outcome.prompt.decode() in TEXT
    assert len(outcome.sample) == 200


class Interrupting(Silent):
    """Presses Ctrl-C so many times after the first step."""

    def __init__(self, times):
        self.times = times

    def advance(self, steps, loss, tokens_per_second):
        for _ in range(self.times):
            self.times -= 1
            signal.raise_signal(signal.SIGINT)


def workers():
    return [t for t in threading.enumerate() if t.name.startswith("piper device")]


def test_ctrl_c_writes_what_there_is(configure, tmp_path):
    config = configure(train="max_minutes = 10")
    before = signal.getsignal(signal.SIGINT)
    outcome = train(config, Interrupting(1))
    assert outcome.ending is Ending.INTERRUPTED
    assert len(outcome.trained) == 1
    assert outcome.reference == ()
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert any((weights[n] != t).any() for n, t in make_model(config).state_dict().items())
    assert len(read_metrics(tmp_path / "out" / "metrics.jsonl")) == 1
    assert workers() == []
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_ends_at_once(configure, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(configure(), Interrupting(2))
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert workers() == []
    assert signal.getsignal(signal.SIGINT) is before


def test_the_time_limit_ends_a_run(configure):
    outcome = train(configure(train="max_minutes = 1e-9"))
    assert outcome.ending is Ending.TIME
    assert [record.step for record in outcome.held_out] == [1]
    assert len(outcome.reference) == 1


def test_a_batch_that_does_not_divide_leaves_no_model(configure, tmp_path):
    strategy = 'schedule = "1f1b"\ngroups = [[0], [1]]\nnum_microbatches = 3'
    with pytest.raises(SplitError, match="3 microbatches"):
        train(configure(strategy=strategy))
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_an_out_dir_that_is_a_file(configure, tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigError, match="choose another out_dir"):
        train(configure())

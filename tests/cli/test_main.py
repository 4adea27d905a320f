import subprocess
import sys
from importlib.metadata import version

import pytest
from tests.cli.conftest import SECTIONS

from piper.errors import ConfigError


def fails(result):
    """The one message of a command that failed."""
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
    return result.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"]])
def test_help_and_version_load_neither_torch_nor_ray(arguments):
    program = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('loaded', {'torch', 'ray'} & set(sys.modules)))\n"
        "from piper.cli.main import app\n"
        f"app({arguments!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.endswith("loaded set()\n")


def test_version(piper):
    assert piper("--version").stdout == f"piper {version('piper-train')}\n"


def test_every_command_has_a_help(piper):
    commands = (
        "train",
        "plan",
        "simulate",
        "profile",
        "explain",
        "view",
        "check",
        "convert",
        "doctor",
    )
    listed = piper("--help").stdout
    for command in commands:
        assert command in listed
        assert piper(command, "--help").exit_code == 0


@pytest.mark.parametrize("command", ["train", "plan", "check"])
def test_an_unknown_field_is_named_with_the_nearest(piper, write, started, command):
    path = write(train=SECTIONS["train"] + "\nevaluate_every = 3")
    message = fails(piper(command, path))
    assert f"{path}: train.evaluate_every: unknown field (did you mean 'eval_every'?)" in message
    assert started == []


@pytest.mark.parametrize("command", ["train", "plan", "check"])
def test_an_unknown_field_of_a_strategy_file_is_named_with_the_nearest(
    piper, write, started, tmp_path, command
):
    (tmp_path / "strategy.json").write_text(
        '[{"op": "place", "filter": {"PP": 0}, "devices": [0]},\n'
        ' {"op": "split", "filter": {}, "num_microbatch": 2}]'
    )
    message = fails(piper(command, write(strategy='file = "strategy.json"')))
    assert f"{tmp_path / 'strategy.json'}: $[1]" in message
    assert "num_microbatches" in message
    assert started == []


def test_a_missing_data_file_is_named(piper, write, started):
    message = fails(piper("train", write(data='files = ["absent.txt"]')))
    assert "absent.txt: expected a text file" in message
    assert started == []


def test_too_little_text_is_named(piper, write, started, tmp_path):
    (tmp_path / "short.txt").write_text("short")
    message = fails(piper("train", write(data='files = ["short.txt"]')))
    assert "short.txt" in message
    assert "seq_len" in message
    assert started == []


@pytest.mark.parametrize("command", ["train", "plan", "check"])
def test_microbatches_must_divide_the_batch(piper, write, started, command):
    strategy = SECTIONS["strategy"].replace("num_microbatches = 2", "num_microbatches = 3")
    message = fails(piper(command, write(strategy=strategy)))
    assert "batch of 4 rows" in message
    assert "3 microbatches" in message
    assert started == []


@pytest.mark.parametrize("command", ["train", "plan", "check"])
def test_more_stages_than_layers(piper, write, started, command):
    strategy = SECTIONS["strategy"].replace("[[0], [1]]", "[[0], [1], [2]]")
    message = fails(piper(command, write(strategy=strategy)))
    assert "3 stages cannot share 2 layers" in message
    assert started == []


@pytest.mark.parametrize("command", ["train", "plan", "check"])
def test_an_unknown_schedule_is_named_with_the_nearest(piper, write, started, command):
    message = fails(piper(command, write(strategy=SECTIONS["strategy"].replace("1f1b", "1b1f"))))
    assert "unknown schedule '1b1f' (did you mean '1f1b'?)" in message
    assert started == []


def test_a_strategy_that_leaves_a_stage_out(piper, write, started, tmp_path):
    (tmp_path / "strategy.json").write_text(
        '[{"op": "place", "filter": {"PP": 0}, "devices": [0]}]'
    )
    model = SECTIONS["model"] + "\nnum_stages = 2"
    message = fails(piper("plan", write(model=model, strategy='file = "strategy.json"')))
    assert "not placed" in message
    assert started == []


def test_an_out_dir_that_cannot_be_written(piper, write, started, tmp_path):
    (tmp_path / "taken").write_text("a file, not a folder")
    message = fails(piper("train", write(train=SECTIONS["train"] + '\nout_dir = "taken"')))
    assert "choose another out_dir" in message
    assert started == []


def test_a_missing_configuration(piper, tmp_path):
    assert "expected a TOML configuration file" in fails(piper("plan", tmp_path / "absent.toml"))


def test_traceback_shows_where(piper, tmp_path):
    result = piper("plan", "--traceback", tmp_path / "absent.toml")
    assert result.exit_code == 1
    assert isinstance(result.exception, ConfigError)


def test_a_bug_is_not_hidden(piper, write, monkeypatch):
    def broken(path):
        raise ZeroDivisionError

    monkeypatch.setattr("piper.cli.plan.load_config", broken)
    assert isinstance(piper("plan", write()).exception, ZeroDivisionError)


def test_doctor_fails_when_a_check_does(piper, monkeypatch):
    monkeypatch.setattr("piper.cli.doctor.doctor", lambda console: False)
    assert piper("doctor").exit_code == 1
    monkeypatch.setattr("piper.cli.doctor.doctor", lambda console: True)
    assert piper("doctor").exit_code == 0

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import piper as piper_package
from piper.models import MoE, MoEConfig, moe_loss

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def readme():
    return (ROOT / "README.md").read_text()


def blocks(text, language=""):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for its_language, block in found if its_language == language]


@pytest.mark.timeout(240)
def test_the_example_runs_and_learns(readme, tmp_path):
    example, _, _ = blocks(readme, "python")
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=230, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line) for line in done.stdout.split()]
    assert len(losses) == 20
    assert losses[-1] < losses[0]


def test_the_strategy_that_shards_experts_is_accepted(readme):
    _, example, _ = blocks(readme, "python")
    names = {"piper": piper_package}
    exec(example, names)
    model = MoE(MoEConfig(vocab_size=16, width=8, num_layers=2, num_heads=2, expert_width=8))
    tokens = torch.arange(16 * 4).view(16, 4) % 16
    dag = piper_package.capture(model, moe_loss, (tokens, tokens))
    piper_package.verify(piper_package.plan(piper_package.apply(dag, names["strategy"])))


def test_the_training_job_runs_and_learns(readme, tmp_path):
    pytest.importorskip("transformers")
    _, _, example = blocks(readme, "python")
    script = tmp_path / "job.py"
    script.write_text(example)
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (first, _), (second, _), (held_out,) = (
        map(float, line.split()) for line in done.stdout.splitlines()
    )
    assert held_out < second < first
    assert piper_package.Checkpoint.open(tmp_path / "checkpoint").step == 8


def test_the_picture_is_what_the_command_draws(readme, piper):
    (picture,) = [block for block in blocks(readme) if block.startswith("one step")]
    result = piper("plan", ROOT / "examples" / "gpt_stdlib.toml")
    shown = [line.rstrip() for line in result.stdout.splitlines()]
    assert shown[: len(picture.splitlines())] == picture.splitlines()


def test_every_link_leads_somewhere(readme):
    for link in re.findall(r"\]\(([^)]+)\)", readme):
        assert (ROOT / link).exists(), link

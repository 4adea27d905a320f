"""A configured precision, on the command line."""

import json

from safetensors.torch import load_file
from tests.cli.conftest import SECTIONS

SCALED = "\n[train.precision]\ncompute = 'float16'\n[train.precision.loss_scale]\ninit = 256"


def test_the_plan_says_it(piper, write):
    train = SECTIONS["train"] + '\nprecision = "bf16"'
    result = piper("plan", write(train=train))
    assert result.exit_code == 0, result.output
    headline = " ".join(result.stdout.split("\ndevice")[0].split())
    assert headline == (
        "one step on 2 devices: 1 replica × 2 microbatches × 2 sequences; "
        "bfloat16 compute, float32 sums of gradients, float32 master weights"
    )
    result = piper("plan", write(train=SECTIONS["train"] + SCALED))
    assert "float16 compute" in result.stdout
    assert "scaled loss" in " ".join(result.stdout.split())


def test_a_checked_strategy_follows_the_policy(piper, write):
    train = SECTIONS["train"] + '\nprecision = "bf16"'
    result = piper("check", write(train=train))
    assert result.exit_code == 0, result.output
    assert "bfloat16 compute" in " ".join(result.stdout.split())


def test_a_run_saves_the_master_weights(piper, write, tmp_path):
    train = SECTIONS["train"] + f"\nout_dir = '{tmp_path / 'out'}'" + SCALED
    result = piper("train", write(train=train))
    assert result.exit_code == 0, result.output
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert {str(t.dtype) for t in state.values() if t.is_floating_point()} == {"torch.float32"}
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line).get("loss") for line in lines]
    assert all(loss < 6 for loss in losses)

import json

import pytest
from tests.cli.conftest import SECTIONS

from piper import load_profile, load_timeline


def shown(result):
    assert result.exit_code == 0, result.output
    return [line.rstrip() for line in result.stdout.splitlines()]


def test_the_totals_are_those_of_the_schedule(piper, write):
    lines = shown(piper("simulate", write()))
    # Two stages, two microbatches: (p - 1) / (m + p - 1).
    assert lines[0] == "simulated: step 9 F (F: one forward), bubble 33.3%"
    rows = [line.split() for line in lines]
    assert ["0", "6", "F", "33.3%", "0"] in [row[:5] for row in rows]
    assert any(row[:2] == ["B", "PP=1"] for row in rows)


def test_a_preset_has_seconds_and_a_peak(piper, write):
    headline = " ".join(shown(piper("simulate", write(), "--device", "h100"))[:2])
    assert "GFLOP" in headline
    assert "of the peak" in headline


def test_trace_and_timeline_are_written(piper, write, tmp_path):
    shown(piper("simulate", write(), "--device", "CPU", "--trace", "t.json", "--save", "l.json"))
    line = load_timeline(tmp_path / "l.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == sum(1 for d in line.devices for _ in d.boxes())


def test_a_profile_is_measured_and_used(piper, write, tmp_path):
    config = write()
    shown(piper("profile", config, "-o", "p.json", "--repeats", "1"))
    profile = load_profile(tmp_path / "p.json")
    assert len(profile.chunks) == 4
    assert all(0 < seconds < 10 for seconds in profile.chunks.values())
    assert 0 < profile.messages.link.latency < 1
    lines = shown(piper("simulate", config, "--profile", "p.json", "--save", "l.json"))
    assert lines[0].startswith("simulated: step ")
    boxes = [b for b in load_timeline(tmp_path / "l.json").devices[0].boxes() if b.op == "compute"]
    measured = sorted(profile.chunks.values())
    launched = {round(m + profile.launch, 9) for m in measured}
    assert {round(b.seconds, 9) for b in boxes} <= launched


def test_a_profile_of_another_configuration_lacks_chunks(piper, write):
    shown(piper("profile", write(), "-o", "p.json", "--repeats", "1"))
    model = SECTIONS["model"].replace("width = 16", "width = 32")
    result = piper("simulate", write("other.toml", model=model), "--profile", "p.json")
    assert result.exit_code == 1
    assert "no measurement of chunk" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "h10"], "unknown device preset 'h10'"),
        (["--nodes", "1"], "need a --device"),
        (["--device", "H100", "--nodes", "1", "--devices-per-node", "1"], "needs 2 devices"),
        (["--profile", "none.json"], "cannot be read"),
        (["--profile", "none.json", "--device", "H100"], "leave out --device"),
    ],
)
def test_mistakes(piper, write, options, message):
    result = piper("simulate", write(), *options)
    assert result.exit_code == 1
    assert message in result.stderr


def test_explain_says_who_placed_a_chunk(piper, write):
    lines = shown(piper("explain", "F PP=1 MB=1", write()))
    assert any("Place({'PP': 1}, devices=[1]" in line for line in lines)


def test_explain_of_nothing(piper, write):
    result = piper("explain", "F PP=7", write())
    assert result.exit_code == 1
    assert "no node has the label 'F PP=7'" in result.stderr


MANY = {
    "strategy": 'schedule = "1f1b"\nnum_microbatches = 2\n'
    f"groups = [{list(range(17))}, {list(range(17, 34))}]",
    "train": SECTIONS["train"].replace("batch_size = 4", "batch_size = 68"),
}


@pytest.mark.parametrize("command", ["plan", "simulate", "view"])
def test_plans_for_many_devices_are_folded(piper, write, command):
    lines = shown(piper(command, write(**MANY)))
    (said,) = [line for line in lines if line.startswith("folded: ")]
    assert said.startswith("folded: 34 devices have ")
    roles = int(said.split()[4])
    assert roles < 10
    if command != "view":
        assert sum(line.split()[1:2] == ["(+16)"] for line in lines) >= 1 or roles > 2


def test_instructions_are_those_of_all_devices(piper, write):
    text = "\n".join(shown(piper("plan", write(**MANY), "--text")))
    assert "folded" not in text
    assert "device 33" in text


def test_explanations_take_the_same_costs(piper, write):
    config = write()
    in_forwards = "\n".join(shown(piper("explain", "device 1", config)))
    in_seconds = "\n".join(
        shown(piper("explain", "device 1", config, "--device", "H100", "--devices-per-node", 1))
    )
    assert "computes 6 F," in in_forwards
    assert "computes 6," not in in_seconds

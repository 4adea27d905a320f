import json
import re

import pytest
from tests.cli.conftest import SECTIONS

from piper.plan.codec import load_plan
from piper.plan.text import plan_text
from piper.verify import verify


def shown(result):
    assert result.exit_code == 0, result.output
    return [line.rstrip() for line in result.stdout.splitlines()]


def test_the_schedule_is_drawn(piper, write):
    lines = shown(piper("plan", write()))
    assert lines[:4] == [
        "one step on 2 devices: 1 replica × 2 microbatches × 2 sequences",
        "device 0 |F0|F1|      B0   |   B1   |",
        "device 1 |   F0|B0   |F1|B1   |",
        " F  forward   B  backward  bubble 33.3%",
    ]


def test_the_table_counts_messages_and_bytes(piper, write):
    strategy = SECTIONS["strategy"].replace("[[0], [1]]", "[[0, 1], [2, 3]]")
    lines = shown(piper("plan", write(strategy=strategy)))
    row, _ = [line.split() for line in lines if line.lstrip().startswith("2 ")]
    # Stage 1: a block of width 16 (two norms 2·2·16, attention 4·16² + 4·16, MLP 2·2·16² + 3·16),
    # the last norm 2·16, the head 256·16; float32. Two microbatches of one row of 8 × 16 float32
    # each way; all gradients reduced.
    parameters = 64 + 1024 + 64 + 1024 + 48 + 32 + 4096
    size = f"{parameters * 4 / 1024:.3g}"
    assert row == [
        "2",
        "PP=1",
        "4",
        size,
        "KiB",
        *["2,", "1", "KiB"] * 2,
        "1,",
        size,
        "KiB",
        "33.3%",
    ]


def test_estimated_costs_draw_the_update_too(piper, write):
    lines = shown(piper("plan", write(), "--costs", "estimated"))
    assert any("update" in line for line in lines)
    assert not any("update" in line for line in shown(piper("plan", write())))


def test_text_is_the_plan(piper, write, tmp_path):
    result = piper("plan", write(), "--text", "--save", "saved")
    plan = load_plan(tmp_path / "saved")
    assert result.stdout == plan_text(plan)
    verify(plan)
    assert plan.num_devices == 2


def test_a_strategy_file_is_planned_like_the_schedule_that_it_says(piper, write, tmp_path):
    by_name = piper("plan", write(), "--text")
    directives = [
        {"op": "place", "filter": {"PP": 0}, "devices": [0]},
        {"op": "place", "filter": {"PP": 1}, "devices": [1]},
        {"op": "split", "filter": {}, "num_microbatches": 2},
        {
            "op": "order",
            "filters": [
                [{"PP": 0, "MB": mb, "PASS": p}]
                for p, mb in [("F", 0), ("F", 1), ("B", 0), ("B", 1)]
            ],
        },
        {
            "op": "order",
            "filters": [
                [{"PP": 1, "MB": mb, "PASS": p}]
                for p, mb in [("F", 0), ("B", 0), ("F", 1), ("B", 1)]
            ],
        },
    ]
    (tmp_path / "strategy.json").write_text(json.dumps(directives))
    model = SECTIONS["model"] + "\nnum_stages = 2"
    by_file = piper(
        "plan", write("file.toml", model=model, strategy='file = "strategy.json"'), "--text"
    )
    assert by_file.exit_code == 0, by_file.output
    assert by_file.stdout == by_name.stdout


def test_weights_and_text_are_not_needed(piper, write):
    shown(piper("plan", write(data='files = ["absent.txt"]')))


def memory(lines):
    """The rows of the table of memory, by device, in words."""
    (start,) = [i for i, line in enumerate(lines) if " memory " in line]
    return [line.split() for line in lines[start:] if re.match(r" *\d ", line)]


def test_measured_memory_is_what_was_planned(piper, write, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    planned = memory(shown(piper("plan", write())))
    measured = memory(shown(piper("plan", write(), "--measure")))
    assert len(planned) == 2
    for one, two in zip(planned, measured, strict=True):
        number, *peak = one[:3]
        assert float(peak[0]) > 0
        assert two == [number, *peak, *peak, *one[3:]]


OFFLOADED = [
    {"op": "place", "filter": {"PP": 0}, "devices": [0]},
    {"op": "place", "filter": {"PP": 1}, "devices": [1]},
    {"op": "split", "filter": {}, "num_microbatches": 2},
    {"op": "offload", "filter": {"PP": 0}},
]


def test_host_memory_has_a_column(piper, write, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    (tmp_path / "strategy.json").write_text(json.dumps(OFFLOADED))
    path = write(model=SECTIONS["model"] + "\nnum_stages = 2", strategy='file = "strategy.json"')
    assert not any("host memory" in line for line in shown(piper("plan", write("other.toml"))))
    lines = shown(piper("plan", path))
    (head,) = [line for line in lines if "host memory" in line]
    assert head.endswith("host memory")
    first, second = memory(lines)
    assert float(first[-2]) > 0
    assert second[-2:] == ["0", "B"]


def test_a_budget_from_the_command_line_or_the_file(piper, write):
    for result in (
        piper("plan", write(), "--memory-budget", "1KiB"),
        piper("plan", write(memory='budget = "1KiB"')),
    ):
        assert result.exit_code == 1
        assert "(1024 bytes) per device" in " ".join(result.output.split())
        assert "What could lower it" in result.output
    shown(piper("plan", write(memory='budget = "1KiB"'), "--memory-budget", "1GiB"))
    result = piper("plan", write(), "--memory-budget", "much")
    assert result.exit_code == 1
    assert "--memory-budget: expected bytes" in result.output


def test_bounds_from_the_file_are_kept(piper, write):
    ahead, late = (
        piper("plan", write(memory=f"receive_bytes = {size}"), "--text").stdout.splitlines()
        for size in ('"1MiB"', 0)
    )
    assert "post_receive" in ahead[1]
    assert "post_receive" not in late[1]


V_SHAPE = 'schedule = "dualpipev"\ngroups = [[0], [1]]\nnum_microbatches = 4'


@pytest.mark.parametrize("columns", [80, 120])
def test_nothing_is_cut_off_or_broken(piper, write, monkeypatch, columns):
    """Where the place of each device's peak does not fit beside the table, it stands below."""
    monkeypatch.setenv("COLUMNS", str(columns))
    path = write(model=SECTIONS["model"].replace("2", "4", 1), strategy=V_SHAPE)
    lines = shown(piper("plan", path))
    drawn = [line for line in lines if " overlap " not in line]
    assert not any("…" in line for line in drawn)
    assert max(map(len, drawn)) <= columns
    assert any("PP=0,3" in line for line in lines)
    peaks = [
        line for line in lines if re.search(r"(peak after|MiB|KiB) +[BF][IW]? PP=\d MB=\d$", line)
    ]
    assert len(peaks) == 2


def test_columns_that_say_nothing_are_left_out(piper, write):
    (head,) = [line for line in shown(piper("plan", write())) if "regions" in line]
    assert head.split() == ["device", "regions", "chunks", "params", "sends", "receives", "idle"]


def test_overlap_groups_are_listed_up_to_some(piper, write):
    path = write(
        model=SECTIONS["model"].replace("2", "4", 1),
        strategy=V_SHAPE.replace("4", "12"),
        train=SECTIONS["train"].replace("batch_size = 4", "batch_size = 12"),
    )
    lines = shown(piper("plan", path))
    listed = [line for line in lines if " overlap " in line]
    (more,) = [line for line in lines if "--text shows all" in line]
    assert len(listed) == 8
    planned = shown(piper("plan", path, "--text"))
    groups = {line.partition("[overlap ")[2] for line in planned if "[overlap " in line}
    assert int(more.split()[2]) + len(listed) == len(groups)


def test_chunks_that_an_order_leaves_out_are_named(piper, write, tmp_path):
    """Not where no order speaks of the region and pass at all."""
    order = [[{"PP": 0, "MB": m, "PASS": "F"}] for m in (0, 1)]
    directives = [
        {"op": "place", "filter": {"PP": 0}, "devices": [0]},
        {"op": "place", "filter": {"PP": 1}, "devices": [1]},
        {"op": "split", "filter": {}, "num_microbatches": 4},
        {"op": "order", "filters": order},
    ]
    (tmp_path / "strategy.json").write_text(json.dumps(directives))
    path = write(model=SECTIONS["model"] + "\nnum_stages = 2", strategy='file = "strategy.json"')
    (line,) = [line for line in shown(piper("plan", path)) if "no Order" in line]
    assert line == (
        "no Order names 2 chunks of regions that others order: F PP=0 MB=2, F PP=0 MB=3"
    )
    assert not any("no Order" in line for line in shown(piper("plan", write("other.toml"))))

import io
import json

import pytest
from rich.console import Console

from piper.errors import ConfigError
from piper.training.metrics import (
    Curve,
    HeldOutRecord,
    MetricsWriter,
    TrainRecord,
    loss_curves,
    read_metrics,
)

TRAIN = TrainRecord(step=1, loss=5.5, seconds=0.5, tokens_per_second=4096.0)
HELD_OUT = HeldOutRecord(step=1, loss=5.25)


def test_records_come_back_as_written(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(TRAIN)
        writer.write(HELD_OUT)
    assert read_metrics(path) == [TRAIN, HELD_OUT]
    assert json.loads(path.read_text().splitlines()[0])["kind"] == "train"


def test_a_record_is_on_disk_once_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(TRAIN)
        assert read_metrics(path) == [TRAIN]


def test_a_second_run_appends(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for record in (TRAIN, HELD_OUT):
        with MetricsWriter(path) as writer:
            writer.write(record)
    assert read_metrics(path) == [TRAIN, HELD_OUT]


def test_a_line_cut_short_by_a_crash_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(TRAIN)
    with path.open("ab") as file:
        file.write(b'{"kind":"train","st')
    assert read_metrics(path) == [TRAIN]
    with MetricsWriter(path) as writer:
        writer.write(HELD_OUT)
    assert read_metrics(path) == [TRAIN, HELD_OUT]


def test_a_malformed_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(TRAIN)
    with path.open("ab") as file:
        file.write(b'{"kind":"train","step":"two"}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2: expected a metrics record"):
        read_metrics(path)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: expected a file that can be written"):
        MetricsWriter(tmp_path / "file" / "metrics.jsonl")


def rows(curves, width=20, height=6):
    """The drawing area of each row of characters."""
    lines = loss_curves(curves, width, height).plain.splitlines()
    return [line.split("┤")[1] for line in lines[:height]]


def test_a_falling_loss_falls_from_left_to_right():
    area = rows([Curve(label="train", points=[(0, 5.0), (50, 3.0), (100, 1.0)])])
    first = [next(row for row in range(6) if area[row][column] != " ") for column in range(20)]
    assert first[0] == 0
    assert first[-1] == 5
    assert first == sorted(first)


def test_marks_stand_where_the_points_are():
    points = [(0, 4.0), (100, 2.0)]
    area = rows([Curve(label="held out", points=points, marks=True)])
    assert area[0][0] == "●"
    assert area[5][19] == "●"
    assert sum(row.count("●") for row in area) == 2


def test_labels_and_last_values_are_shown():
    text = loss_curves(
        [
            Curve(label="train", points=[(1, 5.0), (400, 2.0)]),
            Curve(label="held out", points=[(400, 2.25)], marks=True),
        ]
    ).plain
    assert "train 2.000" in text
    assert "held out 2.250" in text
    assert text.splitlines()[-2].split() == ["1", "400"]


@pytest.mark.parametrize("points", [[(3, 2.0)], [(0, 2.0), (9, 2.0)]])
def test_one_point_or_a_flat_curve_is_drawn(points):
    assert any(row.strip() for row in rows([Curve(label="train", points=points)]))


def test_nothing_recorded_is_said():
    assert loss_curves([Curve(label="train", points=[])]).plain == "no loss recorded yet"


def test_the_drawing_fits_its_width():
    curves = [Curve(label="train", points=[(0, 5.0), (100, 1.0)])]
    out = io.StringIO()
    Console(file=out, width=84).print(loss_curves(curves, width=72))
    assert len(out.getvalue().splitlines()) == 12 + 3

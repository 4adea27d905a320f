import json

import pytest

from piper.errors import ConfigError
from piper.training.metrics import HeldOutRecord, MetricsWriter, TrainRecord, read_metrics

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

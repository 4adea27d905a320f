import json
import re

import msgspec
import pytest
from tests.visualize.timelines import pipeline

from piper.schedules import one_f_one_b
from piper.simulate.timeline import VERSION, Source


@pytest.fixture
def save(tmp_path):
    """Writes a timeline file."""

    def save(name, source=Source.SIMULATED, **changed):
        step = pipeline(one_f_one_b(2, 2), stages=2, source=source)
        msgspec.structs.replace(step, **changed).save(tmp_path / name)
        return tmp_path / name

    return save


def complaint(result):
    """The one message of a command that failed."""
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def shown(path):
    (text,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL
    )
    return json.loads(text)


def test_a_timeline_file_becomes_a_page(piper, save, tmp_path):
    result = piper("view", save("a.json"))
    assert result.exit_code == 0, result.output
    assert result.stdout == "written: schedule.html\n"
    data = shown(tmp_path / "schedule.html")
    assert [t["name"] for t in data["timelines"]] == ["a.json"]
    assert data["unit"] == "s"


def test_a_configuration_is_simulated(piper, write, tmp_path):
    result = piper("view", write(), "-o", "plan.html")
    assert result.exit_code == 0, result.output
    data = shown(tmp_path / "plan.html")
    (timeline,) = data["timelines"]
    assert data["unit"] == "F"
    assert timeline["seconds"] == 9  # two stages, two microbatches: (2 + 1) · (1 + 2)
    assert timeline["num_devices"] == 2


def test_two_are_compared(piper, save, write, tmp_path):
    measured = save("measured.json", Source.MEASURED)
    result = piper("view", write(), "--device", "CPU", "--compare", measured)
    assert result.exit_code == 0, result.output
    data = shown(tmp_path / "schedule.html")
    assert [(t["name"], t["source"]) for t in data["timelines"]] == [
        ("run.toml", "simulated"),
        ("measured.json", "measured"),
    ]
    assert data["unit"] == "s"


def test_the_output_may_be_a_static_picture(piper, save, tmp_path):
    assert piper("view", save("a.json"), "-o", "a.svg").stdout == "written: a.svg\n"
    assert (tmp_path / "a.svg").read_text().startswith("<svg ")


def test_seconds_are_not_compared_with_forwards(piper, save, write):
    message = complaint(piper("view", write(), "--compare", save("m.json", Source.MEASURED)))
    assert "choose --device or --profile" in message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "a.json is empty; simulate or profile again"),
        ("{", "timeline file a.json: "),
        ("[1]", "timeline file a.json: "),
        ('{"version": 1}', "timeline file a.json: Object missing required field"),
        (
            f'{{"version": {VERSION + 1}}}',
            f"format version {VERSION + 1}, this piper reads version {VERSION}",
        ),
    ],
)
def test_a_file_that_is_no_timeline_is_one_clear_error(piper, tmp_path, content, expected):
    (tmp_path / "a.json").write_text(content)
    assert expected in complaint(piper("view", "a.json"))
    assert not (tmp_path / "schedule.html").exists()


def test_a_missing_file_and_another_kind_of_file_are_named(piper, save, tmp_path):
    assert "cannot read timeline nowhere.json: No such file" in complaint(
        piper("view", "nowhere.json")
    )
    assert "nowhere.toml: expected a TOML configuration file" in complaint(
        piper("view", "nowhere.toml")
    )
    assert "a.txt: expected a timeline (.json" in complaint(piper("view", "a.txt"))
    assert "b.txt: expected a timeline" in complaint(
        piper("view", save("a.json"), "--compare", "b.txt")
    )


def test_an_empty_timeline_and_a_bad_output_are_named(piper, save, tmp_path):
    assert "timeline a.json has no boxes" in complaint(piper("view", save("a.json", devices=())))
    good = save("b.json")
    (tmp_path / "file").write_text("")
    assert "cannot write file/x.html: " in complaint(piper("view", good, "-o", "file/x.html"))
    assert "x.png: expected a file name that ends in .html" in complaint(
        piper("view", good, "-o", "x.png")
    )

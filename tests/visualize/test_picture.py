import json

import pytest
from tests.visualize.timelines import pipeline

import piper
from piper.errors import PictureError
from piper.schedules import one_f_one_b


@pytest.fixture(scope="module")
def step():
    return pipeline(one_f_one_b(2, 2), stages=2)


def test_the_extension_chooses_the_picture(step, tmp_path):
    for name, beginning in (("a.html", "<!doctype html>"), ("b.svg", "<svg "), ("c.json", "{")):
        (written,) = piper.visualize(step, tmp_path / "folder" / name)
        assert written == tmp_path / "folder" / name
        assert written.read_text().startswith(beginning)
    assert json.loads((tmp_path / "folder" / "c.json").read_text())["traceEvents"]


def test_the_function_is_not_hidden_by_the_package_of_its_name(step, tmp_path):
    import piper.visualize.terminal  # binds the package's name in piper

    assert piper.visualize(step, tmp_path / "a.svg") == (tmp_path / "a.svg",)


def test_an_unknown_extension_is_refused_with_those_there_are(step, tmp_path):
    with pytest.raises(
        PictureError,
        match=r"x\.htm: expected a file name that ends in .*\.svg.*did you mean '\.html'",
    ):
        piper.visualize(step, tmp_path / "x.htm")


def test_only_pages_compare(step, tmp_path):
    with pytest.raises(PictureError, match=r"two timelines are compared on an \.html page only"):
        piper.visualize(step, tmp_path / "x.svg", compare=step)


@pytest.mark.parametrize("name", ["x.html", "x.svg", "x.json"])
def test_a_path_that_cannot_be_written_is_one_clear_error(step, tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        PictureError, match=f"cannot write .*file/{name}: .*; name a file in a folder"
    ):
        piper.visualize(step, tmp_path / "file" / name)
    (tmp_path / name).mkdir()
    with pytest.raises(PictureError, match="cannot write"):
        piper.visualize(step, tmp_path / name)

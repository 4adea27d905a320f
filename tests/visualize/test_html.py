import json
import re

import msgspec
import pytest
from tests.visualize.timelines import pipeline

from piper.errors import PictureError
from piper.schedules import one_f_one_b
from piper.visualize.html import write_html


@pytest.fixture(scope="module")
def step():
    return pipeline(one_f_one_b(2, 3), stages=2)


def data_of(path):
    (text,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL
    )
    return json.loads(text)


def test_a_page_needs_no_other_file(step, tmp_path):
    (page,) = write_html([step], ["x"], tmp_path / "page.html", title="x")
    text = page.read_text()
    assert not re.findall(r"https?:|//cdn|<link|<img|\ssrc=|@import|url\(|fetch\(|import\(", text)
    assert "{{" not in text.replace(json.dumps(data_of(page)), "")


def test_texts_of_the_user_are_data(step, tmp_path):
    evil = "</script><script>alert(1)</script>"
    first = step.devices[0]
    box = msgspec.structs.replace(first.lanes[0].boxes[0], label=evil)
    lane = msgspec.structs.replace(first.lanes[0], boxes=(box, *first.lanes[0].boxes[1:]))
    device = msgspec.structs.replace(first, lanes=(lane, *first.lanes[1:]))
    changed = msgspec.structs.replace(step, devices=(device, *step.devices[1:]))
    (page,) = write_html([changed], [evil], tmp_path / "page.html", title=evil)
    text = page.read_text()
    assert text.count("<script") == 2  # the data and the code
    assert "&lt;/script&gt;" in text  # the title
    assert evil in data_of(page)["timelines"][0]["strings"]
    assert data_of(page)["timelines"][0]["name"] == evil


def test_too_many_boxes_make_parts_that_name_each_other(step, tmp_path):
    count = sum(1 for d in step.devices for _ in d.boxes())
    assert len(write_html([step], ["x"], tmp_path / "one.html", title="x", most_boxes=count)) == 1
    pages = write_html([step], ["x"], tmp_path / "page.html", title="x", most_boxes=count // 2)
    assert [p.name for p in pages] == ["page.html", "page-2.html", "page-3.html"][: len(pages)]
    assert len(pages) > 1
    for i, page in enumerate(pages):
        data = data_of(page)
        assert data["part"] == i
        assert data["parts"] == [p.name for p in pages]


def test_a_timeline_without_boxes_is_an_error(step, tmp_path):
    devices = tuple(msgspec.structs.replace(d, lanes=()) for d in step.devices)
    empty = msgspec.structs.replace(step, devices=devices)
    with pytest.raises(PictureError, match="timeline b has no boxes: there is nothing to draw"):
        write_html([step, empty], ["a", "b"], tmp_path / "page.html", title="x")
    assert not list(tmp_path.iterdir())

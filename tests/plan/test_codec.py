"""Plan and DAG files."""

import json

import pytest
from tests.support.synthetic import OPAQUE, chain

from piper import reading
from piper.directives.order import Order
from piper.directives.replicate import Replicate
from piper.directives.split import Split
from piper.directives.strategy import apply
from piper.errors import PlanError
from piper.plan.codec import decode_dag, decode_plan, encode_dag, encode_plan, load_plan, save_plan
from piper.plan.model import VERSION
from piper.plan.text import dag_text, plan_text
from piper.planner import plan
from piper.schedules.placements import chain as chained
from piper.verify import verify


@pytest.fixture(scope="module")
def planned():
    dag = chain(2, tied=True, buffer=True, weighted=True, whole=True, batch_size=24)
    strategy = [
        *chained([[0, 1], [2, 3]]),
        Replicate({}, bucket_size=1.5, replicated_buffers="mean"),
        Split({}, num_microbatches=3),
        Order([[{"PP": 0, "MB": 0}], [{"PP": 0, "MB": 1}]]),
    ]
    return plan(apply(dag, strategy))


def test_plan_round_trip_byte_for_byte(planned):
    files = encode_plan(planned)
    assert sorted(files) == [*(f"device-000{d}.json" for d in range(4)), "manifest.json"]
    again = decode_plan(files)
    assert again == planned
    assert encode_plan(again) == files
    verify(again)


def test_what_we_wrote_needs_no_second_look(planned, monkeypatch):
    def scanned(data, make):
        raise AssertionError("the file is not as it is written: names are looked for twice")

    monkeypatch.setattr(reading, "_refuse_twice", scanned)
    assert decode_plan(encode_plan(planned)) == planned
    assert decode_dag(encode_dag(planned.dag)) == planned.dag


def test_dag_round_trip_byte_for_byte(planned):
    for dag in (planned.dag, chain(2)):
        data = encode_dag(dag)
        again = decode_dag(data)
        assert again == dag
        assert list(again.nodes) == list(dag.nodes)  # order is part of the DAG
        assert encode_dag(again) == data


def test_files_on_disk(planned, tmp_path):
    save_plan(planned, tmp_path / "deep" / "plan")
    assert load_plan(tmp_path / "deep" / "plan") == planned
    assert json.loads((tmp_path / "deep/plan/manifest.json").read_text())["version"] == VERSION


def test_a_folder_without_a_plan(tmp_path):
    with pytest.raises(PlanError, match=r"no plan in .*expected manifest\.json"):
        load_plan(tmp_path)


def test_a_missing_device(planned):
    files = dict(encode_plan(planned))
    del files["device-0002.json"]
    with pytest.raises(PlanError, match=r"device-0002\.json is missing; found device-0000"):
        decode_plan(files)


def test_device_files_may_not_be_exchanged(planned):
    files = dict(encode_plan(planned))
    files["device-0000.json"], files["device-0001.json"] = (
        files["device-0001.json"],
        files["device-0000.json"],
    )
    with pytest.raises(PlanError, match=r"device-0000\.json is the program of device 1"):
        decode_plan(files)


def objects(contents, path="$"):
    """Every JSON object in a file whose fields have fixed names, with its path."""
    if isinstance(contents, list):
        for i, item in enumerate(contents):
            yield from objects(item, f"{path}[{i}]")
    if isinstance(contents, dict):
        free = {
            "bodies",
            "bindings",
            "contributions",
            "buffer_updates",
            "shards",
            "expert_groups",
        }
        if path.rpartition(".")[2] not in free:
            yield path, contents
        for name, item in contents.items():
            yield from objects(item, f"{path}.{name}")


@pytest.mark.parametrize("name", ["manifest.json", "device-0002.json"])
def test_unknown_fields_are_errors_wherever_they_are(planned, name):
    files = dict(encode_plan(planned))
    count = len(list(objects(json.loads(files[name]))))
    assert count > 50
    kinds = set()
    for i in range(count):
        contents = json.loads(files[name])
        path, found = list(objects(contents))[i]
        kind = (tuple(sorted(found)), found.get("op") or found.get("kind") or found.get("type"))
        if kind in kinds:
            continue
        kinds.add(kind)
        found["surprise"] = 1
        changed = {**files, name: json.dumps(contents).encode()}
        with pytest.raises(PlanError) as caught:
            decode_plan(changed)
        assert name in str(caught.value)
        assert "`surprise`" in str(caught.value), path
        if path != "$":
            assert " - at `$." in str(caught.value), path
    assert len(kinds) > 8


def test_an_error_has_a_path(planned):
    files = dict(encode_plan(planned))
    contents = json.loads(files["device-0000.json"])
    contents["instructions"][3]["stream"] = 7
    files["device-0000.json"] = json.dumps(contents).encode()
    with pytest.raises(
        PlanError, match=r"device-0000\.json: Expected `str`.* `\$\.instructions\[3\]"
    ):
        decode_plan(files)


def test_an_unknown_instruction(planned):
    files = dict(encode_plan(planned))
    contents = json.loads(files["device-0000.json"])
    contents["instructions"][0]["op"] = "teleport"
    files["device-0000.json"] = json.dumps(contents).encode()
    with pytest.raises(PlanError, match=r"'teleport'.*instructions\[0\]"):
        decode_plan(files)


@pytest.mark.parametrize("name", ["manifest.json", "device-0001.json"])
@pytest.mark.parametrize("also", [{}, {"new_field": 1}], ids=["same fields", "other fields"])
def test_another_version_is_refused_as_such(planned, name, also):
    files = dict(encode_plan(planned))
    contents = json.loads(files[name]) | {"version": VERSION + 1} | also
    files[name] = json.dumps(contents).encode()
    with pytest.raises(PlanError) as caught:
        decode_plan(files)
    assert f"{name} has format version {VERSION + 1}, this piper reads version {VERSION}" in str(
        caught.value
    )


@pytest.mark.parametrize("data", [b"", b"{", b"\xff"])
def test_not_json(planned, data):
    with pytest.raises(PlanError, match=r"manifest\.json: not JSON"):
        decode_plan({**encode_plan(planned), "manifest.json": data})


def test_a_changed_body_is_noticed(planned):
    files = dict(encode_plan(planned))
    data = files["manifest.json"].decode()
    files["manifest.json"] = data.replace(OPAQUE[0], OPAQUE[2], 1).encode()
    with pytest.raises(
        PlanError, match=r"the body filed as \w+ has content hash \w+: it was changed"
    ):
        decode_plan(files)


def test_texts_name_every_node_and_instruction(planned):
    lines = dag_text(planned.dag).splitlines()
    assert len(lines) == len(planned.dag.nodes) + len(planned.dag.order)
    text = plan_text(planned)
    assert len(text.splitlines()) == sum(1 + len(d.instructions) for d in planned.devices)
    assert "# F PP=1 MB=2" in text

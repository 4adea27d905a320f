"""Files that anybody may have written: refused with the place, at once, and without running anything
of them.
"""

import json
import os
import shutil
import time
from dataclasses import replace
from itertools import islice

import msgspec
import pytest
import torch
from tests.fuzz.readers import CONFIG, reader
from tests.support.operators import pure_operators
from tests.support.synthetic import chain

import piper
from piper.dtypes import DType
from piper.errors import (
    CaptureError,
    CheckpointError,
    ConfigError,
    PiperError,
    PiperWarning,
    PlanError,
    ScheduleError,
    StrategyFileError,
    VerificationError,
)
from piper.ir.body import Body, Call, Const, Literal, Ref, Sequence, TensorSpec, body_id
from piper.ir.operators import _listed, refusal
from piper.ir.symbols import evaluate
from piper.plan.codec import decode_plan, encode_plan
from piper.plan.profile import load_profile
from piper.runtime.checkpoint.index import Index, seal
from piper.runtime.code import chunk_function, resolve
from piper.simulate.timeline import load_timeline
from piper.training.config import load_config
from piper.visualize.html import write_html
from piper.visualize.svg import svg

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def planned():
    dag = chain(2, batch_size=8)
    return piper.plan(piper.apply(dag, piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 2)))


def with_call(plan, call, **fields):
    """*plan*, whose first body does *call* in place of its first one."""
    name, body = next((n, b) for n, b in plan.dag.bodies.items() if b.calls)
    changed = msgspec.structs.replace(
        body, calls=(msgspec.structs.replace(body.calls[0], **{**call, **fields}), *body.calls[1:])
    )
    nodes = {
        n: msgspec.structs.replace(
            node, work=msgspec.structs.replace(node.work, body=body_id(changed))
        )
        if getattr(node.work, "body", None) == name
        else node
        for n, node in plan.dag.nodes.items()
    }
    bodies = {
        (body_id(changed) if n == name else n): (changed if n == name else b)
        for n, b in plan.dag.bodies.items()
    }
    devices = tuple(
        msgspec.structs.replace(
            device,
            instructions=tuple(
                msgspec.structs.replace(i, body=body_id(changed))
                if getattr(i, "body", None) == name
                else i
                for i in device.instructions
            ),
        )
        for device in plan.devices
    )
    return replace(plan, dag=replace(plan.dag, nodes=nodes, bodies=bodies), devices=devices)


def refused(plan, message, **options):
    """Both by the reader and by the verifier."""
    with pytest.raises(PlanError, match=message):
        decode_plan(encode_plan(plan), **options)
    with pytest.raises(VerificationError, match=message):
        piper.verify(plan, **options)


CODE = "x=__import__('os').system('touch /tmp/piper-was-here')"


@pytest.mark.parametrize("name", [CODE, "a b", "a,b=1", "lambda", "é", "", "a\n", "self.x"])
def test_names_of_arguments_are_identifiers(planned, name):
    refused(with_call(planned, {"kwargs": ((name, 1),)}), "is not the name of an argument")
    made = Body(
        (TensorSpec((2,), DType.FLOAT32),),
        (Call("aten.add.Tensor", (Ref(0), 1), ((name, 1),), (TensorSpec((2,), DType.FLOAT32),)),),
        (1,),
    )
    with pytest.raises(PlanError, match="is not the name of an argument"):
        chunk_function(made, {}, CPU)


@pytest.mark.parametrize(
    "target",
    [
        "aten.from_file.default", "aten.copy_.default", "aten.set_.source_Tensor", "aten.resize_.default", "aten.record_stream.default",
        "aten._print.default", "aten.save.default", "aten._assert_async.msg", "aten.add.out", "aten.native_batch_norm.default",
        "aten._foreach_add_.Scalar", "aten.set_data.default", "aten.pin_memory.default", "prims.copy_to.default", "os.system.default",
        "operator.setitem", "aten.add", "a; import os.b.c", "builtins.exec.default", "inductor.resize_storage_bytes_.default",
    ],
)  # fmt: skip
def test_operators_are_those_of_a_list(planned, target):
    refused(with_call(planned, {"target": target}), "operator|not the name")
    if target.partition(".")[0] not in ("os", "builtins", "inductor"):
        with pytest.raises(PlanError):
            resolve(target)


def test_operators_of_other_libraries_are_allowed_by_name_only(planned):
    plan = with_call(planned, {"target": "mylib.op.default"})
    refused(plan, "of another library, and may do anything; if you trust it, list it")
    refused(plan, "of another library", allow_operators=["other::*"])
    piper.verify(plan, allow_operators=["mylib::*"])
    piper.verify(plan, allow_operators=["mylib.op.default"])
    assert decode_plan(encode_plan(plan), allow_operators=["mylib::op*"]) == plan
    refused(
        with_call(planned, {"target": "aten.from_file.default"}),
        "is not one of",
        allow_operators=["*"],
    )


def test_the_list_is_what_the_schemas_of_this_torch_give():
    found = dict(pure_operators())
    mine = {n: r for n, r in _listed().items() if n.startswith(("aten.", "prims."))}
    assert mine.items() <= found.items()
    # Torch's compiler, where it was imported, has registered more of its own.
    assert {n for n in found if n.startswith("aten.")} == {n for n in mine if n.startswith("aten.")}
    assert len(found) > 1000
    for target in islice(mine, 200):
        assert refusal(target) is None
        assert not resolve(target)._schema.is_mutable


@pytest.mark.parametrize(
    "text", ["/etc/passwd", "..\\x", "~root", "a\x00b", "file://x", "a" * 2000, "a\n"]
)
def test_no_argument_names_a_file(planned, text):
    refused(with_call(planned, {"args": (Ref(0), text)}), "name of a file|at most 1024 characters")


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        (Ref(99), "value 99 does not exist yet"),
        (Ref(-1), "value -1 does not exist yet"),
        (Const("eval", "1"), "unknown constant 'eval'"),
        (Const("dtype", "Tensor"), "unknown constant 'dtype'"),
        (Const("layout", "_C"), "unknown constant 'layout'"),
        (Const("device", "cuda:0"), "unknown constant 'device'"),
        (1 << 70, "of 64 bits"),
        (Literal(TensorSpec((1 << 40, 1 << 40), DType.FLOAT64), (1.0,)), "more than 2\\^63 bytes"),
        (Literal(TensorSpec((3,), DType.FLOAT64), (1.0,)), "3 elements has 1 values"),
    ],
)
def test_arguments_exist(planned, arg, message):
    refused(with_call(planned, {"args": (arg,)}), message)


def nested(depth):
    arg = 1
    for _ in range(depth):
        arg = Sequence((arg,))
    return arg


def test_arguments_are_not_nested_deeply(planned):
    piper.verify(with_call(planned, {"args": (Ref(0), nested(4))}))
    refused(with_call(planned, {"args": (nested(20),)}), "lists are nested more than 8 deep")


def test_random_calls_have_streams_and_no_others(planned):
    refused(with_call(planned, {"target": "aten.native_dropout.default"}), "names no stream")
    refused(with_call(planned, {"rng": 0}), "draws none")


def quickly(function):
    """What *function* raises, within a second of processor."""
    began = time.process_time()
    with pytest.raises(PiperError) as caught:
        function()
    assert time.process_time() - began < 1
    return caught.value


@pytest.mark.parametrize(
    "expression",
    ["9**9**9", "2**64", "(" * 100_000, "-" * 100_000 + "1", "1" * 100_000, "not " * 50_000 + "1", "B**B**B**B", "min(B)", "B.real", "B[0]",
     "__import__('os')", "'a'*9", "min(B, 2, key=abs)", "1e999", "(-2)**0.5", "1//0", "\x00", "lambda: 1"],
)  # fmt: skip
def test_expressions_are_small(expression):
    assert isinstance(quickly(lambda: evaluate(expression, {"B": 40})), CaptureError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_replicas": 0}, "num_replicas: expected a number from 1"),
        ({"num_microbatches": -1}, "num_microbatches: expected"),
        ({"num_devices": 10**9}, "num_devices: expected"),
        ({"microbatch_size": 1 << 70}, "microbatch_size: expected"),
        ({"seed_value": float("nan")}, "seed_value: expected a finite number"),
        ({"bindings": {"a b": 1}}, "'a b' is not the name of a symbol"),
        ({"bindings": {"s0": -1}}, "expected a size for s0"),
        ({"devices": ()}, "expected device plans 0 to 3"),
        ({"roles": ((0, 0), (1,), (2,), (3,))}, "roles: expected each of 4 devices once"),
    ],
)
def test_counts_of_a_plan(planned, change, message):
    with pytest.raises(VerificationError, match=message):
        piper.verify(replace(planned, **change))


def changed_instruction(plan, kind, **fields):
    devices = list(plan.devices)
    for number, device in enumerate(devices):
        for i, instruction in enumerate(device.instructions):
            if instruction.op == kind:
                program = list(device.instructions)
                program[i] = msgspec.structs.replace(instruction, **fields)
                devices[number] = msgspec.structs.replace(device, instructions=tuple(program))
                return replace(plan, devices=tuple(devices))
    raise AssertionError(kind)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("send", {"message": None}, r"message|instructions"),
        ("compute", {"body": None}, "body"),
        ("compute", {"inputs": None}, "inputs"),
        ("compute", {"inputs": (1.0,)}, "no whole number"),
        ("compute", {"inputs": ("a",)}, "no whole number"),
        ("compute", {"node": 10**9}, "is not in the DAG"),
        ("compute", {"outputs": (-1,)}, "does not exist"),
        ("accumulate", {"left": ()}, "lengths"),
        ("optimizer_step", {"names": ()}, "lengths"),
        ("all_reduce_bucket", {"members": ()}, "members"),
        ("wait", {"event": -5}, "is not recorded"),
    ],
)
def test_malformed_instructions(planned, kind, fields, message):
    with pytest.raises(VerificationError, match=message):
        piper.verify(changed_instruction(planned, kind, **fields))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("dag", "splits", 0, "count"), 0, "expected a count of 1 or more"),
        (("dag", "splits", 0, "count"), 10**12, "at most .* microbatches"),
        (("dag", "losses"), [], "losses: expected 2"),
        (("dag", "order", 0, "before"), 10**6, r"order\[0\]: node 1000000"),
        (("dag", "nodes", 0, "inputs"), [10**9], "which there is not"),
        (("dag", "nodes", 0, "devices"), [], "a group of devices is empty"),
        (("dag", "nodes", 0, "devices"), [0, 0], "a device is there twice"),
        (("dag", "nodes", 0, "devices"), [-1], "device -1 does not exist"),
        (("dag", "values", 0, "spec", "shape"), [1 << 62, 1 << 62], "more than 2\\^63 bytes"),
        (("dag", "values", 0, "id"), 1, "two of the values"),
        (("dag", "guards"), ["9**9**9 + "], "not an expression"),
        (("dag", "batch_symbol"), "__import__('os')", "is not a name"),
        (("communicators", 0, "members"), [0, 99], "outside"),
    ],
)
def test_malformed_plan_files(planned, path, value, message):
    files = dict(encode_plan(planned))
    manifest = json.loads(files["manifest.json"])
    holder = manifest
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    files["manifest.json"] = json.dumps(manifest).encode()
    with pytest.raises(PlanError, match=message):
        decode_plan(files)


def test_cycles_are_refused_when_read(planned):
    files = dict(encode_plan(planned))
    manifest = json.loads(files["manifest.json"])
    edge = manifest["dag"]["order"][0]
    manifest["dag"]["order"].append({**edge, "before": edge["after"], "after": edge["before"]})
    files["manifest.json"] = json.dumps(manifest).encode()
    with pytest.raises(PlanError, match="cycle"):
        decode_plan(files)


DEEP = {
    "list": b"[" * 100_000,
    "object": b'{"a":' * 100_000,
    "closed": b"[" * 100_000 + b"]" * 100_000,
}


@pytest.mark.parametrize(
    "data",
    [
        *DEEP.values(),
        b"\xff\xfe",
        b"",
        b"\x00",
        b"9" * 100_000,
        b'"\xed\xa0\x80"',
        b"NaN",
        b"Infinity",
    ],
    ids=map(str, range(10)),
)
@pytest.mark.parametrize(
    "load", [piper.load_strategy, load_profile, load_timeline, load_config, lambda p: decode_plan({"manifest.json": p.read_bytes()})],
    ids=["strategy", "profile", "timeline", "config", "plan"],
)  # fmt: skip
def test_what_is_no_such_file(load, data, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(data)
    quickly(lambda: load(path))


def test_names_are_there_once(planned, tmp_path):
    path = tmp_path / "s.json"
    path.write_text('[{"op": "place", "filter": {}, "devices": [0], "devices": [1]}]')
    assert "'devices' twice" in str(quickly(lambda: piper.load_strategy(path)))
    files = dict(encode_plan(planned))
    files["manifest.json"] = files["manifest.json"].replace(
        b'"num_replicas":', b'"num_replicas":7,"num_replicas":', 1
    )
    with pytest.raises(PlanError, match="'num_replicas' twice"):
        decode_plan(files)


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "nul"])
@pytest.mark.parametrize("load", [piper.load_strategy, load_profile, load_timeline, load_config])
def test_only_regular_files_are_read(load, kind, tmp_path):
    path = tmp_path / "x"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    path = {"device": "/dev/zero", "nul": "a\x00b"}.get(kind, path)
    quickly(lambda: load(path))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"num_microbatches = 4", b"num_microbatches = 1000000000000", "stages times microbatches"),
        (b"num_layers = 2", b"num_layers = 1000000", "num_layers: expected at most"),
        (b"width = 8", b"width = 99999999999999999999999999", "64 bits"),
        (b"steps = 3", b"steps = inf", "steps"),
        (b"groups = [[0, 1], [2, 3]]", b"groups = [[0], [1000000000]]", "devices are counted"),
        (b"groups = [[0, 1], [2, 3]]", b"groups = " + b"[" * 5000, "TOML"),
        (b"lr = 0.01", b"lr = " + b"9" * 9000, "TOML"),
    ],
)
def test_absurd_configurations(old, new, message, tmp_path):
    path = tmp_path / "run.toml"
    assert old in CONFIG
    path.write_bytes(CONFIG.replace(old, new))

    def load():
        load_config(path).strategy.directives()
        piper.apply(chain(2), load_config(path).strategy.directives())

    assert message in str(quickly(load))


def test_absurd_schedules():
    for make in (piper.schedules.gpipe, piper.schedules.one_f_one_b, piper.schedules.zb_h1):
        assert isinstance(quickly(lambda make=make: make(10**6, 10**12)), ScheduleError)
    for said in (
        "0F1000000000000,0B1000000000000\n",
        "1000000000F0,1000000000B0\n",
        "0F" + "9" * 5000,
    ):
        quickly(lambda said=said: piper.schedules.convert.strategy_of_actions(said))
    quickly(lambda: piper.apply(chain(2), [piper.Split({}, num_microbatches=10**12)]))
    quickly(lambda: piper.apply(chain(2), [piper.Place({}, devices=[10**9])]))


# --- checkpoints --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints():
    return reader("checkpoint")


@pytest.fixture
def saved(checkpoints, tmp_path):
    (files,) = checkpoints.originals
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def edited(folder, change, *, sealed=True):
    path = folder / "index.json"
    index = json.loads(path.read_text())
    change(index)
    data = seal(msgspec.convert(index, Index)) if sealed else json.dumps(index, indent=1).encode()
    path.write_bytes(data)


def lowered(index):
    index["optimizer"]["groups"][0]["options"]["lr"] = 0.5


def without_an_entry(index):
    entries = next(iter(index["optimizer"]["tensors"].values()))
    del entries["exp_avg_sq"]


def renamed(name):
    def change(index):
        index["files"][0]["name"] = name

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_an_entry, "'exp_avg_sq' is there for one of"),
        (renamed("../device-0000.safetensors"), r"expected a name such as"),
        (renamed("/etc/passwd"), "expected a name such as"),
        (renamed("device-0000.safetensors\x00"), "expected a name such as"),
        (renamed("device-0001.safetensors"), "that no other file has"),
        (lambda i: i.update(step=-1), "step: expected 0 or more"),
        (lambda i: i["parameters"]["a.weight"]["pieces"][0].update(count=-6), "has no piece"),
        (lambda i: i["parameters"]["a.weight"]["pieces"][0].update(start=1), "has no piece"),
        (lambda i: i["parameters"]["a.weight"].update(shape=[1 << 40, 1 << 40]), "elements of"),
        (lambda i: i["parameters"]["a.weight"].update(dtype="object"), "unknown element type"),
        (lambda i: i["parameters"].update({"a.weight": i["parameters"]["b.weight"]}), "another's too"),
        (lambda i: i["optimizer"]["groups"][0]["options"].update(lr={"float": "x"}), "expected an encoded value"),
        (lambda i: i["optimizer"]["groups"][0]["options"].update(lr={"tensor": "float64", "shape": [9], "values": []}), "small tensor"),
    ],
)  # fmt: skip
def test_an_index_that_was_rewritten(checkpoints, saved, change, message):
    """Whoever rewrites the digest too gets as far as what is possible at all."""
    edited(saved, change)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.read(saved)


@pytest.mark.parametrize(
    "change", [lowered, without_an_entry, lambda i: i.update(step=5), lambda i: None]
)
def test_an_index_that_was_changed(checkpoints, saved, change):
    """Even its spaces count."""
    edited(saved, change, sealed=False)
    with pytest.raises(CheckpointError, match="another SHA-256"):
        checkpoints.read(saved)


@pytest.mark.parametrize("name", ["index.json", "device-0000.safetensors"])
@pytest.mark.parametrize("kind", ["link", "folder", "fifo"])
def test_a_checkpoint_has_regular_files_only(checkpoints, saved, name, kind, tmp_path_factory):
    moved = shutil.move(saved / name, tmp_path_factory.mktemp("elsewhere") / name)
    if kind == "link":
        (saved / name).symlink_to(moved)
    elif kind == "folder":
        (saved / name).mkdir()
    else:
        os.mkfifo(saved / name)
    assert isinstance(quickly(lambda: checkpoints.read(saved)), CheckpointError)


def test_hard_links_are_files(checkpoints, saved, tmp_path_factory):
    moved = shutil.move(saved / "index.json", tmp_path_factory.mktemp("elsewhere") / "index.json")
    (saved / "index.json").hardlink_to(moved)
    checkpoints.read(saved)


def test_weights_of_a_damaged_file_are_refused(saved):
    path = saved / "device-0000.safetensors"
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    checkpoint = piper.Checkpoint.open(saved)
    with pytest.raises(CheckpointError, match="another SHA-256"):
        checkpoint.weights(["a.weight", "b.weight"])


def test_a_checkpoint_without_a_digest_is_loaded_with_a_warning(saved):
    def older(index):
        index["version"] = 1
        del index["digest"]

    edited(saved, older, sealed=False)
    with pytest.warns(PiperWarning, match="before it had a digest"):
        piper.Checkpoint.open(saved)
    edited(saved, lambda i: i.update(version=2), sealed=False)
    with pytest.raises(CheckpointError, match="has a digest from version 2 on"):
        piper.Checkpoint.open(saved)


# --- what is drawn ------------------------------------------------------------------------------------

MARKUP = "</script></title><img src=x onerror='alert(1)'>\"&\u2028"


def test_names_in_pages_and_pictures_are_text(planned, tmp_path):
    timeline = piper.simulate(planned)
    device = timeline.devices[0]
    boxes = tuple(
        msgspec.structs.replace(
            box, label=MARKUP, op=box.op, tags=((MARKUP, 0),), meeting=box.meeting and MARKUP
        )
        for box in device.lanes[0].boxes
    )
    lanes = (msgspec.structs.replace(device.lanes[0], boxes=boxes), *device.lanes[1:])
    spoiled = msgspec.structs.replace(
        timeline,
        devices=(msgspec.structs.replace(device, lanes=lanes), *timeline.devices[1:]),
        unit=MARKUP,
    )
    (path,) = write_html([spoiled], [MARKUP], tmp_path / "x.html", title=MARKUP)
    for page in (path.read_text(), svg(spoiled)):
        assert "<img" not in page
        assert "alert(1)" in page
    assert path.read_text().count("</script>") == path.read_text().count("<script")
    spoiled.save(tmp_path / "t.json")
    with pytest.raises(PlanError, match="unit: expected 's' or 'F'"):
        load_timeline(tmp_path / "t.json")


def test_the_errors_are_of_their_kinds(tmp_path):
    for load, kind in ((piper.load_strategy, StrategyFileError), (load_config, ConfigError)):
        assert isinstance(quickly(lambda load=load: load(tmp_path / "none")), kind)

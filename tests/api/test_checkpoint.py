"""What save and load refuse, and that a refusal changes nothing."""

import copy
import errno
import json
import shutil

import msgspec
import pytest
import torch
from tests.api.test_accumulation import batch_of
from tests.api.test_clipping import Model, strategy
from tests.cases.equal import adamw, mse, sgd

import piper
from piper.api import checkpoint as api
from piper.errors import CheckpointError, RunError, StateError
from piper.runtime import tensor_file
from piper.runtime.checkpoint.index import Index, seal

pytestmark = pytest.mark.timeout(120)

SHARDED = [
    piper.Place({}, devices=[0, 1]),
    piper.Replicate({}, shard_params=True),
    piper.Split({}, num_microbatches=2),
]


def compiled(how=SHARDED, model=None, **options):
    given = {"optimizer": adamw, "backend": "inprocess", "verify_capture": False, **options}
    model = copy.deepcopy(model or Model(3.0)).double()
    return piper.compile(model, mse, how, batch_of(0), **given)


@pytest.fixture(scope="module")
def trainer():
    """One for all tests: a refusal leaves it as it was."""
    with compiled() as trainer:
        trainer.step(*batch_of(0))
        yield trainer


@pytest.fixture(scope="module")
def original(trainer, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "original"
    trainer.save(path)
    return path


@pytest.fixture
def saved(original, tmp_path):
    """A checkpoint to be damaged."""
    return shutil.copytree(original, tmp_path / "saved")


def edit(saved, change):
    path = saved / "index.json"
    index = json.loads(path.read_text())
    change(index)
    try:  # so that what is refused is refused for itself, not for a digest that does not fit
        path.write_bytes(seal(msgspec.convert(index, Index)))
    except msgspec.ValidationError:
        path.write_text(json.dumps(index))


def state_of(trainer):
    snapshot = trainer._backend.snapshot()
    tensors = [*snapshot.parameters.values()]
    for entries in snapshot.optimizer.state.values():
        tensors += entries.values()
    return tensors


def assert_refused(trainer, path, message):
    trainer.step(*batch_of(1))
    before, steps = state_of(trainer), trainer.steps_done
    with pytest.raises(CheckpointError, match=message) as caught:
        trainer.load(path)
    assert str(path) in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(state_of(trainer), before, strict=True))
    assert trainer.steps_done == steps
    trainer.step(*batch_of(2))


def test_an_undamaged_one_is_taken(trainer, saved):
    expected = piper.Checkpoint.open(saved)
    trainer.step(*batch_of(1))
    trainer.load(saved)
    assert trainer.steps_done == expected.step == 1
    for name, tensor in expected.weights(["first.weight", "gain"]).items():
        assert torch.equal(trainer.state_dict()[name], tensor)


def test_no_checkpoint(trainer, tmp_path):
    assert_refused(trainer, tmp_path / "nothing", "with an index.json: No such file")


def test_an_index_cut_short(trainer, saved):
    content = (saved / "index.json").read_bytes()
    (saved / "index.json").write_bytes(content[: len(content) // 2])
    assert_refused(
        trainer, saved, "expected the index of a checkpoint: not JSON: Input data was truncated"
    )


@pytest.mark.parametrize(
    ("field", "value"), [("version", 3), ("format", "another"), ("version", 0)]
)
def test_another_format(trainer, saved, field, value):
    def change(index):
        index[field] = value
        index["unknown"] = 1

    edit(saved, change)
    message = f"expected 'piper checkpoint', version 2, found .*{value}"
    assert_refused(trainer, saved, message)


def files_of(saved):
    return sorted(saved.glob("*.safetensors"))


@pytest.mark.parametrize("number", [0, 1])
def test_a_file_cut_short(trainer, saved, number):
    path = files_of(saved)[number]
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 1)
    message = f"device {number}: .*expected {size} bytes, found {size - 1}: the file is truncated"
    assert_refused(trainer, saved, message)


@pytest.mark.parametrize("place", [12, -3])
def test_a_changed_byte(trainer, saved, place):
    path = files_of(saved)[1]
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert_refused(trainer, saved, "another SHA-256.*damaged")


def test_a_lost_file(trainer, saved):
    files_of(saved)[0].unlink()
    assert_refused(trainer, saved, "that every device can read: No such file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i["parameters"].pop("gain"), "missing parameter 'gain'"),
        (
            lambda i: i["parameters"].update(gian=i["parameters"].pop("gain")),
            r"unexpected parameter 'gian' \(did you mean 'gain'\?\)",
        ),
        (
            lambda i: i["parameters"]["first.weight"].update(shape=[3, 5]),
            r"parameter 'first.weight': expected float64\[5, 3\], found float64\[3, 5\]",
        ),
        (
            lambda i: i["parameters"]["gain"].update(dtype="float32"),
            "'gain' was trained in torch.float32, and is trained in torch.float64 here",
        ),
        (
            lambda i: i["buffers"].update(mean=i["parameters"]["gain"]),
            "'mean': .* is another's too",
        ),
        (
            lambda i: i["optimizer"]["tensors"].update(other=i["optimizer"]["tensors"]["gain"]),
            "of 'other': .* is another's too",
        ),
        (lambda i: i.update(optimizer=None), "no state of an optimizer"),
        (
            lambda i: i["optimizer"].update(groups=i["optimizer"]["groups"] * 2),
            "is in another group too",
        ),
        (
            lambda i: i["optimizer"]["groups"][0]["names"].remove("gain"),
            "parameter 'gain' is only in this trainer's parameter group 0",
        ),
        (
            lambda i: i["parameters"]["first.weight"]["pieces"].pop(),
            "'first.weight' has 8 elements of 15",
        ),
        (
            lambda i: i["parameters"]["first.weight"]["pieces"].pop(0),
            "'first.weight' has no piece that begins at element 0",
        ),
    ],
)
def test_state_that_does_not_fit(trainer, saved, change, message):
    edit(saved, change)
    assert_refused(trainer, saved, message)


def test_another_model(original):
    class Narrow(Model):
        def __init__(self):
            super().__init__(3.0)
            self.first, self.second = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)

    with compiled(model=Narrow()) as trainer:
        assert_refused(trainer, original, r"expected float64\[4.*\], found float64\[5")


def test_another_class_of_optimizer(original):
    with compiled(optimizer=sgd) as trainer:
        message = r"expected the state of torch.optim.sgd.SGD.*found that of torch.optim.adamw.Adam"
        assert_refused(trainer, original, message)


def test_a_trainer_without_optimizer_takes_the_weights(original):
    with compiled([piper.Split({}, num_microbatches=2)], optimizer=None) as trainer:
        trainer.load(original)
        weights = piper.Checkpoint.open(original).weights(list(trainer.state_dict()))
        assert all(torch.equal(t, weights[n]) for n, t in trainer.state_dict().items())


def test_weights_start_a_model_without_any(original):
    """On the meta device: every worker reads what it needs."""
    with torch.device("meta"):
        model = Model(3.0).double()
    init = piper.Checkpoint.open(original).weights
    with compiled(strategy([[0], [1]]), model=model, init=init) as trainer:
        weights = init(list(trainer.state_dict()))
        assert all(torch.equal(t, weights[n]) for n, t in trainer.state_dict().items())
    with pytest.raises(CheckpointError, match="no parameter or buffer 'other'"):
        init(["gain", "other"])


# --- saving -------------------------------------------------------------------------------------------


def assert_nothing_new(folder, before=()):
    assert sorted(path.name for path in folder.iterdir()) == sorted(before)


@pytest.mark.parametrize("full", [True, False])
def test_a_path_that_exists(trainer, tmp_path, full):
    (tmp_path / "saved").mkdir()
    if full:
        (tmp_path / "saved" / "mine").write_text("precious")
    with pytest.raises(CheckpointError, match="expected a path that does not exist yet"):
        trainer.save(tmp_path / "saved")
    assert_nothing_new(tmp_path, ["saved"])
    assert_nothing_new(tmp_path / "saved", ["mine"] if full else [])


def test_a_place_that_cannot_be_written(trainer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written: Not a directory"):
        trainer.save(tmp_path / "file" / "saved")
    trainer.step(*batch_of(1))


def test_a_full_disk(trainer, original, tmp_path, monkeypatch):
    """One device fails: no checkpoint appears, earlier ones are as they were, training goes on."""

    def fsync(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = {path.name: path.read_bytes() for path in original.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(tensor_file.os, "fsync", fsync)
        with pytest.raises(CheckpointError, match=r"device 0: .*No space left on device"):
            trainer.save(tmp_path / "saved")
    assert_nothing_new(tmp_path)
    assert {path.name: path.read_bytes() for path in original.iterdir()} == before
    trainer.step(*batch_of(1))
    trainer.save(tmp_path / "saved")
    trainer.load(tmp_path / "saved")


def test_a_file_that_the_driver_does_not_see(trainer, tmp_path, monkeypatch):
    """The worker's machine has another disk."""
    write = trainer._backend.write_files

    def elsewhere(folder):
        written = write(folder)
        (folder / written[1].info.name).unlink()
        return written

    monkeypatch.setattr(trainer._backend, "write_files", elsewhere)
    with pytest.raises(
        CheckpointError, match=r"device 1 wrote .* the driver finds none: save to a"
    ):
        trainer.save(tmp_path / "saved")
    assert_nothing_new(tmp_path)


def test_an_interrupt_leaves_no_half_written_checkpoint(tmp_path, monkeypatch):
    def interrupted(*arguments, **keywords):
        raise KeyboardInterrupt

    with compiled() as trainer:
        trainer.save(tmp_path / "first")
        monkeypatch.setattr(api, "merge_files", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.save(tmp_path / "second")
    assert_nothing_new(tmp_path, ["first"])


def test_kept_gradients_are_not_saved(trainer, tmp_path):
    trainer.step(*batch_of(1), update=False)
    with pytest.raises(StateError, match="gradients of 1 steps with update=False are kept"):
        trainer.save(tmp_path / "saved")
    assert_nothing_new(tmp_path)
    trainer.step(*batch_of(2))
    trainer.save(tmp_path / "saved")


def test_loading_drops_kept_gradients(trainer, original):
    trainer.load(original)
    expected = trainer.step(*batch_of(3)).loss, state_of(trainer)
    trainer.step(*batch_of(1), update=False)
    trainer.load(original)
    found = trainer.step(*batch_of(3)).loss, state_of(trainer)
    assert found[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


class Remembering(torch.optim.SGD):
    """Keeps something besides tensors for each parameter."""

    what: object = None

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["seen"] = type(self).what


@pytest.mark.parametrize("value", [3, (1.5, None), float("inf"), {"a": [True]}])
def test_an_optimizer_that_keeps_plain_values(value, tmp_path, monkeypatch):
    monkeypatch.setattr(Remembering, "what", value)
    optimizer = lambda p: Remembering(p, lr=0.1, momentum=0.9)  # noqa: E731
    with compiled(optimizer=optimizer) as trainer:
        trainer.step(*batch_of(0))
        trainer.save(tmp_path / "saved")
        monkeypatch.setattr(Remembering, "what", None)
        trainer.step(*batch_of(1))
        trainer.load(tmp_path / "saved")
        state = trainer._backend.snapshot().optimizer.state
    assert [entries["seen"] for entries in state.values()] == [value] * 5


def test_an_optimizer_that_keeps_anything_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Remembering, "what", object())
    with compiled(optimizer=lambda p: Remembering(p, lr=0.1)) as trainer:
        trainer.step(*batch_of(0))
        with pytest.raises(CheckpointError, match="entry 'seen' of the optimizer's state for 'f"):
            trainer.save(tmp_path / "saved")
        assert_nothing_new(tmp_path)
        trainer.step(*batch_of(1))


def test_metadata(trainer, tmp_path):
    given = {"epoch": 3, "best": (0.25, "b"), "where": {"shard": [1, 2], "none": None}}
    trainer.save(tmp_path / "saved", metadata=given)
    assert piper.Checkpoint.open(tmp_path / "saved").metadata == given
    with pytest.raises(CheckpointError, match=r"metadata\['f'\] is a builtin_function"):
        trainer.save(tmp_path / "other", metadata={"f": len})
    assert_nothing_new(tmp_path, ["saved"])


def test_a_closed_trainer(original, tmp_path):
    with compiled() as trainer:
        pass
    for call in (lambda: trainer.save(tmp_path / "saved"), lambda: trainer.load(original)):
        with pytest.raises(StateError, match="this trainer is closed"):
            call()


def test_a_file_lost_while_it_is_read_closes_the_trainer(original, monkeypatch):
    """The state is half overwritten, so nobody may go on with it."""
    from piper.runtime.checkpoint.reader import Checkpoint

    def lose(self, files):
        return None

    with compiled() as trainer:
        copied = shutil.copytree(original, original.parent / "lost")
        files_of(copied)[1].unlink()
        monkeypatch.setattr(Checkpoint, "damage", lose)
        with pytest.raises(CheckpointError, match="could not read"):
            trainer.load(copied)
        with pytest.raises(RunError, match="closed after CheckpointError"):
            trainer.step(*batch_of(1))


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_processes_write_and_read_their_own_files(tmp_path, monkeypatch):
    """Saved by processes and loaded by threads, and the other way round; a relative path is the
    driver's.
    """
    model = Model(3.0, tied=True)
    pipeline = strategy([[0], [1]])
    with compiled(pipeline, model) as threads, compiled(model=model, backend="ray") as processes:
        monkeypatch.chdir(tmp_path)  # the workers stay where they are
        first = processes.step(*batch_of(0)).loss
        processes.save("one")
        expected = processes.step(*batch_of(1)).loss
        threads.load("one")
        assert threads.step(*batch_of(1)).loss == pytest.approx(expected, rel=1e-12)
        threads.save("two")
        wanted = threads.step(*batch_of(2)).loss
        processes.load("two")
        assert processes.step(*batch_of(2)).loss == pytest.approx(wanted, rel=1e-12)
        damaged = shutil.copytree("two", "three")
        files_of(tmp_path / damaged)[1].write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"device 1: .*found 0"):
            processes.load("three")
        assert processes.steps_done == 3
        processes.load("one")
        assert processes.step(*batch_of(1)).loss == expected
    assert first != expected
    assert_nothing_new(tmp_path, ["one", "two", "three"])

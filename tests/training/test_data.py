import itertools
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from piper.errors import ConfigError
from piper.training.data import TextBatches, load_corpus, standard_library


@pytest.fixture
def numbered(tmp_path):
    """40 000 bytes in which any four in a row say where they stand."""
    path = tmp_path / "numbered.bin"
    path.write_bytes(np.arange(10_000, dtype=">u4").tobytes())
    return path


def batches(path, **options):
    return TextBatches(**{"batch_size": 4, "seq_len": 16, "files": (str(path),), **options})


def positions(windows, data):
    """Where each row of *windows* starts in *data*."""
    text = data.tobytes()
    return [text.find(bytes(row.tolist())) for row in windows]


def test_targets_are_the_inputs_one_byte_ahead(numbered):
    inputs, targets = batches(numbered)(3)
    assert inputs.dtype is targets.dtype is torch.int64
    assert inputs.shape == targets.shape == (4, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert all(position >= 0 for position in positions(targets, load_corpus((str(numbered),)).data))


def test_a_batch_depends_on_seed_and_step_alone(numbered):
    first = batches(numbered, seed=5)
    expected = first(7)[0]
    first(8)
    assert torch.equal(first(7)[0], expected)
    assert torch.equal(pickle.loads(pickle.dumps(first))(7)[0], expected)
    assert not torch.equal(first(8)[0], expected)
    assert not torch.equal(batches(numbered, seed=6)(7)[0], expected)


def test_pickling_does_not_carry_the_corpus(numbered):
    data = batches(numbered)
    data(0)
    assert len(pickle.dumps(data)) < 1000


def test_no_held_out_byte_is_ever_trained_on(numbered):
    data = batches(numbered, batch_size=64)
    corpus = data.corpus
    seen = np.zeros(len(corpus.data), dtype=bool)
    for step in range(200):
        for start in positions(data(step)[0], corpus.data):
            seen[start : start + 17] = True
    held_out = np.zeros_like(seen)
    for inputs, _ in batches(numbered).held_out_batches():
        for start in positions(inputs, corpus.data):
            held_out[start : start + 17] = True
    assert held_out.sum() > 3_000
    assert seen.sum() > 30_000
    assert not (seen & held_out).any()


def test_the_two_parts_cover_the_corpus_in_the_asked_proportion(numbered):
    corpus = load_corpus((str(numbered),), held_out=0.25)
    spans = sorted(corpus.train + corpus.held_out)
    assert spans[0][0] == 0
    assert spans[-1][1] == len(corpus.data)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))
    kept = sum(stop - start for start, stop in corpus.held_out)
    assert kept / len(corpus.data) == pytest.approx(0.25, abs=0.01)


def test_held_out_windows_never_repeat_a_target(numbered):
    data = batches(numbered)
    starts = [
        start
        for inputs, _ in data.held_out_batches()
        for start in positions(inputs, data.corpus.data)
    ]
    gaps = np.diff(sorted(starts))
    assert len(starts) > 100
    assert (gaps >= 16).all()


def test_held_out_limit_spreads_over_the_held_out_text(numbered):
    data = batches(numbered)
    few = list(data.held_out_batches(limit=2))
    again = list(data.held_out_batches(limit=2))
    assert len(few) == 2
    assert all(torch.equal(a[0], b[0]) for a, b in zip(few, again, strict=True))
    starts = [start for inputs, _ in few for start in positions(inputs, data.corpus.data)]
    assert max(starts) - min(starts) > 20_000


def test_globs_are_read_in_sorted_order_up_to_the_cap(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt", "skipped.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name * 50)
    corpus = load_corpus((str(tmp_path / "**/*.txt"),))
    assert [path.name for path in corpus.files] == ["a.txt", "b.txt", "c.txt"]
    assert corpus.data.tobytes().startswith(b"a.txta.txt")
    capped = load_corpus((str(tmp_path / "**/*.txt"),), max_bytes=300)
    assert [path.name for path in capped.files] == ["a.txt", "b.txt"]
    assert len(capped.data) == 300


def test_the_default_corpus_is_the_standard_library_without_tests():
    paths = standard_library()
    names = {path.name for path in paths}
    assert {"argparse.py", "tokenize.py"} <= names
    assert not any("site-packages" in path.parts or "test" in path.parts for path in paths)
    inputs, _ = TextBatches(batch_size=2, seq_len=64, max_bytes=500_000)(0)
    assert inputs.min() >= 0
    assert inputs.max() < 256


def test_another_process_draws_the_same_batch():
    program = (
        "from piper.training.data import TextBatches\n"
        "print(TextBatches(batch_size=2, seq_len=8, seed=3, max_bytes=200_000)(11)[0].tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    here = TextBatches(batch_size=2, seq_len=8, seed=3, max_bytes=200_000)(11)[0].tolist()
    assert done.stdout.strip() == str(here)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.txt: expected a text file"):
        batches(tmp_path / "gone.txt")(0)


def test_a_folder_is_named_as_such(tmp_path):
    with pytest.raises(ConfigError, match="found a folder"):
        batches(tmp_path)(0)


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    path = tmp_path / "secret.txt"
    path.write_text("text" * 100)

    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(ConfigError, match=r"secret\.txt: .*Permission denied"):
        batches(path)(0)


def test_an_empty_file_is_named(tmp_path):
    path = tmp_path / "empty.txt"
    path.touch()
    with pytest.raises(ConfigError, match=r"empty\.txt: expected text, found an empty file"):
        batches(path)(0)


@pytest.mark.parametrize("size", [1, 20, 150])
def test_a_corpus_too_short_for_a_sequence_is_named(tmp_path, size):
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * size)
    data = batches(path, seq_len=128)
    with pytest.raises(
        ConfigError, match=r"short\.txt: expected training text of at least 129 bytes"
    ):
        data(0)


def test_held_out_text_too_short_for_a_batch_is_named(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * 2000)
    data = batches(path, seq_len=64, batch_size=8)
    data(0)
    with pytest.raises(ConfigError, match=r"short\.txt: .*batch of 8 sequences of 64 bytes, found"):
        list(data.held_out_batches())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size: expected an integer >= 1, found 0"),
        ({"seed": -1}, "seed: expected an integer >= 0, found -1"),
        ({"held_out": 0.9}, "held_out: expected 0 < held_out <= 0.5, found 0.9"),
    ],
)
def test_bad_numbers_are_refused(numbered, options, message):
    with pytest.raises(ConfigError, match=message):
        batches(numbered, **options)(0)

import pytest
from typer.testing import CliRunner

from piper.backends.workers import WorkerBackend
from piper.cli.main import app

SECTIONS = {
    "model": "num_layers = 2\nwidth = 16\nnum_heads = 2\nmlp_ratio = 2",
    "data": 'files = ["text.txt"]\nheld_out = 0.25',
    "strategy": 'schedule = "1f1b"\ngroups = [[0], [1]]\nnum_microbatches = 2',
    "optimizer": "lr = 1e-2",
    "train": "steps = 5\nbatch_size = 4\nseq_len = 8\neval_every = 2\neval_batches = 2\n"
    'backend = "inprocess"',
}


@pytest.fixture
def write(tmp_path):
    """Writes a small configuration, with sections of its own in place of the usual ones, and its
    text.
    """
    text = "".join(f"the {i}th line counts {i * i}\n" for i in range(200))
    (tmp_path / "text.txt").write_text(text)

    def write(name="run.toml", **sections):
        chosen = {**SECTIONS, **sections}
        path = tmp_path / name
        path.write_text("\n".join(f"[{name}]\n{body}" for name, body in chosen.items()))
        return path

    return write


@pytest.fixture
def piper(tmp_path, monkeypatch):
    """Runs a command of piper in a folder of its own; the result has exit_code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments):
        return CliRunner().invoke(app, list(map(str, arguments)))

    return run


@pytest.fixture
def started(monkeypatch):
    """How many devices each backend that was started has."""
    found = []
    start = WorkerBackend.start

    def record(self, num_devices):
        found.append(num_devices)
        start(self, num_devices)

    monkeypatch.setattr(WorkerBackend, "start", record)
    return found

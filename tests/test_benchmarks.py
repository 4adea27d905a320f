"""The benchmarks are programs that no other test imports: a name that moved is found here, not when
somebody measures.
"""

import importlib
import sys
from pathlib import Path

import pytest

MODULES = sorted(path.stem for path in (Path(__file__).parent.parent / "benchmarks").glob("*.py"))


def test_there_are_benchmarks():
    assert "throughput" in MODULES


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_is_imported_and_explains_itself(name, monkeypatch, capsys):
    module = importlib.import_module(f"benchmarks.{name}")
    assert module.__doc__
    if not hasattr(module, "main"):
        return
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stopped:
        module.main()
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")

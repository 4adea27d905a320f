"""A process that keeps what it frees does not have the system zero it anew."""

import subprocess
import sys

import pytest

_PROGRAM = """
import resource
import sys
import torch
from piper.backends.ray import _Actor
from piper.devices.heap import keep_freed_memory

def use(mib):
    for _ in range(6):
        blocks = [torch.ones(mib << 18) for _ in range(3)]

def faults(mib):
    use(mib)
    use(mib)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    use(mib)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "keeps":
    assert keep_freed_memory()
elif sys.argv[1] == "worker":
    _Actor(0, 1, 1, 10.0, internals=False)
print(*(faults(mib) for mib in (1, 24, 64)))
"""


def faults(process: str) -> list[int]:
    """Pages that the system had to provide again, using blocks of 1, 24 and 64 MiB."""
    command = [sys.executable, "-c", _PROGRAM, process]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [int(number) for number in found.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_what_was_freed_is_used_again():
    assert max(faults("keeps")) < 200
    assert max(faults("worker")) < 200


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_otherwise_the_system_provides_it_anew():
    """The largest blocks in any case; of smaller ones it depends on what else is in the heap."""
    assert faults("does not")[-1] > 1000

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from piper.cli import doctor as module
from piper.cli.doctor import (
    Status,
    check_cores,
    check_gloo,
    check_gpus,
    check_memory,
    check_python,
    check_ray,
    check_shared_memory,
    check_threads,
    check_torch,
    doctor,
    gloo_pair,
)


def printed():
    out = io.StringIO()
    ready = doctor(Console(file=out, width=400))
    return ready, out.getvalue()


def test_this_machine_is_ready_and_every_check_has_a_row():
    ready, text = printed()
    assert ready
    for subject in (
        "Python",
        "PyTorch",
        "Ray",
        "network",
        "CPU cores",
        "memory",
        "threads",
        "GPUs",
    ):
        assert subject in text
    assert torch.__version__ in text
    assert text.rstrip().splitlines()[-1].startswith("Ready")


def test_one_failure_makes_the_machine_not_ready(monkeypatch):
    def refuse():
        raise RuntimeError("connection refused\nmore lines")

    monkeypatch.setattr(module, "gloo_pair", refuse)
    ready, text = printed()
    assert not ready
    assert "connection refused" in text
    assert "more lines" not in text
    assert "Not ready: 1 failed" in text


@pytest.mark.parametrize(
    ("finding", "status", "found", "remedy"),
    [
        (check_python((3, 11, 0)), Status.OK, "3.11.0", ""),
        (check_python((3, 10, 9)), Status.FAIL, "3.10.9", "install Python 3.11"),
        (check_torch("2.13.0+cpu"), Status.OK, "tested", ""),
        (check_torch("2.13.1"), Status.OK, "tested", ""),
        (check_torch("2.10.0"), Status.FAIL, "2.10.0", "pip install 'torch=="),
        (check_torch("9.0.0a0+git123"), Status.FAIL, "9.0.0a0", "pip install 'torch=="),
        (check_ray("2.60.0"), Status.OK, "2.60.0", ""),
        (check_ray("2.9.3"), Status.FAIL, "needs 2.40", "pip install 'ray>=2.40'"),
        (check_ray(None), Status.WARN, "not installed", "inprocess"),
        (check_cores(2), Status.OK, "2", ""),
        (check_cores(1), Status.WARN, "1", "take turns"),
        (check_memory(16.0), Status.OK, "16.0 GB", ""),
        (check_memory(1.5), Status.WARN, "1.5 GB", "fewer workers"),
        (check_memory(None), Status.WARN, "could not be read", "4 GB"),
        (check_shared_memory(2.0), Status.OK, "2.0 GB", ""),
        (check_shared_memory(0.06), Status.WARN, "0.1 GB", "--shm-size"),
        (check_shared_memory(None), Status.WARN, "missing", "tmpfs"),
        (check_threads(None, 2), Status.OK, "not set", ""),
        (check_threads("1", 2), Status.OK, "OMP_NUM_THREADS=1", ""),
        (check_threads("8", 2), Status.WARN, "more than the 2 cores", "set it to 1"),
        (check_threads("many", 2), Status.WARN, "'many'", "unset"),
        (check_threads("0", 2), Status.WARN, "'0'", "unset"),
        (check_gpus(()), Status.OK, "none", ""),
        (check_gpus(("H200", "H200")), Status.OK, "2: H200", ""),
    ],
)
def test_a_check_says_what_was_found_and_what_to_do(finding, status, found, remedy):
    assert finding.status is status
    assert found in finding.found
    assert remedy in finding.remedy
    assert bool(finding.remedy) == (status is not Status.OK)


def test_two_ranks_that_never_meet_are_a_failure_with_a_remedy():
    def hang():
        raise TimeoutError("no connection within 15 s")

    finding = check_gloo(hang)
    assert finding.status is Status.FAIL
    assert "no connection" in finding.found
    assert "GLOO_SOCKET_IFNAME" in finding.remedy


def test_a_gloo_that_computes_wrongly_is_noticed(monkeypatch):
    monkeypatch.setattr(torch, "equal", lambda left, right: False)
    with pytest.raises(RuntimeError, match="expected a sum of 3"):
        gloo_pair()


def test_the_examination_leaves_no_process_group_behind():
    gloo_pair()
    assert not torch.distributed.is_initialized()


def test_a_control_group_limits_cores_and_memory(monkeypatch):
    limits = {
        "/sys/fs/cgroup/cpu.max": ["100000", "100000"],
        "/sys/fs/cgroup/memory.max": ["3000000000"],
        "/sys/fs/cgroup/memory.current": ["1000000000"],
    }
    monkeypatch.setattr(module, "_words", lambda path: limits.get(str(path), []))
    monkeypatch.setattr(module, "_lines", lambda path: ["MemAvailable:  99000000 kB"])
    assert module.usable_cores() == 1
    assert module.available_memory_gb() == pytest.approx(2.0)


def test_without_a_control_group_the_system_counts(monkeypatch):
    monkeypatch.setattr(
        module,
        "_words",
        lambda path: ["max", "100000"] if path == Path("/sys/fs/cgroup/cpu.max") else [],
    )
    monkeypatch.setattr(module, "_lines", lambda path: ["MemAvailable:  5000000 kB"])
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    assert module.usable_cores() == 3
    assert module.available_memory_gb() == pytest.approx(5.12)

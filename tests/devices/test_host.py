"""Host memory of a CPU device: contents, layout, sharing, asynchrony, and that nothing is left of
it.
"""

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from piper.devices import host
from piper.devices.cpu import CpuDevice
from piper.devices.host import PAGE, HostPool
from piper.errors import RunError
from piper.ids import Stream

OUT, IN = Stream("offload:out"), Stream("offload:in")


@pytest.fixture
def device():
    found = CpuDevice()
    yield found
    found.synchronize()


def there_and_back(device, tensors):
    copies, handle = device.to_host(tensors, OUT)
    handle.wait()
    found, handle = device.from_host(copies, IN)
    handle.wait()
    assert handle.done()
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_contents_shape_and_strides_come_back(device, dtype):
    base = torch.arange(24).view(2, 3, 4).to(dtype)
    tensors = [base.transpose(0, 2), torch.tensor(3).to(dtype), torch.zeros(0, 2).to(dtype)]
    tensors.append(torch.arange(3).to(dtype).expand(5, 3))
    for tensor, found in zip(tensors, there_and_back(device, tensors), strict=True):
        assert torch.equal(found, tensor)
        assert (found.dtype, found.stride()) == (tensor.dtype, tensor.stride())
        assert found.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
        assert tensor.numel() == 0 or found.data_ptr() != tensor.data_ptr()


def test_tensors_that_share_memory_are_copied_once(device):
    whole = torch.randn(6, 4)
    left, right = whole.chunk(2, dim=1)
    copies, handle = device.to_host([left, right, torch.ones(3)], OUT)
    handle.wait()
    assert device.host_bytes == 24 * 4 + 12
    found, handle = device.from_host(copies[:2], IN)
    handle.wait()
    assert torch.equal(found[0], left)
    assert torch.equal(found[1], right)
    assert found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()


def test_memory_is_given_back_and_used_again(device):
    for _ in range(3):
        copies, handle = device.to_host([torch.randn(PAGE)], OUT)
        handle.wait()
        assert device.host_bytes == 4 * PAGE
        del copies, handle
        gc.collect()
        assert device.host_bytes == 0
    assert device._host.pool._size == 4 * PAGE


def test_the_device_goes_on_while_copies_are_under_way(device, monkeypatch):
    """Each direction has a thread; nothing waits for a copy but who waits for its handle."""
    go, copied = threading.Event(), host._copy
    threads = []

    def slow(*arguments):
        threads.append(threading.current_thread().name)
        assert go.wait(60)
        copied(*arguments)

    tensor = torch.randn(8)
    (before,), handle = device.to_host([tensor], OUT)
    handle.wait()
    monkeypatch.setattr(host, "_copy", slow)
    _, out = device.to_host([torch.randn(8)], OUT)
    (back,), into = device.from_host([before], IN)
    assert not out.done()
    assert not into.done()
    go.set()
    out.wait()
    into.wait()
    assert torch.equal(back, tensor)
    assert {name.rpartition(" ")[2] for name in threads} == {OUT, IN}


def test_host_memory_is_kept_for_a_copy_that_is_under_way(device, monkeypatch):
    """The plan frees the host's copy as soon as the copy back was issued."""
    go, copied = threading.Event(), host._copy
    tensor = torch.randn(8)
    copies, handle = device.to_host([tensor], OUT)
    handle.wait()
    monkeypatch.setattr(host, "_copy", lambda *a: go.wait(60) and copied(*a))
    (back,), into = device.from_host(copies, IN)
    del copies
    gc.collect()
    assert device.host_bytes == 32
    go.set()
    into.wait()
    assert torch.equal(back, tensor)


def test_a_failed_copy_is_raised_where_it_is_waited_for(device, monkeypatch):
    def fail(*_):
        raise OSError("disk on fire")

    monkeypatch.setattr(host, "_copy", fail)
    _, handle = device.to_host([torch.ones(2)], OUT)
    with pytest.raises(RunError, match="between device and host failed: disk on fire"):
        handle.wait()


def test_threads_end_with_the_step(device):
    before = threading.active_count()
    there_and_back(device, [torch.ones(2)])
    assert threading.active_count() == before + 2
    device.synchronize()
    assert threading.active_count() == before
    there_and_back(device, [torch.ones(2)])
    device.abandon()
    assert threading.active_count() == before


def test_no_room_is_said_before_anything_is_written(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunError, match=r"no room for \d+ bytes of offloaded.*No space left"):
        HostPool().take(10)


def test_nothing_is_left_of_a_process_that_is_killed(tmp_path: Path):
    program = (
        "import torch; from piper.devices.cpu import CpuDevice; d = CpuDevice()\n"
        "c, h = d.to_host([torch.ones(1000)], 'out'); h.wait(); print(d.host_bytes, flush=True)\n"
        "import time; time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline().strip() == "4000"
        process.send_signal(signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []

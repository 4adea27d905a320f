"""Live bytes of a process, measured from outside what runs: storages after every operator, and the
resident set.
"""

import ctypes
import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""Lets the C library give memory back at once, so that the resident set follows the tensors."""

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_LIBC = ctypes.CDLL(None)


class Live(TorchDispatchMode):
    """The bytes of all storages that are alive, of those that operators made while it was entered,
    or that were shown to it.

    Counted after each operator: what an operator allocates and gives back itself does not count,
    nor what gloo does. A storage counts with the size that it has at the time (FSDP2 resizes
    storages to nothing instead of giving them up).
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._counting = False
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operators come by themselves
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        known = len(self._made)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self.show(leaf)
        # FSDP2's own operators, and those that write to given tensors, follow a storage's resize.
        grown = len(self._made) > known or func.namespace != "aten" or "out" in (kwargs or {})
        if self._counting and grown:
            self.peak = max(self.peak, self.now())
        return result

    def show(self, tensor: torch.Tensor) -> None:
        """Count the storage of *tensor* as long as it lives."""
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 (the address of torch's storage)
        if key not in self._made:
            self._made[key] = StorageWeakRef(storage)

    def now(self) -> int:
        """Bytes that are alive."""
        total = 0
        # A copy: giving up a storage may run finalizers, which may call operators.
        for key, weak in list(self._made.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)  # noqa: SLF001
            if storage is None:
                self._made.pop(key, None)
            else:
                total += storage.nbytes()
        return total

    def measure(self, step: Callable[[], object]) -> int:
        """The most that is alive during *step*."""
        gc.collect()
        self.peak, self._counting = self.now(), True
        with self:
            step()
        self._counting = False
        return self.peak


class Resident:
    """How far the resident set grows above what it was when this was made (Linux; else 0)."""

    def __init__(self) -> None:
        self._before = _resident("VmRSS")

    def measure(self, step: Callable[[], object]) -> int:
        """The most bytes during *step*."""
        gc.collect()
        _LIBC.malloc_trim(0)
        if not _CLEAR.exists():
            return 0
        _CLEAR.write_text("5")  # forget the highest so far
        step()
        return _resident("VmHWM") - self._before


def _resident(field: str) -> int:
    if not _STATUS.exists():
        return 0
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"{_STATUS} has no line {field}")

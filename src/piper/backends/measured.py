"""Measure how much memory a plan uses, by running it on threads of this process."""

from collections.abc import Mapping, Sequence

import torch

from piper.backends.inprocess import InProcessBackend
from piper.devices.cpu import CpuDevice
from piper.devices.host import HostTensor
from piper.ids import DeviceId, Stream
from piper.ops.base import Communicator, CommunicatorId, Handle, Tensor
from piper.plan.memory import DeviceMemory
from piper.plan.model import Plan
from piper.runtime.batch import Batch, signature
from piper.runtime.measure import MeasuringWorker
from piper.runtime.optimizer import OptimizerSpec
from piper.runtime.state import Weights

KEY = "measured"


class _Unseen:
    """A copy that nobody sees to be complete before waiting for it, so that chance plays no part;
    *kept* is kept until then.
    """

    def __init__(self, handle: Handle, kept: Sequence[Tensor]) -> None:
        self._handle, self._kept = handle, kept

    def wait(self) -> None:
        """See :class:`~piper.ops.base.Handle`."""
        self._handle.wait()
        self._kept = ()

    def done(self) -> bool:
        """Never."""
        return False


class MeasuredCpu(CpuDevice):
    """A CPU whose copies from the host hold the host's memory until they are waited for."""

    def to_host(
        self, tensors: Sequence[Tensor], stream: Stream
    ) -> tuple[Sequence[HostTensor], Handle]:
        """See :class:`~piper.ops.base.Device`."""
        copies, handle = super().to_host(tensors, stream)
        return copies, _Unseen(handle, ())

    def from_host(
        self, copies: Sequence[Tensor], stream: Stream
    ) -> tuple[Sequence[torch.Tensor], Handle]:
        """See :class:`~piper.ops.base.Device`."""
        tensors, handle = super().from_host(copies, stream)
        return tensors, _Unseen(handle, tuple(copies))


class MeasuredBackend(InProcessBackend):
    """Like :class:`~piper.backends.inprocess.InProcessBackend`, but counts what is alive after
    every instruction: slow.
    """

    def found(self, key: str) -> tuple[DeviceMemory, ...]:
        """What each device used in the last step of plan *key*, in device order."""
        results = self._call_all("found", [{"key": key}] * self._num_devices)
        return tuple(r for r in results if isinstance(r, DeviceMemory))

    def _worker(self, rank: int, num_devices: int) -> MeasuringWorker:
        def communicator(name: CommunicatorId, members: tuple[DeviceId, ...]) -> Communicator:
            return self._hub.communicator(name, members, DeviceId(rank))

        return MeasuringWorker(rank, num_devices, MeasuredCpu, communicator)


def measure(
    plan: Plan,
    batch: Batch,
    weights: Weights,
    optimizer: OptimizerSpec | None = None,
    constants: Mapping[str, torch.Tensor] | None = None,
) -> tuple[DeviceMemory, ...]:
    """The memory that each device uses in a step of *plan*, in device order; see
    :mod:`piper.plan.memory` for what counts.

    It is the second of two steps that is measured: the optimizer makes its state in the first.
    Raises what :class:`~piper.backends.base.Backend` raises.
    """
    with MeasuredBackend() as backend:
        backend.start(plan.num_devices)
        backend.load(KEY, plan, signature(batch), constants)
        backend.initialise(KEY, weights, optimizer)
        backend.run(KEY, [batch, batch], first_step=0)
        return backend.found(KEY)

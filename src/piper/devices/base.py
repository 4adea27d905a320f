"""What the runtime needs from a device beyond the protocol that instructions use."""

from collections.abc import Callable
from typing import ClassVar, Protocol, TypeAlias

import torch

from piper.errors import ConfigError
from piper.ops.base import Device
from piper.registry import Registry

Closure: TypeAlias = Callable[[], None]


class TorchDevice(Device, Protocol):
    """A device of torch, executing one plan. ``torch_device`` is where its tensors live."""

    kind: ClassVar[str]
    torch_device: torch.device

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that what was put aside takes by now."""

    def abandon(self) -> None:
        """Forget what is in flight, after a failure."""

    def start_clock(self) -> float:
        """Begin to take times; the host's ``time.perf_counter()`` by now."""

    def mark(self) -> object:
        """The point in time at which the current stream gets here."""

    def seconds(self, mark: object) -> float:
        """What the host's ``time.perf_counter()`` was at *mark*, which was taken since
        :meth:`start_clock` and has been synchronized with.
        """


DeviceFactory: TypeAlias = Callable[[int], TorchDevice]
"""Takes the index of the device on its machine."""

DEVICES: Registry[DeviceFactory] = Registry("device", ConfigError)

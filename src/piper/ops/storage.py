"""The memory that an instruction takes, as it is planned: what each operation says of itself, apart
from the code that executes it. :mod:`piper.plan.account` adds it up.
"""

from typing import NamedTuple, Protocol

from piper.ids import DeviceId, Slot


class Storage(Protocol):
    """One allocation: a tensor and all its views."""

    nbytes: int


class Storages(Protocol):
    """The storages of one device at one point of its program, and which slots are in them."""

    @property
    def device(self) -> DeviceId:
        """Whose memory it is."""

    def new(self, nbytes: int) -> Storage:
        """An allocation that nothing is in yet."""

    def frame(self, nbytes: int) -> Storage:
        """An allocation that carries a point-to-point message of so many bytes."""

    def of(self, slot: Slot) -> Storage:
        """What *slot*, which is not empty, is in."""

    def nbytes(self, slot: Slot) -> int:
        """Bytes of the tensor that *slot* is for."""

    def is_view(self, leaf: int) -> bool:
        """Whether the microbatches of a leaf of the batch are views of it."""

    def make(self, slot: Slot) -> None:
        """Fill *slot* with a tensor of its own, unless it is state, which is stored in place."""

    def fill(self, slot: Slot, storage: Storage) -> None:
        """Put *slot* in *storage*; it leaves the one that it was in."""

    def empty(self, slot: Slot) -> None:
        """Take *slot* out of its storage."""


class Flight(NamedTuple):
    """Communication in flight: what it keeps alive, and the slots that it fills on completion.

    ``is_send``: it keeps a copy, which is given up when the next communication is issued on its
    stream. ``in_host_memory``: what it keeps is not the device's.
    """

    keeps: tuple[Storage, ...]
    fills: tuple[tuple[Slot, Storage], ...] = ()
    is_send: bool = False
    in_host_memory: bool = False

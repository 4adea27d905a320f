"""Values that are put aside in host memory: a copy out of the device, and a copy back."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Self

from piper.ids import DeviceId, Slot, Stream
from piper.ops.base import (
    CommunicatorId,
    Handle,
    Instruction,
    NodeShape,
    Runtime,
    Site,
    Tensor,
    Work,
    filled,
    instruction,
    work,
)
from piper.ops.storage import Flight, Storage, Storages


class _Copy(Work, frozen=True):
    """Output i is input i elsewhere; nothing leaves the device. Each direction has its own stream,
    so that neither holds up the other.
    """

    def flaws(self, node: NodeShape) -> list[str]:
        texts = (
            []
            if node.inputs == node.outputs
            else [f"{node.inputs} inputs have {node.outputs} copies"]
        )
        if any(len(group) != 1 for group in node.groups):
            texts.append(f"a copy is within one device, found groups {node.groups!r:.80}")
        return texts

    def communicator(self, stream: Stream, group: tuple[DeviceId, ...]) -> CommunicatorId:  # noqa: ARG002
        return ""


@work
class Offload(_Copy, frozen=True):
    """Copy values to host memory. Those that share memory are nodes' inputs together, and are
    copied once.
    """

    def stream(self, stream: Stream, group: tuple[DeviceId, ...]) -> Stream:  # noqa: ARG002
        return Stream(f"{stream}:out")

    @property
    def releases_late(self) -> bool:
        return True

    def lower(self, site: Site) -> Instruction:
        return CopyToHost.at(site)


@work
class Fetch(_Copy, frozen=True):
    """Copy values back that ``Offload`` put into host memory. It starts as early as the planner
    likes, once they are there.
    """

    @property
    def early(self) -> bool:
        return True

    def stream(self, stream: Stream, group: tuple[DeviceId, ...]) -> Stream:  # noqa: ARG002
        return Stream(f"{stream}:in")

    def lower(self, site: Site) -> Instruction:
        return CopyFromHost.at(site)


class _HostCopy(Instruction, frozen=True, kw_only=True):
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    asynchronous: ClassVar[bool] = True

    @classmethod
    def at(cls, site: Site) -> Self:
        """The instruction of the device at *site*."""
        return cls(
            node=site.node,
            stream=site.stream,
            record=site.record,
            inputs=site.inputs,
            outputs=site.outputs,
        )

    def start(self, runtime: Runtime, tensors: list[Tensor]) -> tuple[Sequence[Tensor], Handle]:
        """Begin to copy *tensors*; a list of its own, which may be emptied."""
        raise NotImplementedError

    def reads(self) -> tuple[Slot, ...]:
        return self.inputs

    def writes(self) -> tuple[Slot, ...]:
        return self.outputs

    def bind(self, runtime: Runtime) -> Callable[[], Handle | None]:
        slots, inputs, outputs = runtime.slots, self.inputs, self.outputs

        def launch() -> Handle:
            tensors = [filled(slots[slot]) for slot in inputs]
            copies, handle = self.start(runtime, tensors)
            for slot, copy in zip(outputs, copies, strict=True):
                slots[slot] = copy
            return handle

        return launch

    def describe(self) -> str:
        outputs = ", ".join(f"%{slot}" for slot in self.outputs)
        return f"{self.op} {outputs} = {', '.join(f'%{slot}' for slot in self.inputs)}"


def _copied(
    memory: Storages, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> tuple[Storage, ...]:
    """Put *outputs* in copies of the memory that *inputs* are in, each copied once; that memory."""
    copies: dict[int, tuple[Storage, Storage]] = {}
    for source, target in zip(inputs, outputs, strict=True):
        storage = memory.of(source)
        _, copy = copies.setdefault(id(storage), (storage, memory.new(storage.nbytes)))
        memory.fill(target, copy)
    return tuple(storage for storage, _ in copies.values())


@instruction
class CopyToHost(_HostCopy, frozen=True, kw_only=True):
    """Copy tensors into host memory; complete when they are there and the tensors may be given
    up.
    """

    def fly(self, memory: Storages) -> Flight:
        _copied(memory, self.inputs, self.outputs)
        return Flight(())

    def start(self, runtime: Runtime, tensors: list[Tensor]) -> tuple[Sequence[Tensor], Handle]:
        return runtime.device.to_host(tensors, self.stream)


@instruction
class CopyFromHost(_HostCopy, frozen=True, kw_only=True):
    """Copy tensors back from host memory; complete when they are on the device and the host's
    copies may be given up.
    """

    def fly(self, memory: Storages) -> Flight:
        kept = _copied(memory, self.inputs, self.outputs)
        return Flight(kept, in_host_memory=True)

    def start(self, runtime: Runtime, tensors: list[Tensor]) -> tuple[Sequence[Tensor], Handle]:
        return runtime.device.from_host(tensors, self.stream)

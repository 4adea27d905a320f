"""What collectives over a bucket of tensors share."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Self, TypeAlias

from piper.ids import DeviceId, Slot
from piper.ops.base import (
    Communicator,
    CommunicatorId,
    Device,
    Handle,
    Instruction,
    Message,
    Rendezvous,
    Runtime,
    Site,
    Tensor,
    Then,
    filled,
)

Collect: TypeAlias = Callable[[], Sequence[Tensor]]
"""Makes the outputs once the communication is complete."""


class BucketCollective(Instruction, frozen=True, kw_only=True):
    """Communicate the inputs among ``members`` in one message; ``messages`` are the outputs'."""

    communicator: CommunicatorId
    members: tuple[DeviceId, ...]
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    messages: tuple[Message, ...]

    asynchronous: ClassVar[bool] = True
    role: ClassVar[str]

    @classmethod
    def at(cls, site: Site, **options: object) -> Self:
        """The instruction of the member at *site*; *options* are the subclass's own fields."""
        return cls(
            node=site.node,
            stream=site.stream,
            record=site.record,
            communicator=site.communicator,
            members=site.group,
            inputs=site.inputs,
            outputs=site.outputs,
            messages=site.messages,
            **options,
        )

    def start(
        self, device: Device, communicator: Communicator, tensors: Sequence[Tensor]
    ) -> tuple[Handle, Collect]:
        """Begin; the inputs may be freed or changed as soon as this returns."""
        raise NotImplementedError

    def reads(self) -> tuple[Slot, ...]:
        return self.inputs

    def writes(self) -> tuple[Slot, ...]:
        return self.outputs

    def rendezvous(self) -> Rendezvous:
        return Rendezvous(self.communicator, self.role, self.members, self.messages)

    def bind(self, runtime: Runtime) -> Callable[[], Handle | None]:
        slots, device = runtime.slots, runtime.device
        communicator = runtime.communicator(self.communicator)
        inputs, outputs = self.inputs, self.outputs

        def launch() -> Handle:
            tensors = [filled(slots[slot]) for slot in inputs]
            handle, collect = self.start(device, communicator, tensors)

            def store() -> None:
                for slot, tensor in zip(outputs, collect(), strict=True):
                    slots[slot] = tensor

            return Then(handle, store)

        return launch

    def describe(self) -> str:
        inputs = ", ".join(f"%{slot}" for slot in self.inputs)
        outputs = ", ".join(f"%{slot}" for slot in self.outputs)
        return f"{self.role} {outputs} = {inputs} over {','.join(map(str, self.members))}"

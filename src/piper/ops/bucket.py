"""What collectives over a bucket of tensors share: one flat buffer in, views of it out."""

from collections.abc import Callable
from typing import ClassVar

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
    Tensor,
    Then,
)


class BucketCollective(Instruction, frozen=True, kw_only=True):
    """Copy the inputs into one flat buffer, communicate it among ``members``; outputs are views of it."""

    communicator: CommunicatorId
    members: tuple[DeviceId, ...]
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    messages: tuple[Message, ...]

    asynchronous: ClassVar[bool] = True
    role: ClassVar[str]

    def start(self, communicator: Communicator, flat: Tensor) -> Handle:
        """Communicate *flat* in place."""
        raise NotImplementedError

    def finish(self, device: Device, flat: Tensor) -> None:
        """What remains to be done with *flat* once it is communicated."""

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
        shapes = tuple(message.shape for message in self.messages)

        def launch() -> Handle:
            tensors: list[Tensor] = []
            for slot in inputs:
                tensor = slots[slot]
                assert tensor is not None
                tensors.append(tensor)
            flat = device.flatten(tensors, shapes)

            def store() -> None:
                self.finish(device, flat)
                for slot, tensor in zip(outputs, device.unflatten(flat, shapes), strict=True):
                    slots[slot] = tensor

            return Then(self.start(communicator, flat), store)

        return launch

    def describe(self) -> str:
        inputs = ", ".join(f"%{slot}" for slot in self.inputs)
        outputs = ", ".join(f"%{slot}" for slot in self.outputs)
        return f"{self.role} {outputs} = {inputs} over {','.join(map(str, self.members))}"

"""Point-to-point messages: one transfer node, a send on one device and a posted receive on the
other.
"""

from collections.abc import Callable
from typing import ClassVar

from piper.ids import DeviceId, Slot, Stream
from piper.ops.base import (
    CommunicatorId,
    Handle,
    Instruction,
    Message,
    NodeShape,
    Rendezvous,
    Runtime,
    Site,
    Work,
    filled,
    instruction,
    work,
)
from piper.ops.storage import Flight, Storages


@work
class Transfer(Work, frozen=True):
    """Each group is ``(sender, receiver)``. Every direction between two devices has its own
    communicator and stream, so that sends never block receives.
    """

    def flaws(self, node: NodeShape) -> list[str]:
        if any(len(group) != 2 for group in node.groups):
            return [f"a message has one sender and one receiver, found groups {node.groups!r:.80}"]
        return [] if node.outputs == 1 else [f"a message has one output, found {node.outputs}"]

    def consumes(self, position: int) -> bool:
        return position == 0

    def delivers(self, position: int) -> bool:
        return position == 1

    def communicator(self, stream: Stream, group: tuple[DeviceId, ...]) -> CommunicatorId:
        return self.stream(stream, group)

    def stream(self, stream: Stream, group: tuple[DeviceId, ...]) -> Stream:
        sender, receiver = group
        return Stream(f"{stream}:{sender}>{receiver}")

    def lower(self, site: Site) -> Instruction:
        sender, receiver = site.group
        (message,) = site.messages
        if site.position == 0:
            return Send(
                node=site.node,
                stream=site.stream,
                record=site.record,
                communicator=site.communicator,
                sender=sender,
                receiver=receiver,
                message=message,
                slot=site.inputs[0],
            )
        return PostReceive(
            node=site.node,
            stream=site.stream,
            record=site.record,
            communicator=site.communicator,
            sender=sender,
            receiver=receiver,
            message=message,
            slot=site.outputs[0],
        )


class _Message(Instruction, frozen=True, kw_only=True):
    communicator: CommunicatorId
    sender: DeviceId
    receiver: DeviceId
    message: Message
    slot: Slot

    asynchronous: ClassVar[bool] = True

    def _rendezvous(self, role: str) -> Rendezvous:
        return Rendezvous(self.communicator, role, (self.sender, self.receiver), (self.message,))


@instruction
class Send(_Message, frozen=True, kw_only=True):
    """Send a slot's tensor; complete when the receiver has it."""

    def reads(self) -> tuple[Slot, ...]:
        return (self.slot,)

    def rendezvous(self) -> Rendezvous:
        return self._rendezvous("send")

    def fly(self, memory: Storages) -> Flight:
        return Flight((memory.frame(self.message.nbytes),), is_send=True)

    def bind(self, runtime: Runtime) -> Callable[[], Handle | None]:
        slots, slot = runtime.slots, self.slot
        communicator = runtime.communicator(self.communicator)

        def launch() -> Handle:
            return communicator.send(filled(slots[slot]), 1)

        return launch

    def describe(self) -> str:
        return f"send %{self.slot} to {self.receiver}"


@instruction
class PostReceive(_Message, frozen=True, kw_only=True):
    """Make room for a message and say so to the sender; complete when the message is in the
    slot.
    """

    def writes(self) -> tuple[Slot, ...]:
        return (self.slot,)

    def rendezvous(self) -> Rendezvous:
        return self._rendezvous("receive")

    def fly(self, memory: Storages) -> Flight:
        frame = memory.frame(self.message.nbytes)
        memory.fill(self.slot, frame)
        return Flight((frame,))

    def bind(self, runtime: Runtime) -> Callable[[], Handle | None]:
        slots, slot, message = runtime.slots, self.slot, self.message
        communicator = runtime.communicator(self.communicator)

        def launch() -> Handle:
            slots[slot], handle = communicator.receive(message, 0)
            return handle

        return launch

    def describe(self) -> str:
        return f"post_receive %{self.slot} from {self.sender}"

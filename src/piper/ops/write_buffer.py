"""Store what the forward wrote into the model's buffers."""

from collections.abc import Callable
from typing import ClassVar

from piper.ids import Slot
from piper.ops.base import Handle, Instruction, NodeShape, Runtime, Work, filled, instruction, work


@work
class StoreBuffer(Work, frozen=True):
    """The one input becomes the value of the buffer ``name``; if it is the sum of ``replicas``
    values, each the buffer's old value and a change, the buffer's changes are added up.
    """

    communicates: ClassVar[bool] = False

    def flaws(self, node: NodeShape) -> list[str]:
        texts = [] if self.replicas >= 1 else [f"expected 1 replica or more, found {self.replicas}"]
        if node.inputs < 1 or node.outputs:
            texts.append(
                f"a buffer is stored of one input, found {node.inputs} and {node.outputs} outputs"
            )
        return texts

    name: str
    replicas: int = 1

    def overwrites(self) -> tuple[tuple[str, str], ...]:
        return (("buffer", self.name),)


@instruction
class WriteBuffer(Instruction, frozen=True, kw_only=True):
    """Store ``value``, less ``replicas - 1`` times what the buffer was, in the buffer ``name``,
    whose slot is ``buffer``.
    """

    name: str
    buffer: Slot
    value: Slot
    replicas: int = 1

    def reads(self) -> tuple[Slot, ...]:
        return (self.value,) if self.replicas == 1 else (self.value, self.buffer)

    def writes(self) -> tuple[Slot, ...]:
        return (self.buffer,)

    def stores(self) -> tuple[str, ...]:
        return (self.name,)

    def bind(self, runtime: Runtime) -> Callable[[], Handle | None]:
        slots, state = runtime.slots, runtime.state
        name, value, replicas = self.name, self.value, self.replicas

        def run() -> None:
            state.write_buffer(name, filled(slots[value]), replicas)

        return run

    def describe(self) -> str:
        return f"write_buffer {self.name} = %{self.value}"

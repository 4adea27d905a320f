"""Store what the forward wrote into the model's buffers."""

from collections.abc import Callable

from piper.ids import Slot
from piper.ops.base import Handle, Instruction, Runtime, Work, instruction, work


@work
class StoreBuffer(Work, frozen=True):
    """The one input becomes the value of the buffer ``name``."""

    name: str

    def overwrites(self) -> tuple[tuple[str, str], ...]:
        return (("buffer", self.name),)


@instruction
class WriteBuffer(Instruction, frozen=True, kw_only=True):
    """Store ``value`` in the buffer ``name``, whose slot is ``buffer``."""

    name: str
    buffer: Slot
    value: Slot

    def reads(self) -> tuple[Slot, ...]:
        return (self.value,)

    def writes(self) -> tuple[Slot, ...]:
        return (self.buffer,)

    def bind(self, runtime: Runtime) -> Callable[[], Handle | None]:
        slots, state = runtime.slots, runtime.state
        name, value = self.name, self.value

        def run() -> None:
            tensor = slots[value]
            assert tensor is not None
            state.write_buffer(name, tensor)

        return run

    def describe(self) -> str:
        return f"write_buffer {self.name} = %{self.value}"

"""Take one microbatch's rows of the batch."""

from collections.abc import Callable

from piper.ids import Slot
from piper.ops.base import Handle, Instruction, Message, Runtime, instruction
from piper.ops.storage import Storages


@instruction
class LoadInput(Instruction, frozen=True, kw_only=True):
    """Fill ``slot`` with the rows of global microbatch ``microbatch`` of batch leaf ``leaf``."""

    slot: Slot
    leaf: int
    microbatch: int
    message: Message

    def writes(self) -> tuple[Slot, ...]:
        return (self.slot,)

    def loads(self) -> int:
        return self.leaf

    def place(self, memory: Storages) -> None:
        """Nothing but a view of the batch is needed where that is cut along the first dimension, or
        not at all.
        """
        nbytes = 0 if memory.is_view(self.leaf) else self.message.nbytes
        memory.fill(self.slot, memory.new(nbytes))

    def bind(self, runtime: Runtime) -> Callable[[], Handle | None]:
        slots, context = runtime.slots, runtime.context
        slot, leaf, microbatch = self.slot, self.leaf, self.microbatch

        def run() -> None:
            slots[slot] = context.batch_leaf(leaf, microbatch)

        return run

    def describe(self) -> str:
        return f"load_input %{self.slot} = batch[{self.leaf}] microbatch {self.microbatch}"

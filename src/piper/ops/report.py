"""Hand a microbatch's loss, or its weight, or the gradient's norm to the driver."""

from collections.abc import Callable

from piper.ids import Slot
from piper.ops.base import Handle, Instruction, Runtime, filled, instruction


@instruction
class Report(Instruction, frozen=True, kw_only=True):
    """Report the scalar in ``slot`` as ``name`` (``loss`` or ``weight``) of global microbatch
    ``microbatch``, or as ``grad_norm`` of the step (``microbatch`` 0).
    """

    name: str
    slot: Slot
    microbatch: int

    def reads(self) -> tuple[Slot, ...]:
        return (self.slot,)

    def bind(self, runtime: Runtime) -> Callable[[], Handle | None]:
        slots, context = runtime.slots, runtime.context
        name, slot, microbatch = self.name, self.slot, self.microbatch

        def run() -> None:
            context.report(name, microbatch, filled(slots[slot]))

        return run

    def describe(self) -> str:
        return f"report {self.name} of microbatch {self.microbatch} = %{self.slot}"

"""Make one stream wait for another."""

from collections.abc import Callable

from piper.ids import EventId
from piper.ops.base import Handle, Instruction, Runtime, instruction


@instruction
class Wait(Instruction, frozen=True, kw_only=True):
    """``stream`` goes on only when ``event``, recorded by an earlier instruction, has happened."""

    event: EventId

    def awaits(self) -> EventId:
        return self.event

    def bind(self, runtime: Runtime) -> Callable[[], Handle | None] | None:
        return runtime.device.waiter(self.stream, self.event)

    def describe(self) -> str:
        return f"wait e{self.event}"

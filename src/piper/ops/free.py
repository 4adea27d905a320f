"""Give up values."""

from collections.abc import Callable, Mapping

from piper.ids import Slot
from piper.ops.base import Handle, Instruction, Runtime, filled, instruction


@instruction
class Free(Instruction, frozen=True, kw_only=True):
    """Empty ``slots`` once the stream gets here; their memory is available to later work of that
    stream.
    """

    slots: tuple[Slot, ...]

    def frees(self) -> tuple[Slot, ...]:
        return self.slots

    def bind(self, runtime: Runtime) -> Callable[[], Handle | None]:
        return self._bind(runtime, self.slots)

    def bind_last(
        self,
        runtime: Runtime,
        dying: frozenset[Slot],  # noqa: ARG002
        added: Mapping[Slot, Slot],
    ) -> Callable[[], Handle | None] | None:
        """What was *added* elsewhere never was in its slot."""
        filled = tuple(slot for slot in self.slots if slot not in added)
        return self._bind(runtime, filled) if filled else None

    def _bind(self, runtime: Runtime, mine: tuple[Slot, ...]) -> Callable[[], Handle | None]:
        slots = runtime.slots
        release = runtime.device.releaser(self.stream)

        def run() -> None:
            for slot in mine:
                slots[slot] = None

        def run_release() -> None:
            assert release is not None
            for slot in mine:
                release(filled(slots[slot]))
                slots[slot] = None

        return run if release is None else run_release

    def describe(self) -> str:
        return f"free {', '.join(f'%{slot}' for slot in self.slots)}"

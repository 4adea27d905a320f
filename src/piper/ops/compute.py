"""Run a chunk body."""

from collections.abc import Callable, Mapping
from typing import ClassVar

from piper.ids import BodyId, Slot
from piper.ops.base import (
    ChunkFunction,
    Handle,
    Instruction,
    RandomKey,
    Runtime,
    Work,
    filled,
    instruction,
    work,
)


@work
class Call(Work, frozen=True):
    """The node calls a body. ``rng`` gives, per random slot of the body, the ordinal of that op
    among the random ops of the captured graph.
    """

    communicates: ClassVar[bool] = False

    body: BodyId
    rng: tuple[int, ...] = ()


@instruction
class Compute(Instruction, frozen=True, kw_only=True):
    """``outputs = body(inputs)``. ``microbatch`` is the global number, for random streams."""

    body: BodyId
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    microbatch: int
    rng: tuple[int, ...] = ()

    def reads(self) -> tuple[Slot, ...]:
        return self.inputs

    def writes(self) -> tuple[Slot, ...]:
        return self.outputs

    def bind(self, runtime: Runtime) -> Callable[[], Handle | None]:
        return self.bind_last(runtime, frozenset(), {})

    def bind_last(
        self, runtime: Runtime, dying: frozenset[Slot], added: Mapping[Slot, Slot]
    ) -> Callable[[], Handle | None]:
        slots, context = runtime.slots, runtime.context
        call = self._function(runtime, added)
        inputs, rng, microbatch = self.inputs, self.rng, self.microbatch
        outputs = tuple(slot for slot in self.outputs if slot not in added)
        # Emptied before the call: the body then gives each up after its last use, as autograd does.
        emptied = tuple(slot for slot in dict.fromkeys(inputs) if slot in dying)

        def run() -> None:
            key = RandomKey(context.seed, context.step, microbatch, rng) if rng else None
            values = [filled(slots[i]) for i in inputs]
            for slot in emptied:
                slots[slot] = None
            results = call(values, key)
            for slot, result in zip(outputs, results, strict=True):
                slots[slot] = result

        return run

    def _function(self, runtime: Runtime, added: Mapping[Slot, Slot]) -> ChunkFunction:
        """The body's code, which adds what is *added* to what is in those slots at the time."""
        positions = tuple(i for i, slot in enumerate(self.outputs) if slot in added)
        if not positions:
            return runtime.function(self.body)
        function, slots = runtime.adding_function(self.body, positions), runtime.slots
        sums = tuple(added[self.outputs[i]] for i in positions)
        return lambda values, key: function(values, key, [filled(slots[s]) for s in sums])

    def describe(self) -> str:
        return f"compute {_names(self.outputs)} = {self.body[:6]}({_names(self.inputs)})"


def _names(slots: tuple[Slot, ...]) -> str:
    return ", ".join(f"%{slot}" for slot in slots)

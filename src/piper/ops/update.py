"""Let the optimizer update parameters from their gradients."""

from collections.abc import Callable

from piper.ids import Slot
from piper.ops.base import Handle, Instruction, Runtime, Tensor, Work, instruction, work


@work
class Update(Work, frozen=True):
    """Inputs: one gradient per name of ``parameters``; then, if ``scaled``, the scalar that all are divided by; then, if ``sharded``, the device's
    slice of each parameter, which is what is updated. Outputs: the updated slices, if ``sharded``."""

    parameters: tuple[str, ...]
    scaled: bool = False
    sharded: bool = False

    def overwrites(self) -> tuple[tuple[str, str], ...]:
        return tuple(("shard" if self.sharded else "parameter", name) for name in self.parameters)


@instruction
class OptimizerStep(Instruction, frozen=True, kw_only=True):
    """Update the named parameters (whose slots are ``parameters``) from ``gradients``, each divided by ``scale``."""

    names: tuple[str, ...]
    parameters: tuple[Slot, ...]
    gradients: tuple[Slot, ...]
    scale: Slot | None = None

    def reads(self) -> tuple[Slot, ...]:
        return self.gradients if self.scale is None else (*self.gradients, self.scale)

    def writes(self) -> tuple[Slot, ...]:
        return self.parameters

    def bind(self, runtime: Runtime) -> Callable[[], Handle | None]:
        slots, state = runtime.slots, runtime.state
        pairs = tuple(zip(self.names, self.gradients, strict=True))
        scale = self.scale

        def run() -> None:
            gradients: dict[str, Tensor] = {}
            for name, slot in pairs:
                gradient = slots[slot]
                assert gradient is not None
                gradients[name] = gradient
            state.update(gradients, None if scale is None else slots[scale])

        return run

    def describe(self) -> str:
        return f"optimizer_step {', '.join(self.names)}"

"""Let the optimizer update parameters from their gradients."""

from collections.abc import Callable, Sequence
from typing import ClassVar

from piper.ids import Slot
from piper.ops.base import Handle, Instruction, NodeShape, Runtime, Work, filled, instruction, work


@work
class Update(Work, frozen=True):
    """Inputs: one gradient per name of ``parameters``; then, if ``scaled``, the scalar that all are
    divided by; then, if there is a ``max_norm`` to which they are clipped, the norm of all
    parameters' gradients; then, if ``sharded``, the device's slice of each parameter, which is what
    is updated. Outputs: the updated slices, if ``sharded``. With ``only_finite`` the norm is an
    input in any case, and nothing changes unless it is finite.
    """

    communicates: ClassVar[bool] = False

    def flaws(self, node: NodeShape) -> list[str]:
        count = len(self.parameters)
        texts = [] if len(set(self.parameters)) == count else ["a parameter is named twice"]
        if self.max_norm is not None and not self.max_norm > 0:
            texts.append(f"expected a positive max_norm, found {self.max_norm}")
        if node.outputs != (count if self.sharded else 0) or node.inputs < count:
            texts.append(
                f"{count} parameters do not fit {node.inputs} inputs and {node.outputs} outputs"
            )
        return texts

    parameters: tuple[str, ...]
    scaled: bool = False
    sharded: bool = False
    max_norm: float | None = None
    only_finite: bool = False

    @property
    def normed(self) -> bool:
        """Whether the norm is an input."""
        return self.only_finite or self.max_norm is not None

    def overwrites(self) -> tuple[tuple[str, str], ...]:
        return tuple(("shard" if self.sharded else "parameter", name) for name in self.parameters)


@instruction
class OptimizerStep(Instruction, frozen=True, kw_only=True):
    """Update the named parameters (whose slots are ``parameters``) from ``gradients``, each divided
    by ``scale`` and then clipped to ``max_norm``, ``grad_norm`` being that of all. With
    ``only_finite`` do nothing unless that is finite.
    """

    names: tuple[str, ...]
    parameters: tuple[Slot, ...]
    gradients: tuple[Slot, ...]
    scale: Slot | None = None
    grad_norm: Slot | None = None
    max_norm: float | None = None
    only_finite: bool = False

    def flaws(self) -> Sequence[str]:
        lengths = (len(self.names), len(self.parameters), len(self.gradients))
        if len(set(lengths)) != 1:
            return [f"names, parameters and gradients have lengths {lengths}"]
        return [] if len(set(self.names)) == len(self.names) else ["a parameter is named twice"]

    def reads(self) -> tuple[Slot, ...]:
        return (
            *self.gradients,
            *(slot for slot in (self.scale, self.grad_norm) if slot is not None),
        )

    def writes(self) -> tuple[Slot, ...]:
        return self.parameters

    def updates(self) -> tuple[tuple[str, Slot], ...]:
        return tuple(zip(self.names, self.parameters, strict=True))

    def bind(self, runtime: Runtime) -> Callable[[], Handle | None]:
        slots, state = runtime.slots, runtime.state
        pairs = tuple(zip(self.names, self.gradients, strict=True))
        scale, norm, max_norm = self.scale, self.grad_norm, self.max_norm
        only_finite = self.only_finite

        def run() -> None:
            gradients = {name: filled(slots[slot]) for name, slot in pairs}
            divisor = None if scale is None else slots[scale]
            measured = None if norm is None else slots[norm]
            state.update(gradients, divisor, measured, max_norm, only_finite=only_finite)

        return run

    def describe(self) -> str:
        return f"optimizer_step {', '.join(self.names)}{self._normed()}"

    def _normed(self) -> str:
        if self.grad_norm is None:
            return ""
        words = [] if self.max_norm is None else [f"clipped to {self.max_norm}"]
        words += ["if finite"] if self.only_finite else []
        return f", norm %{self.grad_norm} {', '.join(words)}"

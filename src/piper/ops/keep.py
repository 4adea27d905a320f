"""Gradients that are kept from one step to a later one, which updates parameters from the sum."""

from collections.abc import Callable, Sequence
from typing import ClassVar

from piper.ids import Slot
from piper.ops.base import (
    Handle,
    Instruction,
    LocalWork,
    NodeShape,
    Runtime,
    Site,
    Tensor,
    filled,
    instruction,
    work,
)


class _Kept(LocalWork, frozen=True):
    """Inputs: one gradient per name, as far as the device has summed it itself; then, if
    ``scaled``, the scalar that all are divided by; then what is kept of each.
    """

    instant: ClassVar[bool] = True

    def flaws(self, node: NodeShape) -> list[str]:
        count = len(self.parameters)
        if node.inputs < count + self.scaled or len(set(self.parameters)) != count:
            return [f"{count} parameters do not fit {node.inputs} inputs"]
        return []

    parameters: tuple[str, ...]
    scaled: bool = False

    def overwrites(self) -> tuple[tuple[str, str], ...]:
        return tuple(("kept", name) for name in self.parameters)

    def _split(self, site: Site) -> tuple[tuple[Slot, ...], Slot | None]:
        """The gradients, and the scale."""
        count = len(self.parameters)
        return site.inputs[:count], site.inputs[count] if self.scaled else None


@work
class Keep(_Kept, frozen=True):
    """Add the gradients to what is kept. No outputs."""

    def lower(self, site: Site) -> Instruction:
        gradients, scale = self._split(site)
        return KeepGradients(
            node=site.node,
            stream=site.stream,
            names=self.parameters,
            gradients=gradients,
            scale=scale,
            kept=site.outputs,
        )


@work
class AddKept(_Kept, frozen=True):
    """Outputs: the gradients and what is kept, added. Nothing is kept afterwards."""

    def lower(self, site: Site) -> Instruction:
        gradients, scale = self._split(site)
        count = len(self.parameters)
        return AddKeptGradients(
            node=site.node,
            stream=site.stream,
            names=self.parameters,
            gradients=gradients,
            scale=scale,
            kept=site.outputs[count:],
            totals=site.outputs[:count],
        )


class _KeptGradients(Instruction, frozen=True, kw_only=True):
    names: tuple[str, ...]
    gradients: tuple[Slot, ...]
    scale: Slot | None
    kept: tuple[Slot, ...]

    def flaws(self) -> Sequence[str]:
        lengths = (len(self.names), len(self.gradients), len(self.kept))
        if len(set(lengths)) != 1:
            return [f"names, gradients and kept have lengths {lengths}"]
        return () if len(set(self.names)) == len(self.names) else ["a parameter is named twice"]

    def reads(self) -> tuple[Slot, ...]:
        scale = () if self.scale is None else (self.scale,)
        return (*self.gradients, *scale, *self.kept)

    def _divided(self, runtime: Runtime) -> Callable[[Slot], Tensor]:
        """A function from the slot of a gradient to the gradient, divided by the scale."""
        slots, device, scale = runtime.slots, runtime.device, self.scale

        def get(slot: Slot) -> Tensor:
            gradient = filled(slots[slot])
            return gradient if scale is None else device.divide(gradient, filled(slots[scale]))

        return get


@instruction
class KeepGradients(_KeptGradients, frozen=True, kw_only=True):
    """Add ``gradients``, each divided by ``scale``, to ``kept``, in place."""

    def writes(self) -> tuple[Slot, ...]:
        return self.kept

    def bind(self, runtime: Runtime) -> Callable[[], Handle | None]:
        slots, device, get = runtime.slots, runtime.device, self._divided(runtime)
        pairs = tuple(zip(self.gradients, self.kept, strict=True))

        def run() -> None:
            for gradient, kept in pairs:
                device.add_(filled(slots[kept]), get(gradient))

        return run

    def describe(self) -> str:
        return f"keep_gradients {', '.join(self.names)}"


@instruction
class AddKeptGradients(_KeptGradients, frozen=True, kw_only=True):
    """``totals`` = ``gradients``, each divided by ``scale``, + ``kept``, which becomes 0."""

    totals: tuple[Slot, ...]

    def flaws(self) -> Sequence[str]:
        if len(self.totals) != len(self.names):
            return [f"names and totals have lengths {(len(self.names), len(self.totals))}"]
        return super().flaws()

    def writes(self) -> tuple[Slot, ...]:
        return (*self.totals, *self.kept)

    def bind(self, runtime: Runtime) -> Callable[[], Handle | None]:
        slots, device, get = runtime.slots, runtime.device, self._divided(runtime)
        triples = tuple(zip(self.gradients, self.kept, self.totals, strict=True))

        def run() -> None:
            for gradient, kept, total in triples:
                before = filled(slots[kept])
                slots[total] = device.add(before, get(gradient))
                device.zero_(before)

        return run

    def describe(self) -> str:
        return f"add_kept_gradients {', '.join(self.names)}"

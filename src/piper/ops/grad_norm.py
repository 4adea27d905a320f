"""The norm of all gradients together: measured in parts where they are, combined, finished.

A *part* is the sum of the squares of some elements (2-norm), or the largest magnitude among them
(infinity norm), as a float64 scalar: squares that a gradient's own element type could not hold are
held.
"""

from collections.abc import Callable
from enum import StrEnum

from piper.ids import Slot
from piper.ops.base import (
    Handle,
    Instruction,
    LocalWork,
    NodeShape,
    ReduceOp,
    Runtime,
    Site,
    filled,
    instruction,
    work,
)


class Norm(StrEnum):
    """Which norm."""

    L2 = "2"
    INF = "inf"

    @property
    def combines(self) -> ReduceOp:
        """How parts become one."""
        return ReduceOp.SUM if self is Norm.L2 else ReduceOp.MAX


@work
class NormPart(LocalWork, frozen=True):
    """The one output is the part of all inputs; if ``scaled``, the last input is the scalar that
    the others are divided by first.
    """

    def flaws(self, node: NodeShape) -> list[str]:
        if node.outputs != 1 or node.inputs < self.scaled:
            return [
                f"a part of a norm is one output, found {node.inputs} inputs and {node.outputs} outputs"
            ]
        return []

    norm: Norm
    scaled: bool = False

    def lower(self, site: Site) -> Instruction:
        (part,) = site.outputs
        return MeasureGradients(
            node=site.node,
            stream=site.stream,
            norm=self.norm,
            gradients=site.inputs[:-1] if self.scaled else site.inputs,
            scale=site.inputs[-1] if self.scaled else None,
            part=part,
        )


@work
class NormSum(LocalWork, frozen=True):
    """The one output is the part that the inputs, any number of parts, are together."""

    def flaws(self, node: NodeShape) -> list[str]:
        return (
            [] if node.outputs == 1 else [f"a part of a norm is one output, found {node.outputs}"]
        )

    norm: Norm

    def lower(self, site: Site) -> Instruction:
        (part,) = site.outputs
        return CombineParts(
            node=site.node, stream=site.stream, norm=self.norm, parts=site.inputs, part=part
        )


@work
class NormRoot(LocalWork, frozen=True):
    """The one output is the norm whose only part is the input."""

    def flaws(self, node: NodeShape) -> list[str]:
        if (node.inputs, node.outputs) != (1, 1):
            return [f"a norm has one input and one output, found {node.inputs} and {node.outputs}"]
        return []

    norm: Norm

    def lower(self, site: Site) -> Instruction:
        (part,), (result,) = site.inputs, site.outputs
        return FinishNorm(
            node=site.node, stream=site.stream, norm=self.norm, part=part, result=result
        )


@instruction
class MeasureGradients(Instruction, frozen=True, kw_only=True):
    """``part`` = what ``gradients``, each divided by ``scale``, add to the norm."""

    norm: Norm
    gradients: tuple[Slot, ...]
    scale: Slot | None
    part: Slot

    def reads(self) -> tuple[Slot, ...]:
        return self.gradients if self.scale is None else (*self.gradients, self.scale)

    def writes(self) -> tuple[Slot, ...]:
        return (self.part,)

    def bind(self, runtime: Runtime) -> Callable[[], Handle | None]:
        slots, device, part = runtime.slots, runtime.device, self.part
        gradients, scale, op = self.gradients, self.scale, self.norm.combines

        def run() -> None:
            tensors = [filled(slots[slot]) for slot in gradients]
            divisor = None if scale is None else filled(slots[scale])
            slots[part] = device.norm_part(tensors, divisor, op)

        return run

    def describe(self) -> str:
        divided = "" if self.scale is None else f" / %{self.scale}"
        return (
            f"measure_gradients %{self.part} = {_names(self.gradients)}{divided}, norm {self.norm}"
        )


@instruction
class CombineParts(Instruction, frozen=True, kw_only=True):
    """``part`` = the sum, or the largest, of ``parts``; 0 of none."""

    norm: Norm
    parts: tuple[Slot, ...]
    part: Slot

    def reads(self) -> tuple[Slot, ...]:
        return self.parts

    def writes(self) -> tuple[Slot, ...]:
        return (self.part,)

    def bind(self, runtime: Runtime) -> Callable[[], Handle | None]:
        slots, device, part = runtime.slots, runtime.device, self.part
        parts, op = self.parts, self.norm.combines

        def run() -> None:
            slots[part] = device.norm_sum([filled(slots[slot]) for slot in parts], op)

        return run

    def describe(self) -> str:
        return f"combine_parts %{self.part} = {_names(self.parts)}, norm {self.norm}"


@instruction
class FinishNorm(Instruction, frozen=True, kw_only=True):
    """``result`` = the norm that ``part``, of all gradients, is for."""

    norm: Norm
    part: Slot
    result: Slot

    def reads(self) -> tuple[Slot, ...]:
        return (self.part,)

    def writes(self) -> tuple[Slot, ...]:
        return (self.result,)

    def bind(self, runtime: Runtime) -> Callable[[], Handle | None]:
        slots, device = runtime.slots, runtime.device
        part, result, op = self.part, self.result, self.norm.combines

        def run() -> None:
            slots[result] = device.norm_root(filled(slots[part]), op)

        return run

    def describe(self) -> str:
        return f"finish_norm %{self.result} = %{self.part}, norm {self.norm}"


def _names(slots: tuple[Slot, ...]) -> str:
    return ", ".join(f"%{slot}" for slot in slots) or "nothing"

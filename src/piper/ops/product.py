"""The product of two scalars."""

from collections.abc import Callable

from piper.ids import Slot
from piper.ops.base import (
    Handle,
    Instruction,
    LocalWork,
    NodeShape,
    Runtime,
    Site,
    filled,
    instruction,
    work,
)


@work
class Product(LocalWork, frozen=True):
    """The one output is the product of the two inputs, a float64 scalar."""

    def flaws(self, node: NodeShape) -> list[str]:
        if (node.inputs, node.outputs) != (2, 1):
            return [
                f"a product has two inputs and one output, found {node.inputs} and {node.outputs}"
            ]
        return []

    def lower(self, site: Site) -> Instruction:
        left, right = site.inputs
        (product,) = site.outputs
        return Multiply(node=site.node, stream=site.stream, left=left, right=right, product=product)


@instruction
class Multiply(Instruction, frozen=True, kw_only=True):
    """``product`` = ``left`` · ``right``."""

    left: Slot
    right: Slot
    product: Slot

    def reads(self) -> tuple[Slot, ...]:
        return (self.left, self.right)

    def writes(self) -> tuple[Slot, ...]:
        return (self.product,)

    def bind(self, runtime: Runtime) -> Callable[[], Handle | None]:
        slots, device = runtime.slots, runtime.device
        left, right, product = self.left, self.right, self.product

        def run() -> None:
            slots[product] = device.multiply(filled(slots[left]), filled(slots[right]))

        return run

    def describe(self) -> str:
        return f"multiply %{self.product} = %{self.left} * %{self.right}"
